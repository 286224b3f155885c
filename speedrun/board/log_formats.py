"""A record in other formats: what its runs printed, text logs of modded-nanogpt, CSV, wandb.

Exports contain only what the record holds: no path, user, host or environment of the machine that exports. They hold
less than the record and prove nothing.
"""

import csv
import io
from pathlib import Path
from typing import Literal, NamedTuple

from speedrun.base import console, runlog
from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.base.wholefile import make_folder
from speedrun.board.leaks import refuse_secrets
from speedrun.board.submission import require_outside
from speedrun.board.wandb_relay import offline_runs
from speedrun.record.logged_run import Run, loss_of
from speedrun.record.reader import Record


class Loss(NamedTuple):
    """A point of a curve."""

    step: int  #: steps done
    kind: Literal["val", "train"]
    loss: float
    train_time_s: float


def curve(run: Run) -> list[Loss]:
    """Return the losses of a run by step, a validation before the training loss of the step that ended there."""
    time_s, found = 0.0, []
    for line in run.lines:
        match line.event:
            case runlog.ClockPause(train_time_s=paused_s) | runlog.ClockStop(train_time_s=paused_s):
                time_s = paused_s
            case runlog.Val() as val:
                found.append(Loss(val.step, "val", loss_of(val), time_s))
            case runlog.Step() as step:
                found.append(Loss(step.step + 1, "train", step.loss, step.train_time_s))
    return sorted(found, key=lambda point: (point.step, point.kind == "train"))


def _classic(record: Record) -> dict[str, bytes]:
    """Return a log of modded-nanogpt for each run: losses with four digits, times in whole milliseconds."""
    files = {}
    for run in record.runs:
        lines = (
            f"step:{step}/{run.start.num_steps} {kind}_loss:{loss:.4f} train_time:{1e3 * time_s:.0f}ms "
            f"step_avg:{1e3 * time_s / max(step, 1):.2f}ms\n"
            for step, kind, loss, time_s in curve(run)
        )
        files[f"{run.folder}.txt"] = "".join(lines).encode()
    return files


def _csv(record: Record) -> dict[str, bytes]:
    """Return a table of the validations of all runs and one of the training losses, with all digits."""
    files = {}
    for name, kind in (("validations.csv", "val"), ("train_losses.csv", "train")):
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["log", "step", "num_steps", f"{kind}_loss", "train_time_ms"])
        for run in record.runs:
            for point in (point for point in curve(run) if point.kind == kind):
                # A digit of a nanosecond is more than a clock resolves; divided by 1,000 it gives the seconds again.
                time_ms = f"{1e3 * point.train_time_s:.6f}".rstrip("0").rstrip(".")
                writer.writerow([clean(run.folder), point.step, run.start.num_steps, point.loss, time_ms])
        files[name] = table.getvalue().encode()
    return files


def _text(record: Record) -> dict[str, bytes]:
    """Return what each run printed, with all kernels and reasons."""
    return {f"{run.folder}.txt": console.render(run.lines).encode() for run in record.runs}


#: From a record to files by relative path.
FORMS = {"classic": _classic, "csv": _csv, "text": _text, "wandb": offline_runs}


def export(record: Record, form: str, out: Path) -> list[Path]:
    """Write a record in one of the `FORMS` into a new or empty folder, which appears whole; return the files.

    Raises:
        UsageError: if the record cannot be read whole or holds a secret, the folder is part of it or not empty, or
            wandb is missing.
        StorageError: if a file cannot be written.
    """
    if not record.whole:
        raise UsageError(f"{record.root} cannot be read whole; 'speedrun validate {record.root}' says why")
    refuse_secrets(record.raw, "revoke the secret where it was issued, and run again without it")
    require_outside(record.root, out)
    files = FORMS[form](record)
    make_folder(out, files)
    return [out / name for name in files]
