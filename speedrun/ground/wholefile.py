"""The one way in which files are written: beside their names, synchronised, renamed. Never half there.

What a killed process leaves is `NAME.partial`. The next writer of that name takes it over.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from speedrun.ground.errors import StorageError, UsageError, refusals_told

PARTIAL = ".partial"


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Writes a file: after a crash at any moment it holds what it held before, or all parts.

    Args:
        path: replaced if it exists. Its folder must exist.
        parts: the content, in order.

    Raises:
        StorageError: if the disk refuses; then nothing is left of the new content.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with refusals_told(path), partial.open("wb") as file:
            file.writelines(parts)
        give_name(partial, path)
    except StorageError:
        with suppress(OSError):
            partial.unlink()  # it would keep a full disk full
        raise


def give_name(partial: Path, path: Path) -> None:
    """Synchronises a finished file and renames it; both names are on one disk.

    Raises:
        StorageError: if the disk refuses.
    """
    with refusals_told(path):
        _sync(partial)
        os.replace(partial, path)
        _sync(path.parent)  # the rename itself is durable only now


def make_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Makes a folder that appears with all its files, or not at all. Nobody else may be making it.

    Raises:
        UsageError: if it cannot be made, or is there and holds something.
        StorageError: if the disk refuses a file.
    """
    partial = path.with_name(path.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with refusals_told(path, UsageError):
            partial.mkdir(parents=True)
            for name, content in files.items():
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
