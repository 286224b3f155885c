"""Reads a file of lines while it grows, from any position, and notices that it was replaced.

A position is a number of bytes and a digest of the first line, which has the time in it. A copy of the same log, as
rsync makes one again and again, continues where the last one ended; another log begins anew.
"""

import errno
import os
from pathlib import Path
from typing import NamedTuple

from speedrun.ground import runlog

_MOST = 2**18  #: bytes in one piece, so that a long log arrives bit by bit
_LONGEST = 2**24  #: bytes of a line


class Position(NamedTuple):
    """How far a file was read."""

    head: str = ""  #: digest of the first line; empty before there is one
    offset: int = 0  #: bytes, up to the end of a line


class Piece(NamedTuple):
    """Complete lines, without their ends."""

    lines: list[bytes]
    anew: bool  #: they begin with the first line: whatever was read before is of no use


class Tail:
    """A file that may not exist yet."""

    def __init__(self, path: Path, position: Position | None = None) -> None:
        """Begin at the start, or at the position of an earlier reader."""
        self._path = path
        self.position = position or Position()
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> Piece | None:
        """Return complete lines that are new, at most 256 KiB of them unless one is longer; None if there are none.

        Raises:
            OSError: if there is a file that cannot be read.
        """
        if not self._path.exists():
            return None
        if not self._path.is_file():
            raise OSError(errno.EINVAL, "it is no file")  # a pipe would never open
        file = self._path.open("rb")
        with file:
            stat = os.fstat(file.fileno())
            seen = stat.st_ino, stat.st_size, stat.st_mtime_ns
            if seen == self._seen:
                return None
            first = file.readline(_LONGEST)
            head = runlog.digest(first)[:8] if first.endswith(b"\n") else ""
            offset = self.position.offset
            is_other = bool(offset) and (head != self.position.head or stat.st_size < offset)
            offset = 0 if is_other else offset
            file.seek(offset)
            raw = file.read(_MOST)
            if len(raw) == _MOST and b"\n" not in raw:
                raw += file.readline(_LONGEST)
            complete, newline, _ = raw.rpartition(b"\n")
            self.position = Position(head, offset + len(complete + newline))
            if self.position.offset >= stat.st_size or not newline:
                self._seen = seen  # nothing more until it changes
        lines = complete.split(b"\n") if newline else []
        return Piece(lines, offset == 0) if lines or is_other else None
