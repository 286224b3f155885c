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
