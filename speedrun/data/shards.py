"""Shards, files of tokens in llm.c's format, and the folder of a track's shards with its manifest.

A shard is 256 little-endian int32 (magic, version, number of tokens, zeros), then the tokens as little-endian uint16.
It is read with `pread`: with `mmap`, a file that shrinks would crash the run. Source: llm.c, `dev/data/data_common.py`.
"""

import fnmatch
import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from speedrun.base.atomic_files import read_regular, write_whole
from speedrun.base.errors import DataError, translate_read_errors
from speedrun.base.track import Data, Track

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
MANIFEST = "manifest.json"
MAX_TOKENS = 2**31 - 1
UINT16_IDS = 2**16


@dataclass(frozen=True, slots=True)
class Shard:
    """A file whose header and size were correct when it was opened."""

    path: Path
    num_tokens: int
    vocab_size: int
    identity: tuple[int, int, int]  #: inode, size, modification time: detects a file replaced during a run

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens `start` to `stop`, exclusive: uint16 [stop - start], read-only.

        Raises DataError if the file has changed since it was opened, or an id is not below `vocab_size`.
        """
        advice = "it was readable at the start; restore it"
        with translate_read_errors(self.path, advice), self.path.open("rb") as file:
            raw = os.pread(file.fileno(), 2 * (stop - start), HEADER_BYTES + 2 * start)
            changed = _identity(os.fstat(file.fileno())) != self.identity
        if changed or len(raw) != 2 * (stop - start):
            raise DataError(f"{self.path}: changed since it was opened; shards must not change; start again")
        tokens = np.frombuffer(raw, "<u2")
        if tokens.size and tokens.max() >= self.vocab_size:  # a gather on the device clamps silently
            index = int(np.argmax(tokens >= self.vocab_size))
            raise DataError(
                f"{self.path}: token {start + index:,} is id {tokens[index]}; every id must be below "
                f"{self.vocab_size:,}; the shard is damaged or was made with another tokenizer: make it again"
            )
        return tokens


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def open_shard(path: Path, *, vocab_size: int) -> Shard:
    """Open a shard; check header and size, and read no token."""
    with translate_read_errors(path, "need a shard here; download it, or make all of them in another folder"):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: not a regular file; need one; remove it from the data folder")
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    found, redo = f"{path}: {status.st_size:,} bytes", "delete and download it, or make all in another folder"
    if len(header) < HEADER_BYTES:
        raise DataError(f"{found}; a header alone has {HEADER_BYTES:,}; {redo}")
    magic, version, count = (int(x) for x in np.frombuffer(header, "<i4", 3))
    if magic != MAGIC:
        raise DataError(f"{path}: starts with {magic}; a shard starts with {MAGIC}; choose another file")
    if version != VERSION:
        raise DataError(f"{path}: version {version}; need version {VERSION}; make it again")
    if count < 1:
        raise DataError(f"{path}: header promises {count} tokens; need at least 1; make it again")
    if status.st_size != (need := HEADER_BYTES + 2 * count):
        raise DataError(f"{found}; {count:,} tokens need {need:,}; {redo}")
    return Shard(path, count, vocab_size, _identity(status))


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_shard(path: Path, tokens: np.ndarray) -> Shard:
    """Write a shard of tokens [N], integers from 0 to 65,535, atomically, into an existing folder."""
    if tokens.ndim != 1 or not 1 <= tokens.size <= MAX_TOKENS or not np.issubdtype(tokens.dtype, np.integer):
        found = f"{path}: got {tokens.dtype}{list(tokens.shape)}"
        raise DataError(f"{found}; need 1 to {MAX_TOKENS:,} integers in one dimension")
    if tokens.min() < 0 or tokens.max() >= UINT16_IDS:
        raise DataError(f"{path}: ids of {tokens.min()} to {tokens.max()}; need 0 to {UINT16_IDS - 1:,}")
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSION, tokens.size
    write_whole(path, header.tobytes(), np.ascontiguousarray(tokens, "<u2").data)
    return open_shard(path, vocab_size=UINT16_IDS)


# --- the folder of a track -------------------------------------------------------------------------------


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The place of a token in a source of text."""

    file: str  #: empty: the start of the source
    row: int  #: index of the document in that file
    token: int = 0  #: index in the document; 0 is the document token
    reader: dict | None = None  #: state of the source's reader at or before this row


class ShardEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One shard in a manifest."""

    tokens: int
    documents: int  #: number of document tokens
    sha256: str
    first: Position | None = None  #: of its first token
    text_bytes: int | None = None  #: UTF-8 bytes of its tokens
    source_tokens: int | None = None  #: in manifests until November 2026


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Contents of `manifest.json`: the origin of the shards in a folder."""

    source: str
    settings: dict[str, str | int | float]
    vocab_size: int
    document_token: int
    shards: dict[str, ShardEntry]  #: by file name
    complete: bool = True  #: False until all shards are made
    next: Position | None = None  #: of the first token after the last shard
    scored_tokens: int | None = None  #: number of targets at the start of the validation shard
    scored_bytes: int | None = None  #: their UTF-8 bytes


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, or None if there is none."""
    path = folder / MANIFEST
    with translate_read_errors(path, "need a valid manifest or none; delete it or make the data again"):
        return msgspec.json.decode(read_regular(path), type=Manifest) if path.exists() else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, after a new shard is written, but before a downloaded shard gets its name."""
    write_whole(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2), b"\n")


class TrackShards(NamedTuple):
    """The shards of a track, sorted by name, which is the order of tokens."""

    train: tuple[Shard, ...]
    val: tuple[Shard, ...]  #: the first one is scored


def data_folder(track: Track, explicit: Path | None) -> Path:
    """Return the given folder, or the track's in $SPEEDRUN_DATA or ./data."""
    return explicit or Path(os.environ.get("SPEEDRUN_DATA") or "data") / track.data.folder


def open_track(folder: Path, data: Data) -> TrackShards:
    """Open the shards of a track; check names, headers, sizes and the counts in the manifest."""
    train, val = (_open_split(folder, pattern, data) for pattern in (data.train, data.val))
    need = data.val_tokens + data.held_tokens + 1
    if val[0].num_tokens < need:
        raise DataError(f"{val[0].path}: {val[0].num_tokens:,} tokens; validation needs {need:,}: {data.get}")
    scored = {shard.identity for shard in val}
    if both := [shard.path for shard in train if shard.identity in scored]:
        raise DataError(f"{both[0]}: also a validation shard; training must not read it; remove one of them")
    if (manifest := read_manifest(folder)) is not None:
        _check_manifest(folder, manifest, data, (*train, *val))
    return TrackShards(train, val)


def _open_split(folder: Path, pattern: str, data: Data) -> tuple[Shard, ...]:
    """Open the shards of a split; they must be the first of the track's list, if it has one."""
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
        hint = f"need its first shards without a gap; remove or add it; {data.get}"
        raise DataError(f"{folder}: {what}; {hint}")
    return tuple(open_shard(folder / name, vocab_size=data.vocab_size) for name in names)


def _check_manifest(folder: Path, manifest: Manifest, data: Data, shards: Sequence[Shard]) -> None:
    if not manifest.complete:
        found = f"{folder / MANIFEST}: unfinished after {len(manifest.shards)} shards"
        raise DataError(f"{found}; need all of them; run the command that made them again to continue")
    made, need = (manifest.vocab_size, manifest.document_token), (data.vocab_size, data.document_token)
    if made != need:
        raise DataError(f"{folder / MANIFEST}: vocabulary, document token {made}; need {need}: {data.get}")
    if missing := sorted(set(manifest.shards) - set(os.listdir(folder))):
        raise DataError(
            f"{folder}: {missing[0]} is missing, which {MANIFEST} names; need all its shards, whose order is that of "
            f"the tokens; restore it, or make the data again: {data.get}"
        )
    for shard in shards:
        entry = manifest.shards.get(shard.path.name)
        if entry is None or entry.tokens != shard.num_tokens:
            said = f"{entry.tokens:,}" if entry else "nothing"
            raise DataError(f"{shard.path}: {shard.num_tokens:,} tokens; {MANIFEST} says {said}: {data.get}")
