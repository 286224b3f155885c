"""Two records side by side: the same node, in turns, so that what the node does to one it does to the other.

Pairs alternate their order (A B, B A, A B, ...), so that a node that warms up or slows down favours neither.
"""

from collections.abc import Sequence
from statistics import fmean

import msgspec

from speedrun.ledger import statistics
from speedrun.ledger.run import Run, loss_of
from speedrun.ledger.statistics import Interval

#: Nats a step at the end of record 21's curve, where a run's own last validations do not tell.
FALLBACK_SLOPE = 0.0045 / 100


class Comparison(msgspec.Struct, frozen=True):
    """What some pairs say of B against A. Times are ranked train times, seconds."""

    seeds: tuple[int, ...]  #: one for each pair
    first_s: tuple[float, ...]
    second_s: tuple[float, ...]
    first_loss: tuple[float, ...]
    second_loss: tuple[float, ...]
    time_ratio: Interval  #: B by A, 95 %
    loss_difference: Interval  #: B less A, 95 %
    s_per_nat: float  #: what a nat costs at the end of A's curve
    equivalent_s: float  #: what B gains (below zero) or loses against A, its loss counted as time

    @property
    def is_resolved(self) -> bool:
        """Whether the interval of the ratio leaves one on one side."""
        return self.time_ratio.high < 1 or self.time_ratio.low > 1


def compare(seeds: Sequence[int], first: Sequence[Run], second: Sequence[Run]) -> Comparison:
    """The comparison of pairs of finished runs.

    Raises:
        ValueError: fewer than two pairs, or a time that is not above zero.
    """
    first_s, second_s = [run.train_time_s for run in first], [run.train_time_s for run in second]
    first_loss, second_loss = [run.val_loss for run in first], [run.val_loss for run in second]
    difference = statistics.mean_interval([b - a for a, b in zip(first_loss, second_loss, strict=True)])
    if difference is None:
        raise ValueError(f"got {len(first)} pairs; need two or more")
    s_per_nat = seconds_per_nat(first)
    return Comparison(
        seeds=tuple(seeds),
        first_s=tuple(first_s),
        second_s=tuple(second_s),
        first_loss=tuple(first_loss),
        second_loss=tuple(second_loss),
        time_ratio=statistics.ratio_interval(first_s, second_s),
        loss_difference=difference,
        s_per_nat=s_per_nat,
        equivalent_s=fmean(second_s) - fmean(first_s) + difference.mean * s_per_nat,
    )


def seconds_per_nat(runs: Sequence[Run]) -> float:
    """What a nat costs at the end of these runs' curves: seconds a step, by nats a step."""
    step_s = fmean(run.train_time_s for run in runs) / runs[0].start.num_steps
    return step_s / fmean(slope(run) for run in runs)


def slope(run: Run) -> float:
    """Nats that the loss falls in a step at the end, from the last two validations; or the fallback."""
    if len(run.vals) > 1:
        before, last = run.vals[-2:]
        if (fall := loss_of(before) - loss_of(last)) > 0 and last.step > before.step:
            return fall / (last.step - before.step)
    return FALLBACK_SLOPE
