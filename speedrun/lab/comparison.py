"""Compares two records that ran in turns on one node.

Pairs alternate their order (A B, B A, A B, ...), so that a node that warms up or slows down favours neither.
"""

from collections.abc import Sequence
from statistics import fmean

import msgspec

from speedrun.record import statistics
from speedrun.record.logged_run import Run
from speedrun.record.statistics import Interval

#: The published exchange of steps for loss at record 21: 100 of 1,770 steps are worth 0.0045 nats, from runs of several
#: lengths with a schedule of their own. The slope at the end of one run is three times as steep, because the rate is
#: falling there. It would charge "faster but worse" too little.
NATS_PER_LENGTH = 0.0045 / (100 / 1770)
RATE_FROM = "published: 0.0045 nats for 100 of record 21's 1,770 steps, taken as a share of the run"


class Comparison(msgspec.Struct, frozen=True):
    """B against A, from pairs of runs. Times are ranked train times, seconds."""

    seeds: tuple[int, ...]  #: one for each pair
    first_s: tuple[float, ...]
    second_s: tuple[float, ...]
    first_loss: tuple[float, ...]
    second_loss: tuple[float, ...]
    time_ratio: Interval  #: B / A, 95 %
    loss_difference: Interval  #: B - A, 95 %
    s_per_nat: float  #: price of a nat: seconds of a longer run
    rate_from: str  #: source of that price
    equivalent_s: float  #: B - A, with the loss counted as time; below zero: B is better

    @property
    def is_resolved(self) -> bool:
        """Whether the interval of the time ratio excludes 1."""
        return self.time_ratio.high < 1 or self.time_ratio.low > 1


def compare(pairs: Sequence[tuple[Run, Run]]) -> Comparison:
    """Compare pairs of runs of one seed, as far as both finished.

    Raises:
        ValueError: for fewer than two pairs, or a time that is not above zero.
    """
    done = [(a, b) for a, b in pairs if a.finished and b.finished]
    first, second = [a for a, _ in done], [b for _, b in done]
    first_s, second_s = [run.train_time_s for run in first], [run.train_time_s for run in second]
    first_loss, second_loss = [run.val_loss for run in first], [run.val_loss for run in second]
    difference = statistics.mean_interval([b - a for a, b in zip(first_loss, second_loss, strict=True)])
    if difference is None:
        raise ValueError(f"got {len(first)} pairs; need two or more")
    s_per_nat = seconds_per_nat(first)
    return Comparison(
        seeds=tuple(run.start.seed for run in first),
        first_s=tuple(first_s),
        second_s=tuple(second_s),
        first_loss=tuple(first_loss),
        second_loss=tuple(second_loss),
        time_ratio=statistics.ratio_interval(first_s, second_s),
        loss_difference=difference,
        s_per_nat=s_per_nat,
        rate_from=RATE_FROM,
        equivalent_s=fmean(second_s) - fmean(first_s) + difference.mean * s_per_nat,
    )


def seconds_per_nat(runs: Sequence[Run]) -> float:
    """Return the price of a nat: how much longer runs like these would have to be, seconds."""
    return fmean(run.train_time_s for run in runs) / NATS_PER_LENGTH
