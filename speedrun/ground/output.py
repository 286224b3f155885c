"""What a program says on its standard streams, and how it ends: an expected error is one line and an exit code."""

import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

from speedrun.ground.errors import INTERRUPTED, SpeedrunError, Terminated, UsageError
from speedrun.ground.sourcefile import recipe_folders

_LOST: dict[int, OSError] = {}  #: the first thing that a descriptor did not take
_LONGEST = 300  #: characters of what somebody else's error says


@contextmanager
def told() -> Iterator[None]:
    """Around the main part of a module that another process starts: an expected error is one line and its exit code."""
    outlive_readers()
    try:
        yield
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except BaseException as error:
        if (known := expected(error)) is None:
            raise
        print(f"error: {known}", file=sys.stderr)  # noqa: T201
        if isinstance(known, Terminated):
            leave(known.exit_code)
        sys.exit(known.exit_code)


def leave(exit_code: int) -> NoReturn:
    """Ends the process without Python's own end, which would wait for all that XLA still compiles."""
    sys.stdout.flush()
    os._exit(exit_code)


def expected(error: BaseException) -> SpeedrunError | Terminated | None:
    """An error that a user can cause, as one of ours: also too little memory, and what a recipe raises; else None."""
    if isinstance(error, SpeedrunError | Terminated):
        return error
    said = " ".join(str(error).split())[:_LONGEST].rstrip(".")
    # XLA's two ways to say it, of devices and of the host; its error is a class that only JAX could name.
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in said or "Out of memory" in said:
        return UsageError(f"out of memory: {said or 'no more to be had'}; ask for less, or use more devices")
    if isinstance(error, Exception) and (line := _line_of_recipe(error)):
        return UsageError(f"{line}: {type(error).__name__}: {said}; the recipe has to be corrected there")
    return None


def _line_of_recipe(error: Exception) -> str:
    """The innermost line of science that an error went through, as `speedrun/science/nn.py:7`; empty if none.

    What is raised there is an error of whoever wrote the recipe.
    """
    package = Path(__file__).parent.parent
    places = (package / "science", *recipe_folders())
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        lines.append((error.filename or "", error.lineno or 0))
    for name, number in reversed(lines):
        path = Path(name)
        if any(place in path.parents for place in places):
            return f"{path.relative_to(package.parent) if package in path.parents else path}:{number}"
    return ""


class _Lasting(io.FileIO):
    """A descriptor that takes everything: what can no longer be written is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _LOST.setdefault(self.fileno(), error)
            return memoryview(data).nbytes


def lasting(descriptor: int, encoding: str = "utf-8") -> TextIO:
    """A stream for words that fails for nothing: neither a reader that has left, nor a full disk, nor a character."""
    raw = io.BufferedWriter(_Lasting(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(
        raw, encoding, errors="backslashreplace", line_buffering=descriptor == 2 or os.isatty(descriptor)
    )


def outlive_readers() -> None:
    """Makes standard output and errors `lasting`: what a command does must not depend on who listens."""
    sys.stdout = _outliving(1, sys.stdout, sys.__stdout__)
    sys.stderr = _outliving(2, sys.stderr, sys.__stderr__)


def _outliving(descriptor: int, stream: TextIO | None, original: TextIO | None) -> TextIO:
    if stream is None:  # closed; no file of ours may get its number
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        return lasting(descriptor)
    # Whoever put another one in its place, as tests do, keeps it.
    return lasting(descriptor, stream.encoding) if stream is original else stream


def lost_output() -> str:
    """Why standard output did not take everything; empty if it did, or if its reader did not want more."""
    sys.stdout.flush()
    lost = _LOST.get(sys.stdout.fileno())
    return "" if lost is None or isinstance(lost, BrokenPipeError) else str(lost.strerror)
