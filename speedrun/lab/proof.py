"""Statistics of runs: the losses of one record, and of equal runs in other people's logs."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev, variance

import msgspec

from speedrun.base.errors import UsageError
from speedrun.board.foreign_logs import ContextRun
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
    sd = stdev(losses) if len(losses) > 1 else None
    noise = max(sigma or 0.0, sd or 0.0) if test.rule == "z" else sd
    needed = statistics.batch_needed(target - fmean(losses), noise, known_sigma=sigma) if noise else None
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


class Group(msgspec.Struct, frozen=True):
    """A group of equal runs."""

    folder: str
    step: int  #: of the last validation
    num_steps: int | None
    losses: tuple[float, ...]  #: at that step
    mean: float
    sd: float | None  #: None for one run
    step_ms: float | None  #: mean over steps up to the last validation; None without times


class Noise(msgspec.Struct, frozen=True):
    """The sd of equal runs, over all groups of two or more."""

    num_runs: int
    num_groups: int
    freedom: int  #: degrees of freedom
    pooled_sd: float
    low: float  #: of the 95 % interval of the pooled sd, for normal losses
    high: float


def distinct(runs: Iterable[ContextRun]) -> list[ContextRun]:
    """Return the runs with a final loss, without copies of a log."""
    found, seen = [], set()
    for run in runs:
        # A single loss without a time may be equal by chance.
        is_telling = len(run.validations) > 1 or run.train_time_s is not None
        if run.final_loss is None or (is_telling and run.validations in seen):
            continue
        seen.add(run.validations)
        found.append(run)
    return found


def groups(runs: Iterable[ContextRun]) -> list[Group]:
    """Group the equal runs among those that `distinct` returns."""
    equal: dict[tuple[str, int, int | None], list[ContextRun]] = defaultdict(list)
    for run in runs:
        equal[run.name.rpartition("/")[0], run.validations[-1].step, run.num_steps].append(run)
    found = []
    for (folder, step, num_steps), same in equal.items():
        losses = tuple(run.final_loss for run in same if run.final_loss is not None)
        times_s = [run.train_time_s for run in same if run.train_time_s is not None]
        step_ms = fmean(times_s) / step * 1e3 if step and len(times_s) == len(same) else None
        sd = stdev(losses) if len(losses) > 1 else None
        found.append(Group(folder, step, num_steps, losses, fmean(losses), sd, step_ms))
    return found


def noise(found: Sequence[Group]) -> Noise | None:
    """Return the pooled sd of runs around the means of their groups, with the interval freedom * sd^2 / chi^2."""
    from scipy import special

    several = [group for group in found if group.sd is not None]
    if not several:
        return None
    freedom = sum(len(group.losses) - 1 for group in several)
    squares = sum(variance(group.losses) * (len(group.losses) - 1) for group in several)
    pooled = math.sqrt(squares / freedom)
    low, high = (pooled * math.sqrt(freedom / special.chdtri(freedom, tail)) for tail in (0.025, 0.975))
    return Noise(
        num_runs=sum(len(group.losses) for group in several),
        num_groups=len(several),
        freedom=freedom,
        pooled_sd=pooled,
        low=float(low),
        high=float(high),
    )
