"""Declares a batch: everything that can be refused is refused, then `batch.json` is written, and nothing has run yet.

python -m speedrun.study.declare PROMISE.json      what `speedrun batch` calls, so that it holds no device itself
"""

import sys
from pathlib import Path

import msgspec

from speedrun.ground import lock, signals
from speedrun.ground.clock import now
from speedrun.ground.errors import UsageError
from speedrun.ground.output import told
from speedrun.ground.track import sha256
from speedrun.ground.wholefile import make_folder
from speedrun.ledger import batch, format, runfile
from speedrun.training.prepare import RunConfig, decoded, prepare


class Promise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A batch that was asked for."""

    config: RunConfig  #: of every run; its seed does not count
    num_runs: int
    then: int | None = None  #: runs in all, for a second look
    seeds: tuple[int, ...] = ()  #: empty: they follow from source and config
    expected_loss: float | None = None


def declare(promise: Promise) -> format.Declaration:
    """Writes `batch.json` and `source.txt` into a new folder.

    Raises:
        SpeedrunError: what `prepare` refuses; seeds that are too few, not distinct or out of range.
    """
    ready = prepare(promise.config)
    sigma = ready.track.target.sigma
    looks = batch.looks(promise.num_runs, promise.then, sigma)
    num_runs, config_sha256 = looks[-1].num_runs, runfile.config_sha256(ready.described)
    seeds = promise.seeds or batch.seeds_from(ready.source_sha256, config_sha256, num_runs)
    if len(set(seeds)) != num_runs or len(seeds) != num_runs:
        raise UsageError(f"got {len(set(seeds))} different seeds; need {num_runs}, one for each run")
    if not all(0 <= seed < 2**31 for seed in seeds):
        raise UsageError(f"got seeds {min(seeds)} to {max(seeds)}; need 0 to {2**31 - 1}")
    declaration = format.Declaration(
        track=format.TrackRef(ready.track.id, sha256(ready.track.name)),
        recipe=runfile.Recipe(ready.recipe.name, ready.recipe.revision, promise.config.overrides),
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
    with lock.alone_with(out):
        make_folder(out, {"source.txt": ready.source.encode(), runfile.BATCH: runfile.encode(declaration)})
    return declaration


if __name__ == "__main__":
    with told(), signals.handled_by(signals.stop):
        raw = Path(sys.argv[1]).read_bytes()
        declare(decoded(raw, Promise))
