"""Errors that a user can cause, and their exit codes: `exit_codes` explains them.

Every message is one line with three parts: what we got, what we need, what to do.
"""

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class SpeedrunError(Exception):
    """The command ran and the answer is no, such as a missed target or a failed check."""

    exit_code = 1

    def __init__(self, message: str, exit_code: int = 0) -> None:
        """Set the exit code of this error; 0 keeps that of its class."""
        super().__init__(message)
        self.exit_code = exit_code or self.exit_code


class UsageError(SpeedrunError):
    """An argument, a setting or an output folder that cannot be used."""

    exit_code = 2


class DataError(SpeedrunError):
    """Shards that are missing, damaged, foreign or too short."""

    exit_code = 3


class StorageError(SpeedrunError):
    """A file that cannot be written: the disk is full, or permission is denied."""

    exit_code = 4


class CheckpointError(StorageError):
    """A checkpoint cannot be written, or none can be restored."""


class NonFiniteError(SpeedrunError):
    """A loss or gradient that is not a finite number."""

    exit_code = 5


class Terminated(BaseException):
    """SIGTERM or SIGINT was received. A BaseException, so that no `except Exception` swallows it."""

    exit_code = 75


HANG = 6  #: the keeper ends a run that hangs
INTERRUPTED = 130  #: after a second SIGINT, as a shell reports it


@contextmanager
def translate_os_errors(path: object, otherwise: type[SpeedrunError] = StorageError) -> Iterator[None]:
    """Turn an OSError of writing into one line: a StorageError if the disk is full or fails, else `otherwise`."""
    try:
        yield
    except OSError as error:
        kind = StorageError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else otherwise
        raise kind(f"{path}: cannot be written: {error.strerror}; free or choose another folder") from None


@contextmanager
def translate_read_errors(
    path: object, advice: str, *more: type[Exception], kind: type[SpeedrunError] = DataError
) -> Iterator[None]:
    """Turn an OSError of reading, or a ValueError of what was read, into one line. `more` are errors of the reader."""
    try:
        yield
    except (OSError, ValueError, RecursionError, *more) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise kind(f"{path}: {reason}; {advice}") from None


def unknown(kind: str, got: str, known: Iterable[str], *, least: float = 0.5) -> UsageError:
    """Return the error for an unknown name: those that end alike, else the nearest if alike; all of a few."""
    known = sorted(known)
    near = [name for name in known if name.endswith(f".{got}") or got.endswith(name)]
    near = near or difflib.get_close_matches(got, known, n=1, cutoff=least)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    hint += f"choose one of: {', '.join(known)}" if not near or len(known) < 9 else ""
    return UsageError(f"unknown {kind} {got!r}; {hint.strip()}")
