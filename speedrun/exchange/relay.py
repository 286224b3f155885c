"""`--wandb PROJECT`: a child process sends the growing logs of a record to wandb.

The run depends on none of it. Whatever goes wrong with wandb (not installed, no key, no server) is one warning, and the
child is gone ten seconds after the run.

python -m speedrun.exchange.relay RECORD PROJECT [RUN...]      skips these runs; ends with its standard input
"""

import os
import select
import sys
import tempfile
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO

from speedrun.board import leaks
from speedrun.exchange.wandb_runs import WandbRun, library
from speedrun.ground import children, runlog
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
    return children.beside(
        "speedrun.exchange.relay",
        [str(record), project, *old],
        children.Remedy("wandb", "to send the record later", export),
        leave_s=_LEAVE_S,
    )


def _sent(path: Path, begin: Callable[[runlog.Line], WandbRun]) -> Iterator[None]:
    """Send the lines of a growing log to a run that its first line begins; pause where there is none yet."""
    tail, run = Tail(path), None
    while True:
        for raw in (raw for piece in iter(tail.read, None) for raw in piece.lines):
            line = runlog.decode(raw)
            if isinstance(line.event, runlog.RunStart):
                # The only line with free text of which wandb gets anything.
                if secret := next((leak for leak in leaks.find(raw) if leak.secret), None):
                    raise UsageError(f"line 1 of {path} holds {secret.kind}; nothing of it is sent")
                run = begin(line)
            elif run is not None:
                run(line)
            if isinstance(line.event, runlog.RunEnd) and run is not None:
                run.finish(succeeded=line.event.status == "finished")
        yield


def relay(record: Path, project: str, skip: Container[str], until: IO[bytes]) -> None:
    """Send the logs of a record but for some runs, and what is appended to them, until a stream ends.

    Raises:
        UsageError: if wandb is not installed or set not to send, or if there is a secret in what it would be sent.
        wandb.Error: from wandb.
    """
    if (mode := os.environ.get("WANDB_MODE", "online")) not in ("online", "shared"):
        raise UsageError(f"WANDB_MODE={mode}, which sends nothing")
    with tempfile.TemporaryDirectory() as scratch:
        wandb, group = library(), record.resolve().name
        begin = partial(WandbRun, wandb, scratch=scratch, mode="online", project=project, group=group)
        logs: dict[Path, Iterator[None]] = {}
        is_over = False
        while not is_over:
            is_over = bool(select.select([until], [], [], _POLL_S)[0])
            for path in sorted(record.glob("runs/*/metrics.jsonl")):
                if path.parent.name not in skip:
                    next(logs.setdefault(path, _sent(path, begin)))
        wandb.teardown()


if __name__ == "__main__":
    with reported():
        os.nice(children.NICENESS)
        relay(Path(sys.argv[1]), sys.argv[2], sys.argv[3:], sys.stdin.buffer)
