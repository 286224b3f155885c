"""How much the losses of equal runs differ, from curves that others made.

Runs are equal if they lie in one folder and their last validation is at the same step of the same plan. Whoever filed
them may have thought otherwise: a folder of ablations is one group here, and its sd is too large. A median over groups
says when that happens, and a range of means leaves out what was not made for the target.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from speedrun.exchange.context import ContextRun, can_identify
from speedrun.ledger.statistics import pooled_sd


class Group(msgspec.Struct, frozen=True):
    """Equal runs."""

    folder: str
    step: int  #: of the last validation
    num_steps: int | None
    losses: tuple[float, ...]  #: at that step
    mean: float
    sd: float | None  #: None of one run
    step_ms: float | None  #: mean time of a step, up to the last validation; None where a log tells no time


class Noise(msgspec.Struct, frozen=True):
    """What the groups say together."""

    num_runs: int  #: in groups of two and more
    num_groups: int  #: of two and more
    freedom: int  #: degrees of it
    pooled_sd: float
    median_sd: float
    low: float  #: of the pooled sd, with 95 % confidence if losses are normal
    high: float


class Band(msgspec.Struct, frozen=True):
    """The losses of several runs at one step."""

    step: int
    num_runs: int
    mean: float
    sd: float | None
    least: float
    most: float


def distinct(runs: Iterable[ContextRun]) -> list[ContextRun]:
    """Runs with an end that is a number, each once: a log that lies in two folders is one run."""
    found, seen = [], set()
    for run in runs:
        if run.final_loss is None or (can_identify(run.validations) and run.validations in seen):
            continue
        seen.add(run.validations)
        found.append(run)
    return found


def groups(runs: Iterable[ContextRun]) -> list[Group]:
    """The groups of these runs, in the order of their first ones."""
    equal: dict[tuple[str, int, int | None], list[ContextRun]] = defaultdict(list)
    for run in runs:
        if run.final_loss is not None:
            equal[run.name.rpartition("/")[0], run.validations[-1].step, run.num_steps].append(run)
    return [_group(*key, members) for key, members in equal.items()]


def _group(folder: str, step: int, num_steps: int | None, runs: list[ContextRun]) -> Group:
    losses = tuple(run.final_loss for run in runs if run.final_loss is not None)
    times_s = [run.train_time_s for run in runs if run.train_time_s is not None]
    step_ms = statistics.fmean(times_s) / step * 1e3 if step and len(times_s) == len(runs) else None
    return Group(folder, step, num_steps, losses, statistics.fmean(losses), _sd(losses), step_ms)


def noise(found: Sequence[Group]) -> Noise | None:
    """The sd of single runs around the means of their groups; None if no group has two runs.

    The interval is that of a variance: freedom * sd^2 / chi^2 at both ends.
    """
    from scipy import special

    several = [group for group in found if group.sd is not None]
    if not several:
        return None
    pooled = pooled_sd([group.losses for group in several])
    freedom = sum(len(group.losses) - 1 for group in several)
    low, high = (pooled * math.sqrt(freedom / special.chdtri(freedom, tail)) for tail in (0.025, 0.975))
    return Noise(
        num_runs=sum(len(group.losses) for group in several),
        num_groups=len(several),
        freedom=freedom,
        pooled_sd=pooled,
        median_sd=statistics.median(group.sd for group in several if group.sd is not None),
        low=float(low),
        high=float(high),
    )


def bands(runs: Iterable[ContextRun]) -> list[Band]:
    """The losses of these runs at each step that any of them validated at."""
    at: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for point in run.validations:
            if point.loss is not None:
                at[point.step].append(point.loss)
    return [
        Band(step, len(losses), statistics.fmean(losses), _sd(losses), min(losses), max(losses))
        for step, losses in sorted(at.items())
    ]


def _sd(losses: Sequence[float]) -> float | None:
    return statistics.stdev(losses) if len(losses) > 1 else None
