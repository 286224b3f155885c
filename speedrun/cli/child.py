"""Processes of ours that a command starts one after the other, so that it holds no device itself."""

import fcntl
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import msgspec

from speedrun.ground import children
from speedrun.ground.errors import UsageError
from speedrun.ground.wholefile import write_whole


def ended(module: str, request: dict[str, Any], *, to_stderr: bool, keep_open: tuple[int, ...] = ()) -> int:
    """The exit code of a module of ours that was given a request; signals go on to it."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "request.json")
        write_whole(path, msgspec.json.encode(request))
        child = Popen(
            [sys.executable, "-m", module, str(path)],
            stdout=sys.stderr if to_stderr else None,
            pass_fds=keep_open,
            process_group=0,
        )
        return children.wait_for(child)


def as_shell(code: int) -> int:
    """What a shell makes of the exit code of a child that a signal killed."""
    return code if code > 0 else 128 - code


@contextmanager
def alone(promise: Path) -> Iterator[int]:
    """Locks what a file promises; its runs are handed the descriptor, so that one left alone holds the lock, too.

    Raises:
        UsageError: if somebody else has it.
    """
    # Network disks lock only what is open for writing.
    with promise.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{promise.parent} is being run by another process; wait for it to end"
            ) from None
        yield file.fileno()
