"""Shards: files of tokens in llm.c's format.

A shard is 256 little-endian int32 (magic, version, number of tokens, zeros), then that many little-endian uint16.
It is read with `pread`, not `mmap`: a file that shrinks during a run is then an error and not a crash.

Source: karpathy/llm.c, `dev/data/data_common.py`.
"""

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speedrun.base.errors import DataError, translate_read_errors
from speedrun.base.wholefile import write_whole

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
MAX_TOKENS = 2**31 - 1
UINT16_IDS = 2**16


@dataclass(frozen=True, slots=True)
class Shard:
    """A file whose header and size were correct when it was opened."""

    path: Path
    num_tokens: int
    vocab_size: int  #: `read` returns smaller ids only
    identity: tuple[int, int, int]  #: inode, size, modification time: detects a file replaced during a run

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens `start` to `stop`, exclusive: uint16 [stop - start], read-only.

        Raises:
            DataError: if the file was changed or removed since it was opened, or an id is too large.
            ValueError: if the range is not inside the shard.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"{self.path}: no range {start}:{stop} in {self.num_tokens} tokens")
        advice = "it was readable at the start; restore it"
        with translate_read_errors(self.path, advice), self.path.open("rb") as file:
            raw = os.pread(file.fileno(), 2 * (stop - start), HEADER_BYTES + 2 * start)
            changed = _identity(os.fstat(file.fileno())) != self.identity
        if changed or len(raw) != 2 * (stop - start):
            raise DataError(f"{self.path}: changed since it was opened; shards must not change; start again")
        tokens = np.frombuffer(raw, "<u2")
        if tokens.size and tokens.max() >= self.vocab_size:  # a gather on the device would clamp it silently
            index = int(np.argmax(tokens >= self.vocab_size))
            raise DataError(
                f"{self.path}: token {start + index:,} is id {tokens[index]}; every id must be below "
                f"{self.vocab_size:,}; the shard is damaged or was made with another tokenizer: make it again"
            )
        return tokens


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def open_shard(path: Path, *, vocab_size: int) -> Shard:
    """Open a shard: check header and size, and read no token; raise DataError unless it is a whole shard."""
    with translate_read_errors(path, "a shard is needed here; make or download it"):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: not a regular file; a shard is one; remove it from the data folder")
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    return Shard(path, _count(path, header, status.st_size), vocab_size, _identity(status))


def _count(path: Path, header: bytes, size_bytes: int) -> int:
    """Return the number of tokens, on which header and file size must agree."""
    if len(header) < HEADER_BYTES:
        got = f"{size_bytes:,} bytes" if size_bytes else "empty"
        raise DataError(f"{path}: {got}; a header alone has {HEADER_BYTES:,}; delete it and make it again")
    magic, version, count = (int(x) for x in np.frombuffer(header, "<i4", 3))
    if magic != MAGIC:
        raise DataError(f"{path}: starts with {magic}; a shard starts with {MAGIC}; remove the file")
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
    """Write a shard of tokens [N], integers from 0 to 65,535, atomically. Its folder must exist.

    Raises:
        DataError: if there are no tokens, too many, or some outside uint16.
        StorageError: if the file cannot be written.
    """
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


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
