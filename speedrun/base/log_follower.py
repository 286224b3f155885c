"""Reads a file of lines while it grows, and notices if another log replaces it.

The first line of a log has a time, so an updated copy of the same log, as from rsync, is recognised.
"""

import errno
import os
from pathlib import Path
from typing import NamedTuple

from speedrun.base.atomic_files import open_regular

_MOST = 2**20  #: bytes of a piece, and so of a line


class Piece(NamedTuple):
    """Complete lines of a file."""

    lines: list[bytes]
    anew: bool  #: from the first line: discard earlier pieces


class LogFollower:
    """A file that may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first = b""  #: the first line
        self._offset = 0  #: bytes that were read, up to the end of a line

    def read(self) -> Piece | None:
        """Return new complete lines, at most 1 MiB; None if there are none. Raise OSError if a line is longer."""
        try:
            file = open_regular(self._path, os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        with file:
            first, size = file.readline(_MOST), os.fstat(file.fileno()).st_size
            is_other = bool(self._offset) and (first != self._first or size < self._offset)
            begun = 0 if is_other else self._offset
            file.seek(begun)
            raw = file.read(_MOST)
        used = raw.rfind(b"\n") + 1
        if not used and len(raw) == _MOST:
            raise OSError(errno.EFBIG, f"a line is longer than {_MOST:,} bytes")
        self._first, self._offset = first, begun + used
        return Piece(raw.split(b"\n")[:-1], begun == 0) if used or is_other else None
