"""A record in the formats of other tools: classic text logs, CSV, wandb, TensorBoard.

Exports contain only what the record holds: no path, user, host or environment of the machine that exports. They hold
less than the record and prove nothing.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from speedrun.board.submission import findings
from speedrun.exchange import classic_log, curve_table
from speedrun.exchange.curves import ContextRun, Point, context_run, on_machine
from speedrun.exchange.trackers import to_tensorboard, to_wandb
from speedrun.ground import runlog
from speedrun.ground.errors import UsageError, translate_os_errors
from speedrun.ground.wholefile import PARTIAL, give_name, write_whole
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
    hw = run.preflight
    return on_machine(
        context_run(run.folder, run.start.num_steps, vals, steps),
        software=hw.software,
        device=hw.device_kind,
        num_devices=hw.num_devices,
    )


def _to_classic(record: Record, out: Path) -> list[Path]:
    """Write one text log for each run; it rounds, see `classic_log.write`."""
    return [_write(out / f"{run.folder}.txt", classic_log.write(curves_of(run))) for run in record.runs]


def _to_csv(record: Record, out: Path) -> list[Path]:
    """Write `validations.csv` and `train_losses.csv` of all runs, with all digits."""
    runs = [curves_of(run) for run in record.runs]
    return [
        _write(out / "validations.csv", curve_table.write(runs)),
        _write(out / "train_losses.csv", curve_table.write(runs, train=True)),
    ]


def _write(path: Path, text: str) -> Path:
    write_whole(path, text.encode())
    return path


FORMS: dict[str, Callable[[Record, Path], list[Path]]] = {
    "classic": _to_classic,
    "csv": _to_csv,
    "wandb": to_wandb,
    "tensorboard": to_tensorboard,
}


def export(record: Record, form: str, out: Path) -> Sequence[Path]:
    """Write a record in one of the `FORMS` into a new or empty folder, which appears whole; return the files.

    Raises:
        UsageError: if the record cannot be read whole or holds a secret, the folder is part of it or not empty, or a
            library is missing.
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
    partial = out.with_name(f"{out.name}{PARTIAL}")
    try:
        with translate_os_errors(out, UsageError):
            shutil.rmtree(partial, ignore_errors=True)  # of a killed process
            partial.mkdir(parents=True)
            names = [path.relative_to(partial) for path in FORMS[form](record, partial)]
            if not out.exists() or not any(out.iterdir()):
                give_name(partial, out)
            elif not _is_same(out, partial, names):  # it is, if the process was killed at its very end
                raise UsageError(f"{out} is not empty; choose a new folder with --out")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [out / name for name in names]


def _is_same(folder: Path, other: Path, names: list[Path]) -> bool:
    """Return whether both folders hold the same bytes, in files of these names."""
    found = [path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()]
    return sorted(found) == sorted(names) and all(
        (folder / name).read_bytes() == (other / name).read_bytes() for name in names
    )
