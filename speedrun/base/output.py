"""Standard streams, and errors as one line and an exit code."""

import errno
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

from speedrun.base import signals
from speedrun.base.errors import INTERRUPTED, SpeedrunError, Terminated, UsageError
from speedrun.base.sourcefile import IMPORTED

LOST: dict[int, OSError] = {}  #: first error of writing, by descriptor
DEBUG = "SPEEDRUN_DEBUG"  #: the variable that `--debug` sets, for this process and those that it starts
_LONGEST = 300  #: characters of another library's message
_PACKAGE = Path(__file__).parent.parent
#: Files that only check values of a recipe, and so are not the place of an error.
_GUARDS = {__file__, str(Path(__file__).with_name("field_types.py"))}
#: Messages of XLA, the dynamic linker and Python if memory is out. Their error classes would need imports.
_NO_MEMORY = re.compile(
    "RESOURCE_EXHAUSTED|Out of memory|failed to map segment|annot allocate memory|t start new thread"
)


@contextmanager
def reported() -> Iterator[None]:
    """Report an expected error of a child process as one line with its exit code; end it after any error at once."""
    own_process()
    try:
        yield
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if known := expected(error):
            show_traceback(error)
            print(f"error: {text_of(known)}", file=sys.stderr)  # noqa: T201
        else:
            traceback.print_exception(error)
        leave((known or SpeedrunError).exit_code)


def show_traceback(error: BaseException) -> None:
    """Print the traceback of an expected error with `--debug`."""
    if os.environ.get(DEBUG):
        traceback.print_exception(error)


def leave(exit_code: int) -> NoReturn:
    """End the process without Python's cleanup, which would wait for XLA to compile, and for threads of any library."""
    sys.stdout.flush()
    os._exit(exit_code)


def expected(error: BaseException) -> SpeedrunError | Terminated | None:
    """Return an error that a user can cause as one of ours, else None.

    Those are ours, out of memory, a name too long, and anything that a recipe raises.
    """
    said, by_recipe = text_of(error), _by_recipe(file for file, _ in reversed(_lines(error)))
    short = said[:_LONGEST].rstrip(".")
    if by_recipe and isinstance(error, UsageError):
        return UsageError(said)
    if isinstance(error, SpeedrunError | Terminated) and not by_recipe:
        return error
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError(f"{str(error.filename)[:80]}...: {error.strerror}; need a shorter name")
    if isinstance(error, MemoryError) or _NO_MEMORY.search(said):
        return UsageError(f"out of memory: {short or 'nothing left'}; use less, or more devices")
    if by_recipe and not isinstance(error, KeyboardInterrupt):
        kind, at = type(error).__name__, _raised_at(error)
        return UsageError(f"{kind}: {short}; {at}; 'speedrun --debug' shows the traceback")
    return None


def text_of(error: BaseException) -> str:
    """Return the message of an error as one line, even if its `__str__` raises."""
    said = str(traceback.TracebackException(type(error), error, None))
    return " ".join(said.encode(errors="backslashreplace").decode().split())


def _by_recipe(files: Iterable[str]) -> bool:
    """Return whether a recipe or science comes before other code of ours. Installed packages do not count."""
    ours = (file for file in files if _is_science(file) or _PACKAGE in Path(file).parents)
    return _is_science(next(ours, ""))


def _raised_at(error: BaseException) -> str:
    """Say where an error was raised, and which line of a recipe called that."""
    lines = _lines(error)
    science = [line for line in lines if _is_science(line[0])]
    places = dict.fromkeys([lines[-1], science[-1], *[line for line in science if line[0] in IMPORTED][-1:]])
    said = [
        _shown(*line) if i == 0 or line[0] not in IMPORTED else f"your recipe at {_shown(*line)}"
        for i, line in enumerate(places)
    ]
    return f"raised at {', called from '.join(said)}"


def _lines(error: BaseException) -> list[tuple[str, int]]:
    """Return file and line of each frame except those of guards, innermost last."""
    found = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        found.append((error.filename or "", error.lineno or 0))
    return [line for line in found if line[0] not in _GUARDS]


def _is_science(file: str) -> bool:
    return file in IMPORTED or not {_PACKAGE / "science", _PACKAGE / "recipes"}.isdisjoint(Path(file).parents)


def _shown(file: str, number: int) -> str:
    """Return a line as text, with the path of a package's file relative to its package."""
    path = Path(file)
    inside = path.relative_to(_PACKAGE.parent) if _PACKAGE in path.parents else path
    return f"{str(inside).rpartition('site-packages/')[2]}:{number}"


def own_process() -> None:
    """Prepare a process of ours: its streams never fail, and SIGHUP stops it."""
    sys.stdout = _unfailing_stream(1, sys.stdout, sys.__stdout__)
    sys.stderr = _unfailing_stream(2, sys.stderr, sys.__stderr__)
    # After a failed read or write, orbax and tensorstore would print 600 lines, some when leftovers are collected.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    hook = sys.unraisablehook
    sys.unraisablehook = lambda found: None if _is_known(found.exc_value) else hook(found)
    signals.hang_up_as_term()


def _is_known(dropped: BaseException | None) -> bool:
    """Return whether an exception that Python drops is reported: `signals.stop` raises again, and orbax has failed."""
    return isinstance(dropped, Terminated) or "Event loop is closed" in str(dropped)


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
    by_line = descriptor == 2 or os.isatty(descriptor)
    return io.TextIOWrapper(raw, encoding, errors="backslashreplace", line_buffering=by_line)


def _unfailing_stream(descriptor: int, stream: TextIO | None, original: TextIO | None) -> TextIO:
    """Make a standard stream `unfailing`: a command must not fail because its reader has left."""
    if stream is None:  # closed: keep the descriptor's number from other files
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        return unfailing(descriptor)
    # A replaced stream, as in tests, stays.
    return unfailing(descriptor, stream.encoding) if stream is original else stream
