"""Standard streams, and errors as one line and an exit code."""

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

LOST: dict[int, OSError] = {}  #: first error of writing, by descriptor
_LONGEST = 300  #: characters of another library's message


@contextmanager
def reported() -> Iterator[None]:
    """Report an expected error as one line with its exit code. For modules that run as processes of their own."""
    tolerate_closed_streams()
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
    """End the process without Python's cleanup, which would wait for XLA to finish compiling."""
    sys.stdout.flush()
    os._exit(exit_code)


def expected(error: BaseException) -> SpeedrunError | Terminated | None:
    """Return an error that a user can cause, also out of memory or an error of a recipe, as one of ours; else None."""
    if isinstance(error, SpeedrunError | Terminated):
        return error
    said = " ".join(str(error).split())[:_LONGEST].rstrip(".")
    # XLA's messages for device and host memory. Naming its error class would import JAX.
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in said or "Out of memory" in said:
        return UsageError(f"out of memory: {said or 'no more to be had'}; ask for less, or use more devices")
    if isinstance(error, Exception) and (line := line_of_recipe(error)):
        return UsageError(f"{line}: {type(error).__name__}: {said}; the recipe has to be corrected there")
    return None


def line_of_recipe(error: Exception) -> str:
    """Return the innermost line of science in a traceback, as `speedrun/science/nn.py:7`; empty if there is none."""
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


class _Unfailing(io.FileIO):
    """A file that drops what it cannot write, and keeps the first error."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            LOST.setdefault(self.fileno(), error)
            return memoryview(data).nbytes


def unfailing(descriptor: int, encoding: str = "utf-8") -> TextIO:
    """Return a text stream that never fails: not for a closed pipe, a full disk or a character it cannot encode."""
    raw = io.BufferedWriter(_Unfailing(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(
        raw, encoding, errors="backslashreplace", line_buffering=descriptor == 2 or os.isatty(descriptor)
    )


def tolerate_closed_streams() -> None:
    """Make standard output and standard error `unfailing`: a command must not fail because its reader has left."""
    sys.stdout = _unfailing_stream(1, sys.stdout, sys.__stdout__)
    sys.stderr = _unfailing_stream(2, sys.stderr, sys.__stderr__)


def _unfailing_stream(descriptor: int, stream: TextIO | None, original: TextIO | None) -> TextIO:
    if stream is None:  # closed: keep the descriptor's number from other files
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        return unfailing(descriptor)
    # A replaced stream, as in tests, stays.
    return unfailing(descriptor, stream.encoding) if stream is original else stream
