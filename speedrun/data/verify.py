"""Verifies a folder of shards against its manifest and its track."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from speedrun.data.inventory import MANIFEST, ShardEntry, open_track, read_manifest
from speedrun.data.overview import bytes_per_token, density
from speedrun.data.shards import Shard, sha256
from speedrun.ground.errors import DataError
from speedrun.ground.track import Data

_CHUNK_TOKENS = 2**24  #: held in memory at a time

Report = Callable[[int, int], None]  #: called with bytes read and bytes in total


class Verified(NamedTuple):
    """One shard that passed."""

    name: str
    tokens: int
    sha256: str | None  #: None if only header and size were checked
    bytes_per_token: float | None  #: of text, where the manifest knows it

    def __str__(self) -> str:
        return "  ".join(
            [f"{self.tokens:,} tokens", *density(self.bytes_per_token), self.sha256 or ""]
        ).rstrip()


def verify(folder: Path, data: Data, *, full: bool, report: Report = lambda *_: None) -> list[Verified]:
    """Check the shards of a track.

    Args:
        folder: of the shards.
        data: what the track says of them.
        full: read every byte: digests against track and manifest, ids, the number of documents, and the
            document token at the start of each validation shard.
        report: shows progress.

    Returns:
        One entry per shard, training shards first.

    Raises:
        DataError: at the first problem.
    """
    train, val = open_track(folder, data)
    manifest = read_manifest(folder)
    entries = manifest.shards if manifest else {}
    if not full:
        return [_verified(shard, None, entries.get(shard.path.name)) for shard in (*train, *val)]
    for shard in val:
        if (first := shard.read(0, 1)[0]) != data.document_token:
            raise DataError(f"{shard.path}: begins with id {first}; need {data.document_token}: {data.get}")
    verified, done = [], 0
    total = sum(shard.path.stat().st_size for shard in (*train, *val))
    for shard in (*train, *val):
        report(done, total)
        verified.append(_verify_bytes(shard, data, entries.get(shard.path.name)))
        done += shard.path.stat().st_size
    return verified


def count_documents(shard: Shard, document_token: int) -> int:
    """Return the number of document tokens in a shard.

    Raises:
        DataError: if an id is outside the vocabulary, or the file changes meanwhile.
    """
    starts = range(0, shard.num_tokens, _CHUNK_TOKENS)
    chunks = (shard.read(start, min(start + _CHUNK_TOKENS, shard.num_tokens)) for start in starts)
    return sum(int(np.count_nonzero(chunk == document_token)) for chunk in chunks)


def _verify_bytes(shard: Shard, data: Data, entry: ShardEntry | None) -> Verified:
    """Compare all bytes of a shard with track and manifest."""
    name, documents, got = shard.path.name, count_documents(shard, data.document_token), sha256(shard.path)
    for need in (data.sha256.get(name, got), entry.sha256 if entry else got):
        if got != need:
            raise DataError(f"{shard.path}: sha256 is {got}; need {need}; delete it, then: {data.get}")
    if entry and entry.documents != documents:
        raise DataError(
            f"{shard.path}: {documents:,} documents; {MANIFEST} says {entry.documents:,}: {data.get}"
        )
    return _verified(shard, got, entry)


def _verified(shard: Shard, digest: str | None, entry: ShardEntry | None) -> Verified:
    return Verified(shard.path.name, shard.num_tokens, digest, bytes_per_token([entry] if entry else []))
