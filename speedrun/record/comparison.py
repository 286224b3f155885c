"""Compares finished runs in pairs by seed: differences of loss and time, and both as seconds.

Losses are nats per token, times are ranked seconds, and a loss counts as time at a fixed price of a nat. Intervals are
Student's t, 95 %; tests are two-sided.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

import msgspec

from speedrun.record.logged_run import Run
from speedrun.record.statistics import Interval, mean_interval, p_of_zero

#: Share of the train time. A smaller effect is not worth its lines (RULES.md prices 100 lines at 0.2 %).
NEGLIGIBLE = 0.01
#: Published for record 21: 100 of 1,770 steps are worth 0.0045 nats, from runs of several lengths, each with its own
#: schedule. The slope at the end of one run is three times as steep, because the learning rate falls there.
NATS_PER_LENGTH = 0.0045 / (100 / 1770)
RATE_FROM = "published: 0.0045 nats for 100 of record 21's 1,770 steps, taken as a share of the run"

Verdict = Literal["better", "worse", "equal", "unresolved", "non-finite"]


class Effect(Interval, frozen=True):
    """A mean difference over pairs, with its 95 % interval."""

    p: float
    adjusted_p: float


class Finding(msgspec.Struct, frozen=True):
    """One arm against another. Effects are None with fewer than two pairs of finished runs."""

    arm: str
    against: str
    seeds: tuple[int, ...]  #: of the pairs
    num_non_finite: int  #: runs of the arm
    s_per_nat: float | None  #: price of a nat: seconds by which the other arm's runs would have to be longer
    loss: Effect | None
    log_time: Effect | None  #: difference of the logarithms
    together_s: Effect | None  #: equivalent seconds: the time plus the loss as time
    negligible_s: float | None
    verdict: Verdict


def compared(arm: str, against: str, pairs: Mapping[int, tuple[Run, Run]]) -> Finding:
    """Compare finished runs in pairs by seed, those of `against` first; raise ValueError for times of zero."""
    others = [old for old, _ in pairs.values()]
    if any(run.train_time_s <= 0 for pair in pairs.values() for run in pair):
        raise ValueError("a run took no time")
    by_loss = [new.val_loss - old.val_loss for old, new in pairs.values()]
    by_time_s = [new.train_time_s - old.train_time_s for old, new in pairs.values()]
    mean_s = fmean(run.train_time_s for run in others) if others else None
    s_per_nat = None if mean_s is None else mean_s / NATS_PER_LENGTH
    return Finding(
        arm=arm,
        against=against,
        seeds=tuple(pairs),
        num_non_finite=0,
        s_per_nat=s_per_nat,
        loss=_effect(by_loss),
        log_time=_effect([math.log(new.train_time_s / old.train_time_s) for old, new in pairs.values()]),
        together_s=_effect([s + nats * (s_per_nat or 0) for s, nats in zip(by_time_s, by_loss, strict=True)]),
        negligible_s=None if mean_s is None else NEGLIGIBLE * mean_s,
        verdict="unresolved",
    )


def _effect(differences: Sequence[float]) -> Effect | None:
    if (interval := mean_interval(differences)) is None:
        return None
    p = p_of_zero(differences)
    return Effect(interval.mean, interval.low, interval.high, p, adjusted_p=p)
