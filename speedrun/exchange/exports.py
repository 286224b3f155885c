"""A record in other formats: what its runs printed, classic text logs, CSV, wandb.

Exports contain only what the record holds: no path, user, host or environment of the machine that exports. They hold
less than the record and prove nothing.
"""

from collections.abc import Callable
from pathlib import Path

from speedrun.board.submission import findings
from speedrun.exchange import classic_log, curve_table
from speedrun.exchange.curves import ContextRun, Point, context_run
from speedrun.exchange.wandb_runs import offline_runs
from speedrun.ground import console, runlog
from speedrun.ground.errors import UsageError
from speedrun.ground.wholefile import make_folder
from speedrun.ledger.record import Record
from speedrun.ledger.run import Run, loss_of


def curves_of(run: Run) -> ContextRun:
    """Return the curves of one of our runs; a training loss is at the end of its step."""
    time_s, vals, steps = 0.0, [], []
    for line in run.lines:
        match line.event:
            case runlog.ClockPause(train_time_s=paused_s) | runlog.ClockStop(train_time_s=paused_s):
                time_s = paused_s
            case runlog.Val() as val:
                vals.append(Point(val.step, loss_of(val), time_s))
            case runlog.Step() as step:
                steps.append(Point(step.step + 1, step.loss, step.train_time_s))
    return context_run(run.folder, run.start.num_steps, vals, steps)


def _classic(record: Record) -> dict[str, bytes]:
    """Return one text log for each run; it rounds, see `classic_log.write`."""
    return {f"{run.folder}.txt": classic_log.write(curves_of(run)).encode() for run in record.runs}


def _csv(record: Record) -> dict[str, bytes]:
    """Return the validations and training losses of all runs, with all digits."""
    runs = [curves_of(run) for run in record.runs]
    return {
        "validations.csv": curve_table.write(runs).encode(),
        "train_losses.csv": curve_table.write(runs, train=True).encode(),
    }


def _text(record: Record) -> dict[str, bytes]:
    """Return what each run printed, with all kernels and reasons."""
    return {f"{run.folder}.txt": console.render(run.lines).encode() for run in record.runs}


#: From a record to files by relative path.
FORMS: dict[str, Callable[[Record], dict[str, bytes]]] = {
    "classic": _classic,
    "csv": _csv,
    "text": _text,
    "wandb": offline_runs,
}


def export(record: Record, form: str, out: Path) -> list[Path]:
    """Write a record in one of the `FORMS` into a new or empty folder, which appears whole; return the files.

    Raises:
        UsageError: if the record cannot be read whole or holds a secret, the folder is part of it or not empty, or
            wandb is missing.
        StorageError: if a file cannot be written.
    """
    if not record.whole:
        raise UsageError(f"{record.root} cannot be read whole; 'speedrun validate {record.root}' says why")
    if secret := next((finding for finding in findings(record.raw) if finding.secret), None):
        raise UsageError(
            f"{secret.path}:{secret.line} holds {secret.kind}; nothing was written; revoke the secret where it was "
            "issued, and run again without it"
        )
    if out.resolve().is_relative_to(record.root.resolve()):
        raise UsageError(f"{out} is inside the record, which may hold nothing else; choose another --out")
    files = FORMS[form](record)
    make_folder(out, files)
    return [out / name for name in files]
