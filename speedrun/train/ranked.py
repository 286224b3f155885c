"""A run that a ranked record may hold: the checks that are decided before the clock are asked before it starts."""

from functools import partial

from speedrun.base import runlog
from speedrun.record import prospect
from speedrun.train import compile, device_benchmark, recorded
from speedrun.train.preflight import Ready


def approve(ready: Ready, first: recorded.Opening, num_runs: int | None = None) -> list[str]:
    """Raise UsageError if the track ranks and no ranked record could hold the run; else return warnings.

    `num_runs` is that of the batch to declare. A run that is resumed or single says itself that it is not ranked.
    """
    config, rules = ready.config, ready.track.rules
    health_s = device_benchmark.throttled_s(ready.program.mesh)
    read = ready.shards.train[: ready.num_shards]
    due = [runlog.ShardRange(one.path.name, "", one.num_tokens, 0, 1) for one in read]
    end = prospect.end(ready.data_read(due), None if health_s is None else 0.0)
    events = *first, compile.plan(ready, temp_bytes=0), end
    found = prospect.problems(ready.track, ready.source, events, num_runs)
    warnings = prospect.require(ready.track, found, config.purpose)
    if rules.ranked and not (num_runs or config.batch_sha256 or config.purpose):
        batch = f"speedrun batch --track {config.track}"
        warnings.append(f"one run is shown, but not ranked; a rank takes a declared batch: {batch}")
    return warnings


train = partial(recorded.train, approve=approve)
