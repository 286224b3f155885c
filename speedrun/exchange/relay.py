"""`--wandb PROJECT`: a child process sends the growing logs of a record to wandb.

The run depends on none of it. Whatever goes wrong with wandb (not installed, no key, no server) is one warning, and the
child is gone ten seconds after the run.

python -m speedrun.exchange.relay RECORD PROJECT [RUN...]      skips these runs; ends with its standard input
"""

import os
import select
import sys
import tempfile
from collections.abc import Container
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

from speedrun.board import leaks
from speedrun.exchange.wandb_runs import WandbRun, library
from speedrun.ground import companion, runlog
from speedrun.ground.errors import UsageError
from speedrun.ground.output import reported
from speedrun.ground.tail import Tail

_LEAVE_S = 10.0  #: from the end of the run until the child is killed
_POLL_S = 1.0  #: between two reads of the logs


def relayed(record: Path, project: str | None) -> AbstractContextManager[None]:
    """Inside the block, send the logs of a record's new runs to wandb; without a project, send nothing."""
    if project is None:
        return nullcontext()
    old = [path.name for path in record.glob("runs/*")]
    export = ["speedrun", "export", str(record), "--to", "wandb"]
    return companion.beside(
        "speedrun.exchange.relay",
        [str(record), project, *old],
        companion.Remedy("wandb", "to send the record later", export),
        leave_s=_LEAVE_S,
    )


class _Log:
    """A growing log and its run in wandb."""

    def __init__(self, path: Path) -> None:
        self._path, self._tail = path, Tail(path)
        self._run: WandbRun | None = None

    def send(self, wandb: Any, record: Path, project: str, scratch: str) -> None:
        """Send the complete lines that are new."""
        for raw in (raw for piece in iter(self._tail.read, None) for raw in piece.lines):
            line = runlog.decode(raw)
            if isinstance(line.event, runlog.RunStart):
                # The only line with free text of which wandb gets anything.
                if secret := next((leak for leak in leaks.find(raw) if leak.secret), None):
                    raise UsageError(f"line 1 of {self._path} holds {secret.kind}; nothing of it is sent")
                self._run = WandbRun(
                    wandb, line, scratch=scratch, mode="online", project=project, group=record.resolve().name
                )
            elif self._run is not None:
                self._run(line)
            if isinstance(line.event, runlog.RunEnd) and self._run is not None:
                self._run.finish(succeeded=line.event.status == "finished")


def relay(record: Path, project: str, skip: Container[str], until: IO[bytes]) -> None:
    """Send the logs of a record but for some runs, and what is appended to them, until a stream ends.

    Raises:
        UsageError: if wandb is not installed or set not to send, or if there is a secret in what it would be sent.
        wandb.Error: from wandb.
    """
    if (mode := os.environ.get("WANDB_MODE", "online")) not in ("online", "shared"):
        raise UsageError(f"WANDB_MODE={mode}, which sends nothing")
    with tempfile.TemporaryDirectory() as scratch:
        wandb = library()
        logs: dict[Path, _Log] = {}
        is_over = False
        while not is_over:
            is_over = bool(select.select([until], [], [], _POLL_S)[0])
            for path in sorted(record.glob("runs/*/metrics.jsonl")):
                if path.parent.name not in skip:
                    logs.setdefault(path, _Log(path)).send(wandb, record, project, scratch)
        wandb.teardown()


if __name__ == "__main__":
    with reported():
        os.nice(companion.NICENESS)
        relay(Path(sys.argv[1]), sys.argv[2], sys.argv[3:], sys.stdin.buffer)
