"""The folder that a track's shards lie in: its manifest, which shards must be there, and what they must hold."""

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from speedrun.data.shards import Shard, open_shard
from speedrun.ground.errors import DataError
from speedrun.ground.track import Data, Track
from speedrun.ground.wholefile import write_whole

MANIFEST = "manifest.json"


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A token of a source of text."""

    file: str  #: as the source names it; empty: before the first
    row: int  #: counts the documents of that file
    token: int = 0  #: of that document; 0 is the document token, more is carried over from a shard before
    reader: dict | None = None  #: how the source's reader finds its way back near this row


class ShardEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a manifest says of one shard."""

    tokens: int
    documents: int  #: number of document tokens
    sha256: str  #: of the file
    first: Place | None = None  #: its first token in the source
    text_bytes: int | None = None  #: of UTF-8 that its tokens stand for
    source_tokens: int | None = None  #: in its documents, as the source counts them: no document tokens


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the shards of a folder are from; `manifest.json` beside them."""

    source: str
    settings: dict[str, str | int | float]
    vocab_size: int
    document_token: int
    shards: dict[str, ShardEntry]  #: by file name
    complete: bool = True  #: False while shards are being made
    next: Place | None = None  #: the first token after the last shard; where making them goes on
    scored_tokens: int | None = None  #: targets from the start of the validation shard
    scored_bytes: int | None = None  #: of UTF-8 that those stand for


def bytes_per_token(entries: Sequence[ShardEntry]) -> float | None:
    """Of text, in UTF-8; document tokens stand for none and are not counted. None where no manifest knows it."""
    text_bytes = [entry.text_bytes for entry in entries if entry.text_bytes is not None]
    tokens = sum(entry.tokens - entry.documents for entry in entries)
    return sum(text_bytes) / tokens if tokens and len(text_bytes) == len(entries) else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`. What makes shards writes it last of all: a folder whose manifest says complete is.

    What fetches them names a shard here before it appears, so that none is ever there without its digest.
    """
    write_whole(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2), b"\n")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None where there is none.

    Raises:
        DataError: if it cannot be read.
    """
    path = folder / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # of msgspec: also bytes that are no text
        raise DataError(
            f"{path}: {error}; a manifest is needed, or none; delete it or make the data again"
        ) from None


class TrackShards(NamedTuple):
    """The shards of a track, in the order of their names, which is the order of the tokens."""

    train: tuple[Shard, ...]
    val: tuple[Shard, ...]  #: the first one is scored


def data_folder(track: Track, explicit: Path | None) -> Path:
    """Where a track's shards lie: as asked for, else under $SPEEDRUN_DATA, else under ./data."""
    return explicit or Path(os.environ.get("SPEEDRUN_DATA", "data")) / track.data.folder


def open_track(folder: Path, data: Data) -> TrackShards:
    """Checks what takes no time: names, headers, sizes, the counts in the manifest.

    Raises:
        DataError: if a shard is missing, damaged, foreign, in both splits or not as the manifest says; if
            there are too few tokens to validate on.
    """
    train, val = (_open_split(folder, pattern, data) for pattern in (data.train, data.val))
    need = data.val_tokens + 1
    if val[0].num_tokens < need:
        raise DataError(f"{val[0].path}: {val[0].num_tokens:,} tokens; validation needs {need:,}: {data.get}")
    scored = {shard.identity for shard in val}
    if both := [shard.path for shard in train if shard.identity in scored]:
        raise DataError(
            f"{both[0]}: also a validation shard; nobody may train on those; remove one of the two"
        )
    _check_manifest(folder, data, (*train, *val))
    return TrackShards(train, val)


def _open_split(folder: Path, pattern: str, data: Data) -> tuple[Shard, ...]:
    """All shards of one split. Where the track lists its shards, they are the first of that list."""
    names = sorted(path.name for path in folder.glob(pattern))
    if not names:
        raise DataError(f"{folder}: {_what_is_there(folder)}; the track needs {pattern}; {data.get}")
    listed = sorted(fnmatch.filter(data.sha256, pattern))
    if listed:  # what lies beyond them nobody vouches for, and nobody reads
        names = [name for name in names if name <= listed[-1]]
    if listed and (wrong := set(names) ^ set(listed[: max(1, len(names))])):
        foreign = sorted(wrong & set(names))
        what = f"{foreign[0]} is not the track's" if foreign[0] not in listed else f"{min(wrong)} is missing"
        raise DataError(f"{folder}: {what}; need its shards in order, no gap; remove or add it; {data.get}")
    return tuple(open_shard(folder / name, vocab_size=data.vocab_size) for name in names)


def _what_is_there(folder: Path) -> str:
    """What was found in place of shards."""
    if not folder.is_dir():
        return "a file, not a folder" if folder.exists() else "no such folder"
    num_entries = sum(1 for _ in folder.glob("*"))
    return f"a folder with {num_entries} other entries" if num_entries else "an empty folder"


def _check_manifest(folder: Path, data: Data, shards: Sequence[Shard]) -> None:
    """Where there is a manifest, it must be about these shards and this vocabulary."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    if not manifest.complete:
        raise DataError(
            f"{folder / MANIFEST}: unfinished after {len(manifest.shards)} shards; need all of them; "
            "give the command that made them again: it goes on"
        )
    made, need = (manifest.vocab_size, manifest.document_token), (data.vocab_size, data.document_token)
    if made != need:
        raise DataError(f"{folder / MANIFEST}: vocabulary, document token {made}; need {need}: {data.get}")
    if missing := sorted(set(manifest.shards) - set(os.listdir(folder))):
        raise DataError(
            f"{folder}: {missing[0]} is missing, which {MANIFEST} names; need every shard of it, for the order of "
            f"tokens depends on them; put it back, or make the data again: {data.get}"
        )
    for shard in shards:
        entry = manifest.shards.get(shard.path.name)
        if entry is None or entry.tokens != shard.num_tokens:
            said = f"{entry.tokens:,}" if entry else "nothing"
            raise DataError(f"{shard.path}: {shard.num_tokens:,} tokens; {MANIFEST} says {said}: {data.get}")
