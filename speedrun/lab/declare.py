"""Declares a batch: checks everything, then writes `batch.json`. Nothing is run.

python -m speedrun.lab.declare PROMISE.json      called by `speedrun batch`, which holds no device
"""

import sys
from pathlib import Path

from speedrun.base import lock, signals
from speedrun.base.clock import now
from speedrun.base.errors import UsageError
from speedrun.base.output import reported
from speedrun.base.track import sha256
from speedrun.base.wholefile import make_folder
from speedrun.lab.run_batch import Promise
from speedrun.record import batch, layout
from speedrun.train.preflight import prepare
from speedrun.train.request import decoded


def declare(promise: Promise) -> layout.Declaration:
    """Write `batch.json` and `source.txt` into a new folder.

    Raises:
        SpeedrunError: if `prepare` refuses the config; for seeds that are too few, repeated or out of range.
    """
    ready = prepare(promise.config)
    looks = batch.looks(promise.num_runs, promise.then, ready.track.target.sigma)
    num_runs, config_sha256 = looks[-1].num_runs, layout.config_sha256(ready.described)
    seeds = promise.seeds or batch.seeds_from(ready.source_sha256, config_sha256, num_runs)
    if len(set(seeds)) != num_runs or len(seeds) != num_runs:
        raise UsageError(f"got {len(set(seeds))} different seeds; need {num_runs}, one for each run")
    if not all(0 <= seed < 2**31 for seed in seeds):
        raise UsageError(f"got seeds {min(seeds)} to {max(seeds)}; need 0 to {2**31 - 1}")
    declaration = layout.Declaration(
        track=layout.TrackRef(ready.track.id, sha256(ready.track.name)),
        recipe=layout.Recipe(ready.recipe.name, ready.recipe.revision, promise.config.overrides),
        config_sha256=config_sha256,
        source_sha256=ready.source_sha256,
        num_devices=ready.program.num_devices,
        microbatches=ready.program.microbatches,
        attention=ready.program.attention,
        num_steps=ready.recipe.num_steps,
        seeds=seeds,
        seeds_chosen=bool(promise.seeds),
        looks=looks,
        expected_loss=promise.expected_loss,
        created_utc=now().utc,
    )
    out = promise.config.out
    with lock.lock_record(out):
        make_folder(out, {"source.txt": ready.source.encode(), layout.BATCH: layout.encode(declaration)})
    return declaration


if __name__ == "__main__":
    with reported(), signals.handled_by(signals.stop):
        declare(decoded(Path(sys.argv[1]).read_bytes(), Promise))
