"""The one way in which files are written: beside their names, synchronised, renamed. Never half there.

What a killed process leaves is `NAME.partial`. The next writer of that name takes it over; `discard_partials` removes
those of names that nobody writes again.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from speedrun.errors import StorageError, UsageError

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
    with _refusals_told(path, partial):
        with partial.open("wb") as file:
            file.writelines(parts)
        _replace(partial, path)


def give_name(partial: Path, path: Path) -> None:
    """Synchronises a finished file and renames it; both names are on one disk.

    Raises:
        StorageError: if the disk refuses.
    """
    with _refusals_told(path):
        _replace(partial, path)


def make_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Makes a folder that appears with all its files, or not at all. Nobody else may be making it.

    Raises:
        UsageError: if it cannot be made, or is there and holds something.
        StorageError: if the disk refuses a file.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, content in files.items():
            write_whole(partial / name, content)
        os.rename(partial, path)
        _sync(path.parent)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; choose an --out that can be written") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def discard_partials(folder: Path) -> None:
    """Removes what killed writers left in a folder and below. Nobody may be writing there."""
    for left in folder.rglob("*" + PARTIAL):
        if left.is_file() or left.is_symlink():
            left.unlink()


def _replace(partial: Path, path: Path) -> None:
    _sync(partial)
    os.replace(partial, path)
    _sync(path.parent)  # the rename itself is durable only now


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _refusals_told(path: Path, *partials: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        for partial in partials:
            partial.unlink(missing_ok=True)  # it would keep a full disk full
        raise StorageError(
            f"{path}: cannot be written: {error.strerror}; free or choose another folder"
        ) from None
