"""What the runs of a record prove about its loss, and how many runs a proof would take."""

import math
from pathlib import Path
from statistics import fmean, stdev

import msgspec

from speedrun.base.errors import UsageError
from speedrun.record import statistics
from speedrun.record.batch import standing
from speedrun.record.reader import load_result
from speedrun.record.statistics import Interval


class Stats(msgspec.Struct, frozen=True):
    """Losses and times of the finished runs of a record, and the test of their mean loss."""

    track: str
    target: float
    num_runs: int
    losses: tuple[float, ...]
    loss: Interval | None  #: mean and 95 % interval; None for one run, as below
    sd: float | None
    train_times_s: tuple[float, ...]
    train_time_s: Interval | None
    cold_walls_s: tuple[float, ...]
    cold_wall_s: Interval | None
    declared: bool  #: whether the test is that of a declared batch
    rule: str
    p: float | None  #: None for one run
    alpha: float
    passed: bool
    runs_needed: int | None  #: for 90 % power at this mean and noise; None: no number is enough
    equivalent: statistics.Equivalence | None  #: to the parent


def stats(folder: Path, *, target: float | None, parent: Path | None) -> Stats:
    """Test the mean loss of a record against the target, and against the mean of its parent.

    Without `target`, that of the track counts. `parent` is the folder of another record.

    Raises:
        UsageError: if a record has no finished run, or the comparison has fewer than two on one side.
    """
    record = load_result(folder)
    rules, runs = record.rules, record.finished
    aim, sigma = rules.target.loss if target is None else target, rules.target.sigma
    losses = [run.val_loss for run in runs]
    declared, test = record.declaration is not None and target is None, None
    if record.declaration is not None and declared:
        test = standing(record.declaration, record.runs, aim, sigma).test
        if test is None:
            need = record.declaration.looks[0].num_runs
            raise UsageError(
                f"{folder}: {len(runs)} of the {need} runs before its first look; 'speedrun batch --resume'"
            )
    blown_up = [math.inf for run in record.runs if run.outcome == "non-finite"]
    test = test or statistics.mean_below([*losses, *blown_up], aim, known_sigma=sigma)
    others = [] if parent is None else [run.val_loss for run in load_result(parent).finished]
    if parent is not None and min(len(others), len(losses)) < 2:
        raise UsageError(f"--against compares {len(losses)} runs with {len(others)}; need two on each side")
    is_tested = len(losses) + len(blown_up) > 1
    sd = stdev(losses) if len(losses) > 1 else None
    noise = max(sigma or 0.0, sd or 0.0) if test.rule == "z" else sd
    needed = statistics.batch_needed(aim - fmean(losses), noise, known_sigma=sigma) if noise else None
    times_s, walls_s = ([getattr(run.end, name) for run in runs] for name in ("train_time_s", "cold_wall_s"))
    return Stats(
        track=rules.id,
        target=aim,
        num_runs=len(runs),
        losses=tuple(losses),
        loss=statistics.mean_interval(losses),
        sd=sd,
        train_times_s=tuple(times_s),
        train_time_s=statistics.mean_interval(times_s),
        cold_walls_s=tuple(walls_s),
        cold_wall_s=statistics.mean_interval(walls_s),
        declared=declared,
        rule=test.rule,
        p=test.p if is_tested else None,
        alpha=test.alpha,
        passed=is_tested and test.passed,
        runs_needed=needed,
        equivalent=None if parent is None else statistics.equivalent(others, losses),
    )
