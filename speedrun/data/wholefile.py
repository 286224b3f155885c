"""Files that are whole, or not there: written beside their names, made durable, renamed."""

import os
from pathlib import Path

from speedrun.errors import DataError


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Writes a file beside its name, makes it durable, renames it: under its own name it is whole or not there.

    Raises:
        DataError: if the disk refuses.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.writelines(parts)
    except OSError as error:
        raise _refused(path, error) from None
    give_name(partial, path)


def give_name(partial: Path, path: Path) -> None:
    """Makes a finished file durable and renames it; both names are on one disk.

    Raises:
        DataError: if the disk refuses.
    """
    try:
        _sync(partial)
        os.replace(partial, path)
        _sync(path.parent)  # the rename itself is durable only now
    except OSError as error:
        raise _refused(path, error) from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be written: {error.strerror}; free or choose another folder")
