"""Atomic writes of files and folders, and locks, so that one program at a time writes to a folder.

A killed process leaves `NAME.partial`, which the next writer of that name overwrites.
"""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

from speedrun.base.errors import DataError, SpeedrunError, StorageError, UsageError, translate_os_errors

PARTIAL = ".partial"
LOCK = ".lock"  #: a file, since network disks lock only what is open for writing
_MOST_BYTES = 2**30  #: of a file that is read whole


def open_regular(path: Path, flags: int = 0) -> IO[bytes]:
    """Open a file for reading, or raise OSError if it is not regular: a pipe or an endless device might never end."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_regular(path: Path, max_bytes: int = _MOST_BYTES) -> bytes:
    """Read a regular file; raise OSError if it exceeds `max_bytes`."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise OSError(errno.EFBIG, f"{size:,} bytes, more than {max_bytes:,}", str(path))
        return file.read(max_bytes)


def require_regular(folder: Path) -> None:
    """Raise OSError if anything below a folder is neither a file nor a folder: reading it might never end."""
    for path in folder.rglob("*"):
        if not (path.is_file() or path.is_dir()):
            raise OSError(errno.EINVAL, f"{path} is not a regular file")


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file atomically: after a crash it has its old content or all parts. Its folder must exist."""
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


def make_record(path: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Make a folder with its files, as `make_folder`, while it is locked as a record; return the files."""
    with lock_record(path):
        make_folder(path, files)
    return [path / name for name in files]


def make_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder with its files by relative path, atomically unless it is fixed. Nobody else may make it meanwhile.

    There may be an empty folder.
    """
    path, partial = path.resolve(), _companion(path, PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with translate_os_errors(path, UsageError):
            for name, content in files.items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                write_whole(partial / name, content)
            if partial.parent != path:
                os.rename(partial, path)
                _sync(path.parent)
            elif is_occupied(path):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
            else:
                for name in files:
                    (path / name).parent.mkdir(parents=True, exist_ok=True)
                    os.rename(partial / name, path / name)
                _sync(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_occupied(path: Path) -> bool:
    """Return whether something is there that is no empty folder, so that no folder can be made; raise OSError."""
    return path.exists() and not (path.is_dir() and set(os.listdir(path)) <= {LOCK, PARTIAL})


def _companion(path: Path, ending: str) -> Path:
    """Return the path of a lock or of what is being written: beside a folder, or inside one that is fixed.

    A folder is fixed if it is a mount point, as in a container, or if its parent cannot be written.
    """
    path = path.resolve()
    is_fixed = path.is_dir() and (_is_mount(path) or not os.access(path.parent, os.W_OK))
    return path / ending if is_fixed else path.with_name(path.name + ending)


def _is_mount(path: Path) -> bool:
    """Return whether a path is a mount point; `os.path.ismount` misses those of folders of the same disk."""
    table = Path("/proc/self/mountinfo")
    mounts = table.read_bytes().splitlines() if table.exists() else ()
    return os.path.ismount(path) or os.fsencode(path) in (line.split()[4] for line in mounts)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_folder(
    folder: Path, say: Callable[[str], None] = lambda _: None, *, refuse: type[SpeedrunError] | None = None
) -> AbstractContextManager[None]:
    """Lock a folder with a file inside it, as `_locked`."""
    return _locked(folder / LOCK, folder, say, refuse)


def lock_record(record: Path, what: str = "") -> AbstractContextManager[None]:
    """Lock a record, or `what` is done with it, with a file beside it, as `_locked`; do not wait.

    The file lies inside a record's folder that is fixed.
    """
    return _locked(_companion(record, what + LOCK), record, refuse=UsageError)


@contextmanager
def _locked(
    path: Path, folder: Path, say: Callable[[str], None] = print, refuse: type[SpeedrunError] | None = None
) -> Iterator[None]:
    """Hold a lock inside the block. If another process has it, wait and `say` so, or raise `refuse`."""
    from filelock import FileLock, Timeout  # a record is validated without it

    # Soft locks are files that are there or not: a killed holder would leave one.
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    found = f"{folder}: another program writes into it"
    with translate_os_errors(folder, refuse or DataError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0.2)
        except Timeout:
            os.lstat(path)  # where no file can be made, as in /proc, filelock waits for one
            if refuse is not None:
                raise refuse(f"{found}; wait for its end, or choose another folder") from None
            say(f"{found}; waiting for it to end")
            lock.acquire()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
