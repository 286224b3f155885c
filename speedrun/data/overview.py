"""What is on disk of the data of a track, from headers and manifests, without reading tokens."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from speedrun.data.inventory import ShardEntry, data_folder, open_track, read_manifest
from speedrun.data.shards import HEADER_BYTES
from speedrun.ground.console import quantity
from speedrun.ground.errors import DataError
from speedrun.ground.track import Data, Track

_SHARD_BYTES = 2 * 10**8 + HEADER_BYTES  #: of a shard on the hub: 100 million ids of two bytes
_WRITTEN_BYTES = 2 * 10**9  #: more than records, plots, compiled programs and locally made shards take


class Holding(NamedTuple):
    """One track and its folder."""

    track: str
    folder: str
    shards: int  #: files with the names of shards
    expected: int | None  #: how many the track's recipe needs, validation included; None: any number
    tokens: int  #: in sound shards
    documents: int | None  #: document tokens, where a manifest counts them
    bytes_per_token: float | None  #: of text, where a manifest knows it
    size_bytes: int
    source: str | None  #: the manifest's
    complete: bool  #: `speedrun run` finds what it needs
    problem: str | None  #: why it does not

    def lines(self) -> list[str]:
        """Return what `speedrun data list` prints."""
        of = "" if self.expected is None else f" of {self.expected}"
        facts = [
            f"{self.shards}{of} shards",
            quantity(self.tokens, "tokens"),
            *([] if self.documents is None else [f"{self.documents:,} documents"]),
            *density(self.bytes_per_token),
            quantity(self.size_bytes, "B"),
            *([] if self.source is None else [f"from {self.source}"]),
        ]
        state = "complete" if self.complete else "incomplete"
        details = [" | ".join(facts) if self.shards else None, self.problem]
        return [
            f"{self.track:<16} {state:<10} {self.folder}",
            *(f"{'':<16} {detail}" for detail in details if detail),
        ]


def bytes_per_token(entries: Sequence[ShardEntry]) -> float | None:
    """Return the bytes of text per token, document tokens excluded; None if an entry does not know them."""
    text_bytes = [entry.text_bytes for entry in entries if entry.text_bytes is not None]
    tokens = sum(entry.tokens - entry.documents for entry in entries)
    return sum(text_bytes) / tokens if tokens and len(text_bytes) == len(entries) else None


def density(bytes_per_token: float | None) -> list[str]:
    """Return how to show the bytes of text that a token stands for; nothing if that is unknown."""
    return [] if bytes_per_token is None else [f"{bytes_per_token:.2f} bytes a token"]


def to_fetch_bytes(track: Track, folder: Path | None = None) -> int:
    """Return the bytes that `speedrun data get` would still download."""
    here = holding(track, folder)
    if track.data.hub is None or here.expected is None:
        return 0
    return max(0, here.expected - here.shards) * _SHARD_BYTES


def disk_bytes(track: Track, folder: Path | None = None) -> int:
    """Return the disk space a batch on a track needs: missing data, and what runs write."""
    return to_fetch_bytes(track, folder) + _WRITTEN_BYTES


def holding(track: Track, folder: Path | None = None) -> Holding:
    """Return what the folder of a track holds."""
    folder, data = data_folder(track, folder), track.data
    paths = [path for pattern in (data.train, data.val) for path in folder.glob(pattern)]
    expected = data.hub.train_shards + 1 if data.hub else len(data.sha256) or None
    tokens, documents, density, source, problem = 0, None, None, None, None
    try:
        train, val = open_track(folder, data)
        tokens = sum(shard.num_tokens for shard in (*train, *val))
        if manifest := read_manifest(folder):
            source = manifest.source
            entries = [manifest.shards[path.name] for path in paths]
            documents, density = sum(entry.documents for entry in entries), bytes_per_token(entries)
        if expected is not None and len(paths) < expected:
            problem = f"{folder}: {len(paths)} shards; the track takes {expected}; {data.get}"
    except DataError as error:
        problem = str(error)
    size_bytes = sum(path.lstat().st_size for path in paths)
    return Holding(
        track=track.id,
        folder=str(folder),
        shards=len(paths),
        expected=expected,
        tokens=tokens,
        documents=documents,
        bytes_per_token=density,
        size_bytes=size_bytes,
        source=source,
        complete=problem is None,
        problem=problem,
    )


def bits_per_byte(loss: float, folder: Path, data: Data) -> float | None:
    """Convert a validation loss, nats per token, to bits per byte of text, which compare across tokenizers.

    loss * tokens / bytes / ln 2, over the tokens that the track scores. None if the manifest does not know them.
    """
    manifest = read_manifest(folder)
    if manifest is None or not manifest.scored_bytes or manifest.scored_tokens != data.val_tokens:
        return None
    return loss * data.val_tokens / manifest.scored_bytes / math.log(2)
