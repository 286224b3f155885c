"""A record in the forms that other tools read: classic text logs, CSV, wandb, TensorBoard.

Written after the runs, from what the record holds and from nothing else: no path, no user, no host, no environment of
the machine that exports. The forms hold less than the record and prove nothing.
"""

import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from speedrun.board.submission import findings
from speedrun.exchange import classic_log, curve_table, wandb_run
from speedrun.exchange.context import ContextRun, Point, context_run, on_machine
from speedrun.exchange.scalars import scalars, utc, utc_s
from speedrun.ground import runlog
from speedrun.ground.errors import UsageError
from speedrun.ground.wholefile import PARTIAL, give_name, write_whole
from speedrun.ledger.record import Record
from speedrun.ledger.run import Run, loss_of


def curves(run: Run) -> ContextRun:
    """The curves of one run of ours; a training loss is that of the step which it ends."""
    time_s, vals, steps = 0.0, [], []
    for line in run.lines:
        match line.event:
            case runlog.ClockPause(train_time_s=paused_s) | runlog.ClockStop(train_time_s=paused_s):
                time_s = paused_s
            case runlog.Val() as val:
                vals.append(Point(val.step, loss_of(val), time_s))
            case runlog.Step() as step:
                steps.append(Point(step.step + 1, step.loss, step.train_time_s))
    file = run.file
    return on_machine(
        context_run(run.folder, run.start.num_steps, vals, steps),
        software=file.software,
        device=file.device_kind,
        num_devices=file.num_devices,
    )


def to_classic(record: Record, out: Path) -> list[Path]:
    """One text log a run, in the dialect that modded-nanogpt began with: four digits of a loss, whole milliseconds."""
    return [_write(out / f"{run.folder}.txt", classic_log.write(curves(run))) for run in record.runs]


def to_csv(record: Record, out: Path) -> list[Path]:
    """Two tables of all runs, `validations.csv` and `train_losses.csv`, with every digit."""
    runs = [curves(run) for run in record.runs]
    return [
        _write(out / "validations.csv", curve_table.write(runs)),
        _write(out / "train_losses.csv", curve_table.write(runs, train=True)),
    ]


def to_tensorboard(record: Record, out: Path) -> list[Path]:
    """One folder a run with a file of events; wall times are those of the log.

    Raises:
        UsageError: if tensorboardX is not installed.
    """
    writer = needed("tensorboardX.record_writer", "tensorboard")
    events = importlib.import_module("tensorboardX.proto.event_pb2")
    paths = []
    for run in record.runs:
        begun_s = utc_s(run.lines[0])
        # The usual name ends in that of the host; this one in that of the run.
        path = out / run.folder / f"events.out.tfevents.{begun_s:010.0f}.{run.folder}"
        path.parent.mkdir()
        partial = path.with_name(path.name + PARTIAL)
        file = writer.RecordWriter(str(partial))
        file.write(events.Event(wall_time=begun_s, file_version="brain.Event:2").SerializeToString())
        for line in run.lines:
            for step, name, number in scalars(line.event):
                event = events.Event(wall_time=utc_s(line), step=step)
                event.summary.value.add(tag=name, simple_value=number)
                file.write(event.SerializeToString())
        file.close()
        give_name(partial, path)
        paths.append(path)
    return paths


def to_wandb(record: Record, out: Path) -> list[Path]:
    """One offline run each, to be sent by `wandb sync` by whoever wants to; nothing is sent here.

    Raises:
        UsageError: if wandb is not installed.
    """
    paths = []
    # Beside its files wandb writes logs full of paths and settings. They stay in a folder that goes away.
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= wandb_run.ENVIRONMENT | {"WANDB_CACHE_DIR": scratch}
        wandb = needed("wandb", "wandb")
        for run in record.runs:
            sent = wandb_run.WandbRun(wandb, run.lines[0], scratch=scratch)
            for line in run.lines:
                sent(line)
            sent.finish()
            (written,) = Path(scratch).glob(f"wandb/offline-run-*/run-{sent.id}.wandb")
            folder = out / f"offline-run-{utc(run.lines[0]):%Y%m%d_%H%M%S}-{sent.id}"
            folder.mkdir()
            paths.append(folder / written.name)
            write_whole(paths[-1], written.read_bytes())
        wandb.teardown()
    return paths


FORMS: dict[str, Callable[[Record, Path], list[Path]]] = {
    "classic": to_classic,
    "csv": to_csv,
    "wandb": to_wandb,
    "tensorboard": to_tensorboard,
}


def export(record: Record, form: str, out: Path) -> Sequence[Path]:
    """Writes a record in one of the `FORMS` into a new or empty folder, and says which files it made.

    Raises:
        UsageError: if the record cannot be read whole, the folder is part of it or holds something, or a library is
            missing.
    """
    if not record.whole:
        raise UsageError(f"{record.root} cannot be read whole; 'speedrun validate {record.root}' says why")
    if secret := next((finding for finding in findings(record.raw) if finding.secret), None):
        raise UsageError(
            f"{secret.path}:{secret.line} holds {secret.kind}; nothing was written; have the secret changed where it "
            "was given out, and make the record anew"
        )
    if out.resolve().is_relative_to(record.root.resolve()):
        raise UsageError(f"{out} lies in the record, which may hold nothing else; choose an --out beside it")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(f"{out} already holds something; choose a new folder with --out")
        return FORMS[form](record, out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}; choose another --out") from None


def needed(module: str, extra: str) -> Any:
    """A library that only this needs.

    Raises:
        UsageError: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise UsageError(f"{error.name} is not installed; type: pip install 'speedrun[{extra}]'") from None


def _write(path: Path, text: str) -> Path:
    write_whole(path, text.encode())
    return path
