"""Locks of folders, so that one program at a time writes into each."""

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from speedrun.base.errors import DataError, SpeedrunError, UsageError, translate_os_errors

LOCK = ".lock"  #: a file, not the folder itself: network disks lock only what is open for writing


def lock_folder(
    folder: Path, say: Callable[[str], None] = lambda _: None, *, refuse: type[SpeedrunError] | None = None
) -> AbstractContextManager[None]:
    """Lock a folder with a file inside it, as `_locked`."""
    return _locked(folder / LOCK, folder, say, refuse)


def lock_record(record: Path) -> AbstractContextManager[None]:
    """Lock a record with a file beside it, as `_locked`; do not wait."""
    path = record.resolve()
    return _locked(path.with_name(path.name + LOCK), record, refuse=UsageError)


@contextmanager
def _locked(
    path: Path, folder: Path, say: Callable[[str], None] = print, refuse: type[SpeedrunError] | None = None
) -> Iterator[None]:
    """Hold a lock inside the block, or until the process dies; if it is taken, wait and `say` so, or raise `refuse`."""
    while True:
        with translate_os_errors(folder, refuse or DataError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Whatever lies there stays as it is: a link leads to another file, and a pipe would never open.
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.fdopen(os.open(path, flags, 0o666), "wb")
        with file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise (refuse or DataError)(f"{path}: not a regular file, as a lock is; remove it")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found = f"{folder}: another program writes into it"
                if refuse is not None:
                    raise refuse(f"{found}; wait for its end, or choose another folder") from None
                say(f"{found}; waiting for it to end")
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:  # some network disks have no locks
                hint = "choose a folder on another disk"
                raise (refuse or DataError)(f"{path}: cannot be locked: {error.strerror}; {hint}") from None
            # The previous holder removed its file, and another process may have made a new one: only that counts.
            try:
                is_ours = os.path.samestat(path.stat(), os.fstat(file.fileno()))
            except FileNotFoundError:
                is_ours = False
            if is_ours:
                try:
                    yield
                finally:
                    path.unlink()
                return
