"""Writes shards, and the manifest of their folder."""

from pathlib import Path

import msgspec
import numpy as np

from speedrun.base.errors import DataError
from speedrun.base.wholefile import write_whole
from speedrun.data.shards import MAGIC, MANIFEST, VERSION, Manifest, Shard, open_shard

MAX_TOKENS = 2**31 - 1
UINT16_IDS = 2**16


def write_shard(path: Path, tokens: np.ndarray) -> Shard:
    """Write a shard of tokens [N], integers from 0 to 65,535, atomically, into an existing folder."""
    if tokens.ndim != 1 or not 1 <= tokens.size <= MAX_TOKENS or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(
            f"{path}: got {tokens.dtype}{list(tokens.shape)}; need 1 to {MAX_TOKENS:,} integers in one dimension"
        )
    if tokens.min() < 0 or tokens.max() >= UINT16_IDS:
        raise DataError(f"{path}: ids of {tokens.min()} to {tokens.max()}; need 0 to {UINT16_IDS - 1:,}")
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSION, tokens.size
    write_whole(path, header.tobytes(), np.ascontiguousarray(tokens, "<u2").data)
    return open_shard(path, vocab_size=UINT16_IDS)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, after a new shard is written, but before a downloaded shard gets its name."""
    write_whole(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2), b"\n")
