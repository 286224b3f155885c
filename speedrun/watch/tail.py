"""Reads a file of lines while it grows, from any position, and notices that it was replaced.

A position is a number of bytes and a digest of the first line, which has the time in it. A copy of the same log, as
rsync makes one again and again, continues where the last one ended; another log begins anew.
"""

import errno
import os
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from speedrun.ground import runlog
from speedrun.ground.serving import opened

_MOST = 2**20  #: bytes in one piece, so that a long log arrives bit by bit, and of a line


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
        """Return complete lines that are new, at most 1 MiB of them; None if there are none.

        Raises:
            OSError: if there is a file that cannot be read, or a line that is longer.
        """
        try:
            file = opened(self._path.parent, self._path.name)
        except FileNotFoundError:
            return None
        with BufferedReader(file) as file:
            stat = os.fstat(file.fileno())
            seen = stat.st_ino, stat.st_size, stat.st_mtime_ns
            if seen == self._seen:
                return None
            first = file.readline(_MOST)
            head = runlog.digest(first)[:8] if first.endswith(b"\n") else ""
            offset = self.position.offset
            is_other = bool(offset) and (head != self.position.head or stat.st_size < offset)
            if is_other:
                offset = 0
            file.seek(offset)
            raw = file.read(_MOST)
        used = raw.rfind(b"\n") + 1
        if not used and len(raw) == _MOST:
            raise OSError(errno.EFBIG, f"a line is longer than {_MOST:,} bytes")
        self.position = Position(head, offset + used)
        if self.position.offset >= stat.st_size or not used:
            self._seen = seen  # nothing more until it changes
        return Piece(raw.split(b"\n")[:-1], offset == 0) if used or is_other else None
