"""Shards: files of tokens in llm.c's format, and the folder they lie in.

A shard is 256 little-endian int32 (magic, version, number of tokens, zeros), then that many little-endian
uint16. A final name is always whole: files are written beside it and renamed. Reading goes through `pread`,
never `mmap`, so that a file that shrinks during a run is an error and not a crash of the process.

Source: karpathy/llm.c, `dev/data/data_common.py`.
"""

import errno
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

from speedrun.errors import DataError
from speedrun.track import Data, Track

MAGIC = 20240520
VERSION = 1
LLAMA_MAGIC = 20240801  #: llm.c's other format: version 7, uint32 tokens
HEADER_BYTES = 256 * 4
MAX_TOKENS = 2**31 - 1
UINT16_IDS = 2**16
MANIFEST = "manifest.json"

#: Full verification holds this many tokens at a time.
_CHUNK_TOKENS = 2**24


@dataclass(frozen=True, slots=True)
class Shard:
    """A file whose header and size were right when it was opened."""

    path: Path
    num_tokens: int
    vocab_size: int  #: no id at or above it is ever returned
    identity: tuple[int, int, int]  #: inode, size, time of change: a file may not be swapped during a run

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop`, without `stop`.

        Returns:
            uint16, one axis, read-only.

        Raises:
            DataError: if the file was changed or removed since it was opened, or an id is foreign.
            ValueError: if the range is not inside the shard.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"{self.path}: no range {start}:{stop} in {self.num_tokens} tokens")
        try:
            with self.path.open("rb") as file:
                raw = os.pread(file.fileno(), 2 * (stop - start), HEADER_BYTES + 2 * start)
                changed = _identity(os.fstat(file.fileno())) != self.identity
        except OSError as error:
            raise DataError(
                f"{self.path}: {error.strerror}; it was there at the start; put it back"
            ) from None
        if changed or len(raw) != 2 * (stop - start):
            raise DataError(
                f"{self.path}: changed since it was opened; a run needs shards that rest; start again"
            )
        tokens = np.frombuffer(raw, "<u2")
        check_ids(tokens, self.vocab_size, self.path, start=start)
        return tokens


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def check_ids(tokens: np.ndarray, vocab_size: int, path: Path, *, start: int = 0) -> None:
    """Refuses ids outside the vocabulary: a gather on the device would clamp them without a word.

    Args:
        tokens: any unsigned integers, one axis.
        vocab_size: every id must be below it.
        path: where they are from.
        start: the position of the first one in that file.

    Raises:
        DataError: names the file, the position and the id.
    """
    if tokens.size and tokens.max() >= vocab_size:
        index = int(np.argmax(tokens >= vocab_size))
        raise DataError(
            f"{path}: token {start + index:,} is id {tokens[index]}; every id must be below {vocab_size:,}; "
            "the shard is damaged or was made with another tokenizer: make it again"
        )


def open_shard(path: Path, *, vocab_size: int) -> Shard:
    """Checks header and size, which takes no time whatever the size.

    Raises:
        DataError: names the file, what is wrong with it and what to do.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise DataError(f"{path}: is {kind}; a shard is a file; remove it from the data folder")
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; a shard is needed here; make or fetch it") from None
    except OSError as error:
        cause = "a loop of symbolic links" if error.errno == errno.ELOOP else error.strerror
        raise DataError(f"{path}: {cause}; a readable file is needed; replace it by the shard") from None
    return Shard(path, _count(path, header, status.st_size), vocab_size, _identity(status))


def _count(path: Path, header: bytes, size_bytes: int) -> int:
    """The number of tokens a header promises and a file of this size holds."""
    if len(header) < HEADER_BYTES:
        got = f"{size_bytes:,} bytes" if size_bytes else "empty"
        raise DataError(f"{path}: {got}; a header alone has {HEADER_BYTES:,}; delete it and make it again")
    magic, version, count = (int(x) for x in np.frombuffer(header, "<i4", 3))
    if magic == LLAMA_MAGIC:
        raise DataError(f"{path}: uint32 tokens (llm.c's Llama format); need uint16 of GPT-2; tokenize again")
    if np.int32(magic).byteswap() == MAGIC:
        raise DataError(f"{path}: big-endian; need little-endian; swap the bytes or make it again")
    if magic != MAGIC:
        raise DataError(f"{path}: starts with {magic}; a shard starts with {MAGIC}; remove the foreign file")
    if version != VERSION:
        raise DataError(f"{path}: version {version}; only version {VERSION} is known; make it again")
    if count < 1:
        raise DataError(f"{path}: header promises {count} tokens; need at least 1; make it again")
    if size_bytes != HEADER_BYTES + 2 * count:
        need = HEADER_BYTES + 2 * count
        raise DataError(
            f"{path}: {size_bytes:,} bytes; {count:,} tokens need {need:,}; delete it and make it again"
        )
    return count


def write_shard(path: Path, tokens: np.ndarray) -> Shard:
    """Writes a shard; under its own name it is whole or not there.

    Args:
        path: replaced if it exists. Its folder must exist.
        tokens: integers of 0 to 65,535, one axis.

    Raises:
        DataError: if they are none, too many, or no uint16; if the disk refuses.
    """
    if tokens.ndim != 1 or not 1 <= tokens.size <= MAX_TOKENS or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(
            f"{path}: got {tokens.dtype}{list(tokens.shape)}; need 1 to {MAX_TOKENS:,} integers in one row"
        )
    if tokens.min() < 0 or tokens.max() >= UINT16_IDS:
        raise DataError(
            f"{path}: ids of {tokens.min()} to {tokens.max()}; the format holds 0 to {UINT16_IDS - 1:,}"
        )
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSION, tokens.size
    _write_whole(path, header.tobytes(), tokens.astype("<u2", copy=False).tobytes())
    return open_shard(path, vocab_size=UINT16_IDS)


def _write_whole(path: Path, *parts: bytes) -> None:
    """Writes beside the name, makes it durable, renames."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself is durable only now
        finally:
            os.close(folder)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written: {error.strerror}; free or choose another folder"
        ) from None


def sha256(path: Path) -> str:
    """Digest of a whole file, header included."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ShardEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a manifest says of one shard."""

    tokens: int
    documents: int  #: number of document tokens
    sha256: str  #: of the file


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the shards of a folder are from; `manifest.json` beside them."""

    source: str
    settings: dict[str, str | int | float]
    vocab_size: int
    document_token: int
    shards: dict[str, ShardEntry]  #: by file name


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`, last of all: a folder that has one is complete."""
    _write_whole(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2), b"\n")


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
    if listed and (wrong := set(names) ^ set(listed[: len(names)])):
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
    made, need = (manifest.vocab_size, manifest.document_token), (data.vocab_size, data.document_token)
    if made != need:
        raise DataError(f"{folder / MANIFEST}: vocabulary, document token {made}; need {need}: {data.get}")
    for shard in shards:
        entry = manifest.shards.get(shard.path.name)
        if entry is None or entry.tokens != shard.num_tokens:
            said = f"{entry.tokens:,}" if entry else "nothing"
            raise DataError(f"{shard.path}: {shard.num_tokens:,} tokens; {MANIFEST} says {said}: {data.get}")


def verify(folder: Path, data: Data, *, full: bool) -> list[Verified]:
    """Checks the data of a track.

    Args:
        folder: where the shards lie.
        data: what the track says of them.
        full: read every byte: digests against track and manifest, ids, the number of documents, and the
            document token that opens each validation shard. Below a second for a shard of 200 MB.

    Returns:
        One entry per shard, training shards first.

    Raises:
        DataError: at the first thing that is wrong.
    """
    train, val = open_track(folder, data)
    if not full:
        return [Verified(shard.path.name, shard.num_tokens, None) for shard in (*train, *val)]
    for shard in val:
        if (first := shard.read(0, 1)[0]) != data.document_token:
            raise DataError(f"{shard.path}: begins with id {first}; need {data.document_token}: {data.get}")
    manifest = read_manifest(folder)
    entries = manifest.shards if manifest else {}
    return [_verify_bytes(shard, data, entries.get(shard.path.name)) for shard in (*train, *val)]


def _verify_bytes(shard: Shard, data: Data, entry: ShardEntry | None) -> Verified:
    """Reads a whole shard; `Shard.read` checks the ids."""
    name, documents = shard.path.name, 0
    for start in range(0, shard.num_tokens, _CHUNK_TOKENS):
        chunk = shard.read(start, min(start + _CHUNK_TOKENS, shard.num_tokens))
        documents += int(np.count_nonzero(chunk == data.document_token))
    got = sha256(shard.path)
    for need in (data.sha256.get(name, got), entry.sha256 if entry else got):
        if got != need:
            raise DataError(f"{shard.path}: sha256 is {got}; need {need}; delete it, then: {data.get}")
    if entry and entry.documents != documents:
        raise DataError(
            f"{shard.path}: {documents:,} documents; {MANIFEST} says {entry.documents:,}: {data.get}"
        )
    return Verified(name, shard.num_tokens, got)
