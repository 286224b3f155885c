"""What the runs of a record prove."""

import math
from pathlib import Path

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
    loss: Interval | None  #: 95 %; this and other statistics are None for one run
    sd: float | None
    train_times_s: tuple[float, ...]
    train_time_s: Interval | None
    declared: bool  #: whether the test is that of a declared batch
    rule: str
    p: float | None
    alpha: float
    passed: bool
    runs_needed: int | None  #: for 90 % power at this mean and noise; None: no number suffices
    equivalent: statistics.Equivalence | None  #: to the parent


def stats(folder: Path, parent: Path | None) -> Stats:
    """Test the mean loss of a record against its track's target, and against another record's."""
    record = load_result(folder)
    rules, runs = record.rules, record.finished
    target, sigma = rules.target.loss, rules.target.sigma
    losses = [run.val_loss for run in runs]
    declared = record.declaration
    blown_up = [math.inf for run in record.runs if run.outcome == "non-finite"]
    if declared is None:
        test = statistics.mean_below([*losses, *blown_up], target, known_sigma=sigma)
    elif (test := standing(declared, record.runs, target, sigma).test) is None:
        need = declared.looks[0].num_runs
        raise UsageError(
            f"{folder}: {len(runs)} of the {need} runs before its first look; 'speedrun batch --resume {folder}'"
        )
    others = [] if parent is None else [run.val_loss for run in load_result(parent).finished]
    if parent is not None and min(len(others), len(losses)) < 2:
        raise UsageError(f"--against compares {len(losses)} runs with {len(others)}; need two on each side")
    is_tested = len(losses) + len(blown_up) > 1
    sd = statistics.sd(losses)
    noise = max(sigma or 0.0, sd or 0.0) if test.rule == "z" else sd
    needed = statistics.batch_needed(target - record.mean_loss, noise, known_sigma=sigma) if noise else None
    times_s = [run.train_time_s for run in runs]
    return Stats(
        track=rules.id,
        target=target,
        num_runs=len(runs),
        losses=tuple(losses),
        loss=statistics.mean_interval(losses),
        sd=sd,
        train_times_s=tuple(times_s),
        train_time_s=statistics.mean_interval(times_s),
        declared=declared is not None,
        rule=test.rule,
        p=test.p if is_tested else None,
        alpha=test.alpha,
        passed=is_tested and test.passed,
        runs_needed=needed,
        equivalent=None if parent is None else statistics.equivalent(others, losses),
    )
