"""Errors a user can cause, and the exit code each one ends the program with.

Every message has three parts: what we got, what we need, what to do. It fits on one line.
"""

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class SpeedrunError(Exception):
    """The program ran and the answer is no: a target missed, a check failed."""

    exit_code = 1


class UsageError(SpeedrunError):
    """An argument, a setting or an output folder that cannot be used."""

    exit_code = 2


class DataError(SpeedrunError):
    """Shards that are missing, damaged, foreign or too short."""

    exit_code = 3


class StorageError(SpeedrunError):
    """A file that the disk refuses to take: it is full, or may not be written."""

    exit_code = 4


class CheckpointError(StorageError):
    """A checkpoint that cannot be written, or none that can be restored."""


class NonFiniteError(SpeedrunError):
    """A loss or gradient that is not a finite number."""

    exit_code = 5


class Terminated(BaseException):
    """SIGTERM or SIGINT was received. Subclasses BaseException, so that no `except Exception` swallows it."""

    exit_code = 75


HANG = 6  #: no error: nothing in a run that stands still could raise it

#: SIGINT that nothing heeded; what a shell makes of it.
INTERRUPTED = 130

#: One of several processes was lost; what a shell makes of SIGABRT, with which JAX ends the others.
LOST = 134

#: What `speedrun --help` and docs/commands.md print.
EXIT_CODES = {
    0: "done",
    1: "ran, and the answer is no: target missed or a check failed",
    2: "usage: unknown name, bad setting, output folder or device count",
    3: "data: shard missing, damaged, foreign or too short",
    4: "storage: a file or checkpoint cannot be written, or no checkpoint is whole",
    5: "non-finite loss; the first bad leaf is named",
    HANG: "hang: a phase went past its deadline; all stacks are kept",
    75: "stopped by SIGTERM or Ctrl-C; log and checkpoints are kept",
    INTERRUPTED: "interrupted a second time, or where there was nothing to keep",
    LOST: "one of several processes was lost; what they had written is kept",
}


def meaning(code: int) -> str:
    """An exit code in words: of one of our programs, or of one that a signal killed."""
    known = f"signal {-code}" if code < 0 else EXIT_CODES.get(code, "none of ours")
    return f"exit code {code} ({known})"


@contextmanager
def refusals_told(path: object, otherwise: type[SpeedrunError] = StorageError) -> Iterator[None]:
    """Around what writes a file or makes a folder: what the disk refuses is one line.

    Raises:
        SpeedrunError: in place of OSError: StorageError if the disk is full or fails, `otherwise` if not.
    """
    try:
        yield
    except OSError as error:
        kind = StorageError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else otherwise
        raise kind(f"{path}: cannot be written: {error.strerror}; free or choose another folder") from None


def unknown(kind: str, got: str, known: Iterable[str]) -> UsageError:
    """The error for a name that does not exist: names those that end in it as in `a.b.got`, else the nearest one."""
    known = sorted(known)
    near = [name for name in known if name.endswith(f".{got}")]
    near = near or difflib.get_close_matches(got, known, n=1, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"choose one of: {', '.join(known)}"
    return UsageError(f"unknown {kind} {got!r}; {hint}")
