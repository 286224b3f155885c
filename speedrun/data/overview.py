"""The contents of a track's folder, from headers and manifest or from every byte."""

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from speedrun.base.console import quantity
from speedrun.base.errors import DataError
from speedrun.base.track import Data, Track
from speedrun.data import shards
from speedrun.data.shards import HEADER_BYTES, MANIFEST, Shard, ShardEntry

_CHUNK_TOKENS = 2**24  #: held in memory at a time
_SHARD_BYTES = 2 * 10**8 + HEADER_BYTES  #: of a shard on the hub: 100 million ids of two bytes
WRITTEN_BYTES = 2 * 10**9  #: for records, plots, compiled programs and locally made shards


class Verified(msgspec.Struct, frozen=True):
    """One valid shard."""

    name: str
    tokens: int
    sha256: str | None  #: None if only header and size were checked

    def __str__(self) -> str:
        return "  ".join(filter(None, [f"{self.tokens:,} tokens", self.sha256]))


class Holding(msgspec.Struct, frozen=True):
    """The folder of a track."""

    track: str
    folder: str
    shards: int  #: files with the names of shards
    expected: int | None  #: shards that the track's recipe needs, including validation; None: any number
    tokens: int
    documents: int | None  #: None without a manifest
    size_bytes: int
    source: str | None  #: of the manifest
    complete: bool  #: enough for `speedrun run`
    problem: str | None

    def lines(self) -> list[str]:
        """Return the lines of `speedrun data list`."""
        lines = [f"{self.track:<16} {'complete' if self.complete else 'incomplete':<10} {self.folder}"]
        if self.shards:
            of = "" if self.expected is None else f" of {self.expected}"
            facts = [f"{self.shards}{of} shards", quantity(self.tokens, "tokens")]
            facts += [] if self.documents is None else [f"{self.documents:,} documents"]
            facts += [quantity(self.size_bytes, "B")]
            facts += [] if self.source is None else [f"from {self.source}"]
            lines.append(f"{'':<16} {' | '.join(facts)}")
        return lines + ([] if self.problem is None else [f"{'':<16} {self.problem}"])


def verify(
    folder: Path, data: Data, *, full: bool, report: Callable[[int, int], None] = lambda *_: None
) -> list[Verified]:
    """Check the shards of a track; return one entry per shard, training shards first.

    If `full`, read every byte: check the digests of track and manifest, ids, the number of documents, and the document
    token at the start of each validation shard. `report` gets bytes read and bytes in total.
    """
    train, val = shards.open_track(folder, data)
    manifest = shards.read_manifest(folder)
    if full:
        for shard in val:
            first, need = shard.read(0, 1)[0], data.document_token
            if first != need:
                raise DataError(f"{shard.path}: begins with id {first}; need {need}: {data.get}")
    verified, every = list[Verified](), (*train, *val)
    sizes = [HEADER_BYTES + 2 * shard.num_tokens for shard in every]
    for shard in every:
        report(sum(sizes[: len(verified)]), sum(sizes))
        entry = manifest.shards.get(shard.path.name) if manifest else None
        digests = {MANIFEST: entry.sha256 if entry else None}
        found = read_whole(shard, data, digests, f"delete it, then: {data.get}") if full else None
        if found and entry and entry.documents != found.documents:
            said = f"{found.documents:,} documents; {MANIFEST} says {entry.documents:,}"
            raise DataError(f"{shard.path}: {said}: {data.get}")
        verified.append(Verified(shard.path.name, shard.num_tokens, found and found.sha256))
    return verified


def read_whole(shard: Shard, data: Data, digests: dict[str, str | None], advice: str) -> ShardEntry:
    """Count the documents of a shard, and compare its digest with the track's and with `digests`, by authority."""
    starts = range(0, shard.num_tokens, _CHUNK_TOKENS)
    chunks = (shard.read(start, min(start + _CHUNK_TOKENS, shard.num_tokens)) for start in starts)
    documents = sum(int(np.count_nonzero(chunk == data.document_token)) for chunk in chunks)
    got = shards.sha256(shard.path)
    for authority, need in {"the track": data.sha256.get(shard.path.name), **digests}.items():
        if need not in (got, None):
            raise DataError(f"{shard.path}: sha256 is {got}; {authority} says {need}; {advice}")
    return ShardEntry(shard.num_tokens, documents, got)


def holding(track: Track) -> Holding:
    """Describe the folder of a track."""
    folder, data = shards.data_folder(track, None), track.data
    paths = [path for pattern in (data.train, data.val) for path in folder.glob(pattern)]
    expected = data.hub.train_shards + 1 if data.hub else len(data.sha256) or None
    tokens, documents, source, problem = 0, None, None, None
    try:
        tokens = sum(shard.tokens for shard in verify(folder, data, full=False))
        if manifest := shards.read_manifest(folder):
            source = manifest.source
            documents = sum(manifest.shards[path.name].documents for path in paths)
        if expected is not None and len(paths) < expected:
            problem = f"{folder}: {len(paths)} shards; the track takes {expected}; {data.get}"
    except DataError as error:
        problem = str(error)
    size_bytes = sum(path.lstat().st_size for path in paths)
    counts = len(paths), expected, tokens, documents, size_bytes
    return Holding(track.id, str(folder), *counts, source, complete=problem is None, problem=problem)


def to_fetch_bytes(track: Track) -> int:
    """Return the bytes that `speedrun data get` would download."""
    here = holding(track)
    if track.data.hub is None or here.expected is None:
        return 0
    return max(0, here.expected - here.shards) * _SHARD_BYTES


def bits_per_byte(loss: float, folder: Path, data: Data) -> float | None:
    """Convert a validation loss, nats per token, to bits per byte: loss * tokens / bytes / ln 2.

    Tokens and bytes are those that the track scores; None if the manifest lacks them.
    """
    manifest = shards.read_manifest(folder)
    if manifest is None or not manifest.scored_bytes or manifest.scored_tokens != data.val_tokens:
        return None
    return loss * data.val_tokens / manifest.scored_bytes / math.log(2)
