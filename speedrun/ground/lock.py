"""Programs that write into one folder take turns: whoever does holds its lock."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from speedrun.ground.errors import DataError, SpeedrunError, UsageError, refusals_told

LOCK = ".lock"  #: a file, not the folder itself: network disks lock only what is open for writing


def alone_in(
    folder: Path, say: Callable[[str], None] = lambda _: None, *, refuse: type[SpeedrunError] | None = None
) -> AbstractContextManager[None]:
    """Is alone in a folder, by a lock inside it: see `_held`."""
    return _held(folder / LOCK, folder, say, refuse)


def alone_with(record: Path) -> AbstractContextManager[None]:
    """Is alone with a record, by a lock beside it; waits for nobody. See `_held`."""
    beside = record.resolve()
    return _held(beside.with_name(beside.name + LOCK), record, refuse=UsageError)


@contextmanager
def _held(
    path: Path, folder: Path, say: Callable[[str], None] = print, refuse: type[SpeedrunError] | None = None
) -> Iterator[None]:
    """Holds a lock that ends with the process, however it ends; waits for another program to let go of it.

    Args:
        path: of the lock; its folder is made.
        folder: what it guards.
        say: is told that there is another program.
        refuse: the error to raise instead of waiting.

    Raises:
        SpeedrunError: `refuse` or DataError, if the lock cannot be written; `refuse`, if there is another program.
    """
    with refusals_told(folder, refuse or DataError):
        path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with refusals_told(folder, refuse or DataError):
            file = path.open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if refuse is not None:
                    raise refuse(
                        f"{folder}: another program writes into it; wait for its end, or choose another folder"
                    ) from None
                say(f"{folder}: another program writes into it; waiting for it to end")
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:  # some network disks know no locks
                raise (refuse or DataError)(
                    f"{path}: cannot be locked: {error.strerror}; choose a folder on another disk"
                ) from None
            # Who had it before has removed the file, and somebody may have made a new one: only that one counts.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                try:
                    yield
                finally:
                    path.unlink()
                return
