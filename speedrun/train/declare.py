"""Declares a batch: checks the run, draws the seeds, and writes `batch.json`.

python -m speedrun.train.declare REQUEST.json      started by `speedrun batch`, which holds no device
"""

import sys
from pathlib import Path

from speedrun.base import signals
from speedrun.base import track as tracks
from speedrun.base.atomic_files import make_record
from speedrun.base.clock import now
from speedrun.base.output import reported
from speedrun.base.subprocesses import say
from speedrun.record import layout
from speedrun.record.batch import Preregistration, TrackRef, seeds_from
from speedrun.record.batch import looks as looks_of
from speedrun.record.reader import encode
from speedrun.train.batch import BatchRequest, num_runs, prospect
from speedrun.train.preflight import prepare
from speedrun.train.ranked import approve
from speedrun.train.recorded import opening
from speedrun.train.run_config import decoded


def declare(request: BatchRequest) -> Preregistration:
    """Write `batch.json` and `source.txt` into a new folder, and say how likely the batch proves its target."""
    ready = prepare(request.config)
    expected = prospect(ready.recipe, ready.track, request.expected_loss)
    number = num_runs(request, ready.track, expected)
    looks = looks_of(number, request.then, ready.track.target.sigma)
    if expected is not None:
        chance = f"a chance of {max(expected.chance(one.num_runs, len(looks)) for one in looks):.1%}"
        say(f"batch: {looks[-1].num_runs} runs prove the target with {chance}, for a mean of {expected}")
    for warning in approve(ready, opening(ready), looks[0].num_runs):
        say(f"warning: {warning}")
    config_sha256 = layout.config_sha256(ready.described)
    declaration = Preregistration(
        track=TrackRef(ready.track.id, tracks.sha256(ready.track.name)),
        recipe=layout.Recipe(ready.recipe.name, ready.recipe.revision, dict(ready.recipe.overrides)),
        config_sha256=config_sha256,
        source_sha256=ready.source_sha256,
        num_devices=ready.program.num_devices,
        microbatches=ready.program.microbatches,
        attention=ready.program.attention,
        num_steps=ready.recipe.num_steps,
        seeds=seeds_from(ready.source_sha256, config_sha256, looks[-1].num_runs),
        seeds_chosen=False,
        looks=looks,
        expected_loss=expected.loss if expected and request.num_runs is None else request.expected_loss,
        purpose=request.config.purpose,
        created_utc=now().utc,
        budget=request.budget,
    )
    files = {"source.txt": ready.source.encode(), layout.BATCH: encode(declaration)}
    make_record(request.config.out, files)
    return declaration


if __name__ == "__main__":
    with reported(), signals.handled_by(signals.stop):
        declare(decoded(Path(sys.argv[1]).read_bytes(), BatchRequest))
