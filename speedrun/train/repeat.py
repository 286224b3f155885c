"""Requests that make a logged run again, or go on with it. Imports no JAX."""

from pathlib import Path

from speedrun.base.errors import UsageError
from speedrun.record.logged_run import Run
from speedrun.record.reader import load
from speedrun.record.salvage import salvage
from speedrun.train.request import RunConfig


def asked(run: Run, out: Path, data: Path | None = None) -> RunConfig:
    """Return the request for the same run in another folder."""
    start, config = run.start, run.start.config
    return RunConfig(
        track=start.track.rpartition("@")[0],
        out=out,
        recipe=start.recipe,
        seed=start.seed,
        overrides=start.overrides,
        data=data,
        num_devices=run.hardware[0] or None,
        replicas=config.get("replicas"),
        microbatches=config.get("microbatches"),
        attention=config.get("attention", "auto"),
    )


def finished(out: Path) -> RunConfig | None:
    """Return the settings of the finished run in a folder, if there is one."""
    return next((asked(run, out) for run in (load(out).finished if out.is_dir() else ())), None)


def repair(out: Path) -> None:
    """Mark a run that was killed as one that broke off; refuse a record that cannot be read."""
    salvage(out)
    for problem in load(out).malformed:
        raise UsageError(f"{out}: {problem}; restore that file, or start a new run with another --out")
