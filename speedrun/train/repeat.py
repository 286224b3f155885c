"""The request that makes a logged run again. Imports no JAX."""

from pathlib import Path

from speedrun.base import runlog
from speedrun.record.logged_run import Run
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
        islands=next((one.islands for one in run.of(runlog.Islands)), 0),
    )
