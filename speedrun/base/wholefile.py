"""Whole files. They are written atomically: to a temporary file, synchronised, then renamed.

A killed process leaves `NAME.partial`, which the next writer of that name overwrites.
"""

import errno
import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from speedrun.base.errors import StorageError, UsageError, translate_os_errors

PARTIAL = ".partial"
_MOST_BYTES = 2**30  #: of a file that is read at once


def read_regular(path: Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """Read a file that a user named. A pipe would wait for its writer, and a device never end.

    Raises:
        OSError: if it cannot be read, is no regular file, or is larger than `most_bytes`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"{status.st_size:,} bytes, more than {most_bytes:,}", str(path))
        return file.read(most_bytes)


def require_regular(folder: Path) -> None:
    """Raise OSError if something below a folder is neither a file nor a folder: to read it might never end."""
    for path in folder.rglob("*"):
        if not (path.is_file() or path.is_dir()):
            raise OSError(errno.EINVAL, "not a regular file", str(path))


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file atomically: after a crash at any moment it has its old content, or all parts. Its folder must exist.

    Raises:
        StorageError: if it cannot be written; then nothing is left of the new content.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with translate_os_errors(path):
            partial.unlink(missing_ok=True)  # it may be a link to another file
            with partial.open("xb") as file:
                file.writelines(parts)
        give_name(partial, path)
    except StorageError:
        with suppress(OSError):
            partial.unlink()  # free the space on a full disk
        raise


def give_name(partial: Path, path: Path) -> None:
    """Synchronise a finished file and rename it, on the same disk; raise StorageError if that fails."""
    with translate_os_errors(path):
        _sync(partial)
        os.replace(partial, path)
        _sync(path.parent)  # the rename itself is durable only now


def make_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder with its files by relative path, atomically. No other process may be making it.

    Raises:
        UsageError: if it cannot be made, or exists and is not empty.
        StorageError: if a file cannot be written.
    """
    partial = path.with_name(path.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with translate_os_errors(path, UsageError):
            for name, content in files.items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                write_whole(partial / name, content)
            os.rename(partial, path)
            _sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
