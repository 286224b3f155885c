"""The spread of the losses of equal runs, from other people's logs.

Runs count as equal if they are in one folder and their last validation is at the same step of the same schedule. A
folder of ablations is then one group with too large an sd. The median sd over groups shows that; a range of means
excludes runs that were not made for the target.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from speedrun.board.foreign_logs import ContextRun, can_identify
from speedrun.record.statistics import pooled_sd


class Group(msgspec.Struct, frozen=True):
    """A group of equal runs."""

    folder: str
    step: int  #: of the last validation
    num_steps: int | None
    losses: tuple[float, ...]  #: at that step
    mean: float
    sd: float | None  #: None for one run
    step_ms: float | None  #: mean time of a step, up to the last validation; None without times


class Noise(msgspec.Struct, frozen=True):
    """The sd over all groups of two or more runs."""

    num_runs: int
    num_groups: int
    freedom: int  #: degrees of freedom
    pooled_sd: float
    median_sd: float
    low: float  #: of the 95 % interval of the pooled sd, for normal losses
    high: float


def distinct(runs: Iterable[ContextRun]) -> list[ContextRun]:
    """Return runs with a final loss, without copies of a log in other folders."""
    found, seen = [], set()
    for run in runs:
        if run.final_loss is None or (can_identify(run.validations) and run.validations in seen):
            continue
        seen.add(run.validations)
        found.append(run)
    return found


def groups(runs: Iterable[ContextRun]) -> list[Group]:
    """Group equal runs, in the order of the first run of each."""
    equal: dict[tuple[str, int, int | None], list[ContextRun]] = defaultdict(list)
    for run in runs:
        if run.final_loss is not None:
            equal[run.name.rpartition("/")[0], run.validations[-1].step, run.num_steps].append(run)
    return [_group(*key, members) for key, members in equal.items()]


def _group(folder: str, step: int, num_steps: int | None, runs: list[ContextRun]) -> Group:
    losses = tuple(run.final_loss for run in runs if run.final_loss is not None)
    times_s = [run.train_time_s for run in runs if run.train_time_s is not None]
    step_ms = statistics.fmean(times_s) / step * 1e3 if step and len(times_s) == len(runs) else None
    sd = statistics.stdev(losses) if len(losses) > 1 else None
    return Group(folder, step, num_steps, losses, statistics.fmean(losses), sd, step_ms)


def noise(found: Sequence[Group]) -> Noise | None:
    """Return the sd of runs around the means of their groups; None if no group has two runs.

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
