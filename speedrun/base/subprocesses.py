"""Child processes: signals are forwarded, and a child ends before its parent.

`beside` starts the helpers of a run (`--wandb`, `--watch`, `--sample-every`). A helper works until its standard input
ends, and any failure of it is one warning.
"""

import contextlib
import os
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import IO, Any

import msgspec

from speedrun.base import signals
from speedrun.base.atomic_files import write_whole
from speedrun.base.console import clean
from speedrun.base.errors import INTERRUPTED, SpeedrunError, Terminated, UsageError
from speedrun.base.exit_codes import meaning
from speedrun.base.sourcefile import RECIPES_VARIABLE

KILL_AFTER_S = 5.0  #: from the second signal to SIGKILL
NICENESS = 10  #: of a process beside a run, which needs the cores
_HASTE_S = 10.0


@contextmanager
def stoppable() -> Iterator[None]:
    """Handle signals of a whole command with `signals.stop`. A second signal ends the process at once."""
    try:
        with signals.handled_by(signals.stop):
            yield
    except Terminated:
        for number in signals.STOPS:
            signal.signal(number, lambda *_: os._exit(INTERRUPTED))
        raise


@contextmanager
def started(module: str, request: msgspec.Struct, *words: str, **more: Any) -> Iterator[Popen[Any]]:
    """Start a module of this package on a JSON file with `request`, and `words`; pass `more` to `Popen`."""
    with tempfile.TemporaryDirectory(prefix="speedrun-") as scratch:
        path = Path(scratch, "request.json")
        write_whole(path, msgspec.json.encode(request, enc_hook=str))
        # -P: the current folder may hold files named as modules are.
        yield Popen([sys.executable, "-P", "-m", module, str(path), *words], process_group=0, **more)


def run_module(module: str, request: msgspec.Struct) -> int:
    """Run a module of this package on a request; return its exit code as `wait_for` does."""
    with started(module, request) as child:
        return wait_for(child)


def wait_for(child: Popen[Any], kill_after_s: float = KILL_AFTER_S) -> int:
    """Wait for a child, forward SIGINT and SIGTERM to it, and return its exit code.

    Return 75 if the first signal stopped it, and 130 if it ignored a second one for `kill_after_s` and was killed with
    its group. Start it with `process_group=0`, or a terminal sends it each Ctrl-C as well.
    """
    if threading.current_thread() is not threading.main_thread():  # no signal comes here
        return child.wait()
    got: list[int] = []

    def suspend(_number: int, _frame: object) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(child.pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.killpg(child.pid, signal.SIGCONT)

    def forward(number: int, _frame: object) -> None:
        got.append(number)
        child.send_signal(number)
        if len(got) > 1:
            raise KeyboardInterrupt

    with signals.handled_by(forward), signals.handled_by(suspend, signal.SIGTSTP):
        try:
            code = child.wait()
        except KeyboardInterrupt:
            with suppress(TimeoutExpired, KeyboardInterrupt):
                return _stopped(child.wait(kill_after_s), got)
            kill(child)
            with suppress(KeyboardInterrupt):
                child.wait()
            return INTERRUPTED
    return _stopped(code, got)


def kill(child: Popen[Any]) -> None:
    """Kill a child and its group, as far as they are alive."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()  # it may have left its group


def _stopped(code: int, got: list[int]) -> int:
    return Terminated.exit_code if -code in signals.STOPS or (got and not code) else code


def shell_code(code: int) -> int:
    """Return the exit code as a shell reports it: 128 plus the signal that killed the child."""
    return code if code >= 0 else 128 - code


def run_error(code: int, command: str, out: Path, data: Path | None) -> SpeedrunError:
    """Return the error of a run that failed, with the command to resume; `data` if it is not the track's."""
    own = os.environ.get(RECIPES_VARIABLE, "")
    resume = ["env", f"{RECIPES_VARIABLE}={own}"] * bool(own) + ["speedrun", command, "--resume", str(out)]
    resume += [] if data is None else ["--data", str(data)]
    ended = f"ended with {meaning(code)}" if code else "left no result, although its process succeeded"
    how = "mend that, then resume with" if code == UsageError.exit_code else "resume with"
    return SpeedrunError(f"a run {ended}; {how}: {shlex.join(resume)}", shell_code(code))


def samples_of(record: Path) -> Path:
    """Return the file that `--sample-every` writes beside a record."""
    return Path(f"{record.resolve()}.samples.jsonl")


@contextmanager
def beside(
    name: str, module: str, words: Sequence[str], remedy: str, *, leave_s: float, is_heard: bool = False
) -> Iterator[None]:
    """Run a module of this package with arguments `words` inside the block.

    A warning starts with `name` and ends with `remedy`. After the block, the module is killed after `leave_s`, or
    `_HASTE_S` if the block raised. If it `is_heard`, its output is printed, and it must leave no child behind.
    """
    with contextlib.ExitStack() as stack:
        try:
            # Not a pipe, which its children would hold open.
            said = stack.enter_context(tempfile.TemporaryFile())
            # A child that is killed cannot remove its scratch files.
            scratch = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            child = Popen(
                [sys.executable, "-P", "-m", module, *words],
                stdin=PIPE,
                stdout=PIPE if is_heard else DEVNULL,
                stderr=said,
                env={**os.environ, "TMPDIR": scratch},
                process_group=0,  # a Ctrl-C is for the run
            )
        except OSError as error:
            say(f"warning: {name}: cannot start: {error.strerror}; {remedy}")
            yield
            return
        overdue: list[str] = []
        waiting = threading.Thread(target=_report, args=[child, said, name, remedy, overdue], daemon=True)
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
            finally:  # also if a signal arrives
                if waiting.is_alive():
                    overdue.append(f"it did not end within {leave_s:.0f} s after the run")
                    kill(child)
                    waiting.join()


def _report(child: Popen[bytes], said: IO[bytes], name: str, remedy: str, overdue: list[str]) -> None:
    """Print the child's output and wait for it; warn if it failed, or was killed because it was `overdue`."""
    with child.stdout or contextlib.nullcontext(()) as printed:
        for line in printed:
            say(line.decode(errors="replace").rstrip("\n"))
    if not (code := child.wait()):
        return
    said.seek(0)
    problem = said.read().decode(errors="replace").strip().rpartition("\n")[2].removeprefix("error: ")
    if code < 0 or not problem:
        problem = "".join(overdue) or f"its process ended with {meaning(code)}"
    say(f"warning: {name}: {problem}; {remedy}")


def say(line: str) -> None:
    """Print a line on standard error."""
    sys.stderr.write(clean(line) + "\n")
