"""A process of ours beside a run, which depends on none of it: `--wandb`, `--watch` and `--sample-every`.

It works until its standard input ends, with the run, and is killed if it then stays. Whatever goes wrong is one
warning.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from speedrun.ground import console
from speedrun.ground.exit_codes import meaning

NICENESS = 10  #: the run needs the cores
_HASTE_S = 10.0


def samples_of(record: Path) -> Path:
    """Return the file that `--sample-every` writes beside a record."""
    return Path(f"{record.resolve()}.samples.jsonl")


class Remedy(NamedTuple):
    """What a warning says beside the problem."""

    name: str  #: of the companion
    purpose: str  #: what the command is for
    command: Sequence[str]  #: what to type


@contextlib.contextmanager
def beside(
    module: str,
    words: Sequence[str],
    remedy: Remedy,
    *,
    leave_s: float,
    is_heard: bool = False,
) -> Iterator[None]:
    """Run a module of this package inside the block.

    Args:
        module: its name; it sets its own priority.
        words: its arguments.
        remedy: for the warning.
        leave_s: from the end of the block until it is killed; at most `_HASTE_S` if the block raised.
        is_heard: print what it prints, too; it must start no process that stays.
    """
    with contextlib.ExitStack() as stack:
        try:
            # Not a pipe: processes that it starts would hold it open.
            errors = stack.enter_context(tempfile.TemporaryFile())
            # A child that is killed cannot remove its scratch files.
            scratch = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            child = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if is_heard else subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "TMPDIR": scratch},
                process_group=0,  # a Ctrl-C is for the run
            )
        except OSError as error:
            _warn(remedy, f"it cannot start: {error.strerror}")
            yield
            return
        overdue: list[str] = []
        waiting = threading.Thread(target=_report, args=[child, errors, remedy, overdue], daemon=True)
        waiting.start()
        try:
            yield
        except BaseException:
            leave_s = min(leave_s, _HASTE_S)
            raise
        finally:
            assert child.stdin is not None
            child.stdin.close()
            try:
                waiting.join(leave_s)
            finally:  # also if a signal ends the waiting
                if waiting.is_alive():
                    overdue.append(f"it did not end within {leave_s:.0f} s after the run")
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        os.killpg(child.pid, signal.SIGKILL)
                    waiting.join()


def _report(child: subprocess.Popen[bytes], errors: IO[bytes], remedy: Remedy, overdue: list[str]) -> None:
    """Say what the child prints, and wait for it; warn if it failed, or was killed because it was `overdue`."""
    with child.stdout or contextlib.nullcontext(()) as printed:
        for line in printed:
            say(line.decode(errors="replace").rstrip("\n"))
    if not (code := child.wait()):
        return
    errors.seek(0)
    problem = errors.read().decode(errors="replace").strip().rpartition("\n")[2].removeprefix("error: ")
    if code < 0 or not problem:
        problem = "".join(overdue) or f"its process ended with {meaning(code)}"
    _warn(remedy, problem)


def _warn(remedy: Remedy, problem: str) -> None:
    say(f"warning: {remedy.name}: {problem}; {remedy.purpose}: {shlex.join(remedy.command)}")


def say(line: str) -> None:
    """Print a line on standard error."""
    sys.stderr.write(console.clean(line) + "\n")
