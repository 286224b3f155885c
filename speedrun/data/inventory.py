"""The folder that a track's shards lie in: its manifest, which shards must be there, and what they must hold."""

import fnmatch
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from speedrun.data.shards import Shard, open_shard, sha256
from speedrun.data.wholefile import write_whole
from speedrun.errors import DataError
from speedrun.track import Data, Track

MANIFEST = "manifest.json"

#: Full verification holds this many tokens at a time.
_CHUNK_TOKENS = 2**24

#: Is told bytes done and bytes in all.
Report = Callable[[int, int], None]


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
    source_tokens: int | None = (
        None  #: what the source itself says its documents hold, without document tokens
    )


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
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            f"{path}: {error}; a manifest is needed, or none; delete it or make the data again"
        ) from None


class TrackShards(NamedTuple):
    """The shards of a track, in the order of their names, which is the order of the tokens."""

    train: tuple[Shard, ...]
    val: tuple[Shard, ...]  #: the first one is scored


class Verified(NamedTuple):
    """One shard that passed."""

    name: str
    tokens: int
    sha256: str | None  #: None if only header and size were looked at
    bytes_per_token: float | None  #: of text, where the manifest knows it


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
    for shard in shards:
        entry = manifest.shards.get(shard.path.name)
        if entry is None or entry.tokens != shard.num_tokens:
            said = f"{entry.tokens:,}" if entry else "nothing"
            raise DataError(f"{shard.path}: {shard.num_tokens:,} tokens; {MANIFEST} says {said}: {data.get}")


def verify(folder: Path, data: Data, *, full: bool, report: Report = lambda *_: None) -> list[Verified]:
    """Checks the data of a track.

    Args:
        folder: where the shards lie.
        data: what the track says of them.
        full: read every byte: digests against track and manifest, ids, the number of documents, and the
            document token that opens each validation shard. Below a second for a shard of 200 MB.
        report: is told the bytes that are read and those there are, as it goes on.

    Returns:
        One entry per shard, training shards first.

    Raises:
        DataError: at the first thing that is wrong.
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
    """Reads all ids of a shard.

    Raises:
        DataError: if an id is outside the vocabulary, or the file changes meanwhile.
    """
    starts = range(0, shard.num_tokens, _CHUNK_TOKENS)
    chunks = (shard.read(start, min(start + _CHUNK_TOKENS, shard.num_tokens)) for start in starts)
    return sum(int(np.count_nonzero(chunk == document_token)) for chunk in chunks)


def _verify_bytes(shard: Shard, data: Data, entry: ShardEntry | None) -> Verified:
    """Reads a whole shard and compares it with what track and manifest say."""
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
