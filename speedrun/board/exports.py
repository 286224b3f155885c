"""A record in other formats (printed text, CSV), and its growing logs sent to wandb.

A child process sends to wandb, so that no failure of wandb reaches the run:

    python -m speedrun.board.exports RECORD PROJECT [RUN...]      skips these runs; ends with its standard input
"""

import csv
import importlib
import io
import os
import select
import shlex
import sys
import tempfile
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

from speedrun.base import console, runlog, subprocesses
from speedrun.base.atomic_files import make_record
from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.base.log_follower import LogFollower
from speedrun.base.output import reported
from speedrun.board import leaks
from speedrun.board.submission import require_outside
from speedrun.record.logged_run import Run, loss_of
from speedrun.record.reader import Record

_LEAVE_S = 10.0  #: between the end of the run and the kill of the child
_POLL_S = 1.0  #: between two reads of the logs
_ID_LIMIT = 64  #: characters of wandb's run ids
#: Nothing about this machine is sent, and a dead server costs 20 s instead of 90.
_SETTINGS = {
    **dict.fromkeys(("disable_code", "disable_git", "disable_job_creation", "silent"), True),
    **dict.fromkeys((f"x_disable_{name}" for name in ("machine_info", "meta", "stats", "viewer")), True),
    **{"console": "off", "host": "-", "program": "speedrun", "username": "-"},
    **{"init_timeout": 20.0, "x_save_requirements": False},
}


def _csv(record: Record) -> dict[str, bytes]:
    """Return a table of validations and one of training losses, with all digits."""
    losses: dict[str, list[tuple[Run, int, float, float]]] = {"val": [], "train": []}
    for run in record.runs:
        time_s = 0.0
        for line in run.lines:
            match line.event:
                case runlog.ClockPause(train_time_s=paused_s) | runlog.ClockStop(train_time_s=paused_s):
                    time_s = paused_s
                case runlog.Val() as val:
                    losses["val"].append((run, val.step, loss_of(val), time_s))
                case runlog.Step() as step:
                    losses["train"].append((run, step.step + 1, step.loss, step.train_time_s))
    files = {}
    for name, kind in (("validations.csv", "val"), ("train_losses.csv", "train")):
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["log", "step", "num_steps", f"{kind}_loss", "train_time_ms"])
        for run, step, loss, time_s in losses[kind]:
            # To the nanosecond; divided by 1,000, it gives the seconds of the record again.
            time_ms = f"{1e3 * time_s:.6f}".rstrip("0").rstrip(".")
            writer.writerow([clean(run.folder), step, run.start.num_steps, loss, time_ms])
        files[name] = table.getvalue().encode()
    return files


# --- wandb


def library() -> Any:
    """Return wandb; raise UsageError if it is not installed."""
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}  # read at import
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise
        raise UsageError("wandb is not installed; type: pip install wandb") from None


def _begun(wandb: Any, start: runlog.Line, **where: str) -> Any:
    """Start a run in wandb from the first line of its log; `where` is its project, group and folder."""
    event = start.event
    assert isinstance(event, runlog.RunStart)
    begun_s = datetime.fromisoformat(start.t_utc).timestamp()
    return wandb.init(
        id=event.run_id[:_ID_LIMIT], name=event.run_id, config=event.config, mode="online", reinit="create_new",
        settings=wandb.Settings(**_SETTINGS, x_start_time=begun_s), **where,
    )  # fmt: skip


def _log(run: Any, line: runlog.Line) -> None:
    """Log the numbers of a line; wandb joins those of one step into a row."""
    match line.event:
        case runlog.Val() as event:
            step, numbers = event.step, {"val/loss": loss_of(event)}
        case runlog.HeldOut(val=event):
            step, numbers = event.step, {"held_out/loss": loss_of(event)}
        case runlog.Step() as event:
            found = {"loss": event.loss, "time_s": event.train_time_s, "tokens": event.tokens_seen}
            step = event.step + 1
            numbers = {f"train/{k}": float(x) for k, x in {**found, **event.inputs}.items()}
        case _:
            return
    run.log({**numbers, "_timestamp": datetime.fromisoformat(line.t_utc).timestamp()}, step=step)


FORMS = ("text", "csv")


def export(record: Record, form: str, out: Path) -> list[Path]:
    """Write a record in one of the `FORMS` into a new or empty folder, which appears whole; return the files."""
    if not record.whole:
        raise UsageError(f"{record.root} cannot be read whole; 'speedrun validate {record.root}' says why")
    leaks.refuse_secrets(record.raw, "revoke the secret where it was issued, and run again without it")
    require_outside(record.root, out)
    if form == "csv":
        files = _csv(record)
    else:
        files = {f"{run.folder}.txt": console.render(run.lines).encode() for run in record.runs}
    return make_record(out, files)


# --- runs as they grow


def relayed(record: Path, project: str) -> AbstractContextManager[None]:
    """Inside the block, send the logs of a record's new runs to wandb."""
    words = [str(record), project, *(path.name for path in record.glob("runs/*"))]
    remedy = "the record holds all numbers: " + shlex.join(["speedrun", "export", str(record), "--to", "csv"])
    return subprocesses.beside("wandb", "speedrun.board.exports", words, remedy, leave_s=_LEAVE_S)


def _sent(path: Path, begin: Callable[[runlog.Line], Any]) -> Iterator[None]:
    """Send the lines of a growing log to the run that its first line begins; yield when there are no more."""
    tail, run = LogFollower(path), None
    while True:
        for raw in (raw for piece in iter(tail.read, None) for raw in piece.lines):
            line = runlog.decode(raw)
            if isinstance(line.event, runlog.RunStart):
                # The only line whose free text is sent.
                if secret := next((leak for leak in leaks.find(raw) if leak.secret), None):
                    raise UsageError(f"line 1 of {path} holds {secret.kind}; nothing of it is sent")
                run = begin(line)
            elif run is not None:
                _log(run, line)
            if isinstance(line.event, runlog.RunEnd) and run is not None:
                run.finish(exit_code=0 if line.event.status == "finished" else 1)
        yield


def relay(record: Path, project: str, skip: Container[str], until: IO[bytes]) -> None:
    """Send the growing logs of a record, except those of some runs, until a stream ends."""
    if (mode := os.environ.get("WANDB_MODE", "online")) not in ("online", "shared"):
        raise UsageError(f"WANDB_MODE={mode}, which sends nothing")
    with tempfile.TemporaryDirectory() as scratch:
        wandb, group = library(), record.resolve().name
        # Its folder gets logs full of paths and settings.
        begin = partial(_begun, wandb, dir=scratch, project=project, group=group)
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
        os.nice(subprocesses.NICENESS)
        relay(Path(sys.argv[1]), sys.argv[2], sys.argv[3:], sys.stdin.buffer)
