"""Reads a file of lines while it grows, and notices that it was replaced.

The first line has the time in it. A copy of the same log, as rsync makes one again and again, continues where the last
one ended; another log begins anew.
"""

import errno
import os
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from speedrun.base.serving import opened

_MOST = 2**20  #: bytes in one piece, so that a long log arrives bit by bit, and of a line


class Piece(NamedTuple):
    """Complete lines, without their ends."""

    lines: list[bytes]
    anew: bool  #: they begin with the first line: whatever was read before is of no use


class Tail:
    """A file that may not exist yet."""

    def __init__(self, path: Path) -> None:
        """Begin at the start."""
        self._path = path
        self._first = b""  #: the first line
        self._offset = 0  #: bytes that were read, up to the end of a line

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
