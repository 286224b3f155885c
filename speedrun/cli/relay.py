"""`--wandb PROJECT`: a process of its own sends the logs of a record to wandb while they grow.

The run knows nothing of it: the local log comes first, and whatever happens to wandb (not installed, no key, no
server, one that never answers) is one warning and a process that is gone ten seconds after the run.

python -m speedrun.cli.relay RECORD PROJECT [RUN...]      all but these, until its standard input ends
"""

import contextlib
import importlib
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Container, Iterator
from pathlib import Path
from typing import IO, Any

import click

from speedrun.board import leaks
from speedrun.cli.options import Decorator
from speedrun.exchange.trackers import ENVIRONMENT, WandbRun
from speedrun.ground import console, runlog
from speedrun.ground.errors import UsageError, meaning
from speedrun.ground.output import told

_LEAVE_S = 10.0  #: from the end of the run until wandb must have everything
_LOOK_S = 1.0  #: between two looks at the logs
_NICENESS = 10  #: cores are the run's first

#: `--wandb PROJECT`, as the argument `wandb` for `relayed`.
wandb_option: Decorator = click.option(
    "--wandb",
    metavar="PROJECT",
    help="Send the numbers to this project of wandb as they come, from a process of its own. It cannot stop the run.",
)


@contextlib.contextmanager
def relayed(record: Path, project: str | None) -> Iterator[None]:
    """Inside the block, what the runs of a record log goes to wandb; afterwards it has ten seconds more.

    Args:
        record: its folder, which need not be there yet.
        project: None: nothing goes anywhere.
    """
    if project is None:
        yield
        return
    with contextlib.ExitStack() as held:
        try:
            child, telling = _started(record, project, held)
        except OSError as error:
            _warn(record, f"it cannot start: {error.strerror}")
            yield
            return
        try:
            yield
        finally:
            _leave(child, telling)


def _started(
    record: Path, project: str, held: contextlib.ExitStack
) -> tuple[subprocess.Popen[bytes], threading.Thread]:
    """The process, and the thread that waits for its end."""
    # What is there already was sent when it was written.
    old = [path.name for path in record.glob("runs/*")]
    # No pipe: processes that wandb starts would hold it open.
    errors = held.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    # Of one that had to be killed nobody else would clear away what it wrote.
    scratch = held.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
    child = subprocess.Popen(
        [sys.executable, "-m", "speedrun.cli.relay", str(record), project, *old],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env={**os.environ, "TMPDIR": scratch},
        process_group=0,  # a Ctrl-C is for the run
    )
    telling = threading.Thread(target=_tell, args=[child, errors, record], daemon=True)
    telling.start()
    return child, telling


def _leave(child: subprocess.Popen[bytes], telling: threading.Thread) -> None:
    """Tells the process that the run is over, and sees that it goes."""
    assert child.stdin is not None
    child.stdin.close()
    telling.join(_LEAVE_S)
    if telling.is_alive():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(child.pid, signal.SIGKILL)
        telling.join()


def _tell(child: subprocess.Popen[bytes], errors: IO[bytes], record: Path) -> None:
    """Waits for the process; one line if it did not send everything."""
    if not (code := child.wait()):
        return
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().rpartition("\n")[2].removeprefix("error: ")
    said = said or f"its process ended with {meaning(code)}"
    if code == -signal.SIGKILL:
        said = f"it did not take everything within {_LEAVE_S:.0f} s after the run"
    _warn(record, said)


def _warn(record: Path, said: str) -> None:
    later = shlex.join(["speedrun", "export", str(record), "--to", "wandb"])
    click.echo(console.clean(f"warning: wandb: {said}; the record has it all; for later: {later}"), err=True)


class _Log:
    """One growing log, and the run of wandb that shows it."""

    def __init__(self, path: Path) -> None:
        self._path, self._place = path, 0
        self._run: WandbRun | None = None

    def send(self, wandb: Any, record: Path, project: str, scratch: str) -> None:
        """Passes on the lines that are whole and were not there last time."""
        with self._path.open("rb") as file:
            file.seek(self._place)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._place += len(whole + newline)
        for raw in whole.splitlines():
            line = runlog.decode(raw)
            if isinstance(line.event, runlog.RunStart):
                # Of the lines that wandb is sent something of, this one alone holds words.
                if secret := next((leak for leak in leaks.find(raw) if leak.secret), None):
                    raise UsageError(f"line 1 of {self._path} holds {secret.kind}; nothing of it is sent")
                self._run = WandbRun(
                    wandb, line, scratch=scratch, mode="online", project=project, group=record.resolve().name
                )
            elif self._run is not None:
                self._run(line)
            if isinstance(line.event, runlog.RunEnd) and self._run is not None:
                self._run.finish(succeeded=line.event.status == "finished")


def relay(record: Path, project: str, old: Container[str], until: IO[bytes]) -> None:
    """Sends what the logs of a record say and will say, until a stream ends.

    Args:
        record: its folder.
        project: of wandb.
        old: ids of runs that were sent before.
        until: where the end comes from.

    Raises:
        UsageError: if wandb is not installed or told not to send, or if there is a secret in what it would be sent.
        wandb.Error: whatever else wandb has to say.
    """
    if (mode := os.environ.get("WANDB_MODE", "online")) not in ("online", "shared"):
        raise UsageError(f"WANDB_MODE={mode}, which sends nothing")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= ENVIRONMENT
        try:
            wandb = importlib.import_module("wandb")
        except ModuleNotFoundError:
            raise UsageError("not installed; type: pip install 'speedrun[wandb]'") from None
        logs: dict[Path, _Log] = {}
        is_over = False
        while not is_over:
            is_over = bool(select.select([until], [], [], _LOOK_S)[0])
            for path in sorted(record.glob("runs/*/metrics.jsonl")):
                if path.parent.name not in old:
                    logs.setdefault(path, _Log(path)).send(wandb, record, project, scratch)
        wandb.teardown()


if __name__ == "__main__":
    with told():
        os.nice(_NICENESS)
        relay(Path(sys.argv[1]), sys.argv[2], sys.argv[3:], sys.stdin.buffer)
