"""The folder of a track's shards: its manifest, and which shards it must hold."""

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from speedrun.base.errors import DataError, translate_read_errors
from speedrun.base.track import Data, Track
from speedrun.base.wholefile import read_regular, write_whole
from speedrun.data.shards import Shard, open_shard

MANIFEST = "manifest.json"


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The place of a token in a source of text."""

    file: str  #: as the source names it; empty: the start of the source
    row: int  #: index of the document in that file
    token: int = 0  #: index in the document; 0 is the document token
    reader: dict | None = None  #: state of the source's reader at or before this row


class ShardEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One shard in a manifest."""

    tokens: int
    documents: int  #: number of document tokens
    sha256: str  #: of the file
    first: Place | None = None  #: of its first token
    text_bytes: int | None = None  #: of UTF-8 that its tokens stand for
    source_tokens: int | None = None  #: in manifests until November 2026


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Contents of `manifest.json`: the origin of the shards in a folder."""

    source: str
    settings: dict[str, str | int | float]
    vocab_size: int
    document_token: int
    shards: dict[str, ShardEntry]  #: by file name
    complete: bool = True  #: False until all shards are made
    next: Place | None = None  #: of the first token after the last shard
    scored_tokens: int | None = None  #: number of targets at the start of the validation shard
    scored_bytes: int | None = None  #: of UTF-8 that they stand for


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, None if there is none; raise DataError if it cannot be read."""
    path = folder / MANIFEST
    with translate_read_errors(path, "need a valid manifest or none; delete it or make the data again"):
        return msgspec.json.decode(read_regular(path), type=Manifest) if path.exists() else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`: after a new shard is written, but before a downloaded shard gets its name."""
    write_whole(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2), b"\n")


class TrackShards(NamedTuple):
    """The shards of a track, sorted by name: the order of tokens."""

    train: tuple[Shard, ...]
    val: tuple[Shard, ...]  #: the first one is scored


def data_folder(track: Track, explicit: Path | None) -> Path:
    """Return the given folder, or else the track's under $SPEEDRUN_DATA or ./data."""
    return explicit or Path(os.environ.get("SPEEDRUN_DATA", "data")) / track.data.folder


def open_track(folder: Path, data: Data) -> TrackShards:
    """Open the shards of a track: check names, headers, sizes and the counts in the manifest.

    Raises:
        DataError: if a shard is missing, damaged, unknown, in both splits or not as the manifest says; if
            there are too few tokens for validation.
    """
    train, val = (_open_split(folder, pattern, data) for pattern in (data.train, data.val))
    need = data.val_tokens + 1
    if val[0].num_tokens < need:
        raise DataError(f"{val[0].path}: {val[0].num_tokens:,} tokens; validation needs {need:,}: {data.get}")
    scored = {shard.identity for shard in val}
    if both := [shard.path for shard in train if shard.identity in scored]:
        raise DataError(f"{both[0]}: also a validation shard; training must not read it; remove one of them")
    _check_manifest(folder, data, (*train, *val))
    return TrackShards(train, val)


def _open_split(folder: Path, pattern: str, data: Data) -> tuple[Shard, ...]:
    """Open the shards of a split. If the track lists its shards, they must be the first of that list."""
    names = sorted(path.name for path in folder.glob(pattern))
    if not names:
        there = "no shards" if folder.is_dir() else "no such folder"
        raise DataError(f"{folder}: {there}; the track needs {pattern}; {data.get}")
    listed = sorted(fnmatch.filter(data.sha256, pattern))
    if listed:  # later ones have no digest and are ignored
        names = [name for name in names if name <= listed[-1]]
    if listed and (wrong := set(names) ^ set(listed[: max(1, len(names))])):
        foreign = sorted(wrong & set(names))
        what = f"{foreign[0]} is not the track's" if foreign[0] not in listed else f"{min(wrong)} is missing"
        raise DataError(f"{folder}: {what}; need its shards in order, no gap; remove or add it; {data.get}")
    return tuple(open_shard(folder / name, vocab_size=data.vocab_size) for name in names)


def _check_manifest(folder: Path, data: Data, shards: Sequence[Shard]) -> None:
    """Check that the manifest, if there is one, describes these shards and this vocabulary."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    if not manifest.complete:
        raise DataError(
            f"{folder / MANIFEST}: unfinished after {len(manifest.shards)} shards; need all of them; "
            "run the command that made them again to continue"
        )
    made, need = (manifest.vocab_size, manifest.document_token), (data.vocab_size, data.document_token)
    if made != need:
        raise DataError(f"{folder / MANIFEST}: vocabulary, document token {made}; need {need}: {data.get}")
    if missing := sorted(set(manifest.shards) - set(os.listdir(folder))):
        raise DataError(
            f"{folder}: {missing[0]} is missing, which {MANIFEST} names; need all its shards, which define the order "
            f"of tokens; restore it, or make the data again: {data.get}"
        )
    for shard in shards:
        entry = manifest.shards.get(shard.path.name)
        if entry is None or entry.tokens != shard.num_tokens:
            said = f"{entry.tokens:,}" if entry else "nothing"
            raise DataError(f"{shard.path}: {shard.num_tokens:,} tokens; {MANIFEST} says {said}: {data.get}")
