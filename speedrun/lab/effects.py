"""The statistics of an experiment: paired differences between arms, and their tests.

A difference is an arm minus the one it is compared with, for one seed. Losses are nats per token, times are ranked
seconds. A loss counts as time at the price of a nat, as in `speedrun reproduce --against`; the price is taken as exact.
Intervals are Student's t for a single arm, 95 %. Tests are two-sided; their p is adjusted by Holm over all arms, for
each measure separately.

The best of many arms looks better than it is, so only runs with fresh seeds confirm it.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any, Literal

import msgspec

from speedrun.lab.proof import seconds_per_nat
from speedrun.lab.trials import Arm, Experiment, Kind, Runs, Standing
from speedrun.record.statistics import Interval, mean_interval

SUMMARY_SCHEMA = "speedrun.experiment-summary/1"

#: Significance level, for adjusted p.
LEVEL = 0.05
#: Share of the train time; less is not worth its lines (RULES.md prices 100 lines at 0.2 %).
NEGLIGIBLE = 0.01

Verdict = Literal["better", "worse", "equal", "unresolved", "non-finite"]


class Effect(Interval, frozen=True):
    """A mean difference over pairs, with its 95 % interval."""

    p: float  #: of no difference
    adjusted_p: float  #: Holm's


class Finding(msgspec.Struct, frozen=True):
    """One arm against another; the effects are None with fewer than two pairs of finished runs."""

    arm: str
    against: str
    seeds: tuple[int, ...]  #: of the pairs
    losses: tuple[float, ...]
    against_losses: tuple[float, ...]
    train_times_s: tuple[float, ...]
    against_train_times_s: tuple[float, ...]
    num_non_finite: int  #: runs of the arm
    s_per_nat: float | None  #: its source is `proof.RATE_FROM`
    loss: Effect | None
    log_time: Effect | None  #: of the logarithms
    together_s: Effect | None  #: equivalent seconds: time, and loss as time
    negligible_s: float | None
    verdict: Verdict


class Summary(msgspec.Struct, frozen=True, tag_field="schema", tag=SUMMARY_SCHEMA):
    """`summary.json` of an experiment, derived from its runs."""

    standing: Standing
    experiment_sha256: str
    kind: Kind
    track: str
    num_runs: int  #: complete
    findings: tuple[Finding, ...]  #: in the order of the arms
    winner: str | None  #: the arm with the lowest mean of equivalent seconds, if it is below zero
    confirmation: Finding | None  #: of the winner, on fresh seeds only

    @property
    def confirmed(self) -> bool:
        """Whether the winner is better on fresh seeds, too."""
        return self.confirmation is not None and self.confirmation.verdict == "better"


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p adjusted by Holm, which is valid for dependent tests; here they share an arm.

        adjusted p of the i-th smallest, from 0 = max over j <= i of min(1, (m - j) p_j)

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted


def findings(pairs: Sequence[tuple[Arm, Arm]], seeds: Sequence[int], runs: Runs) -> tuple[Finding, ...]:
    """Compare the arms of each pair on these seeds; adjust p over the pairs."""
    found = [_finding(arm, other, seeds, runs) for arm, other in pairs]
    for measure in ("loss", "log_time", "together_s"):
        tested = [(place, effect) for place, one in enumerate(found) if (effect := getattr(one, measure))]
        for (place, effect), p in zip(tested, holm([effect.p for _, effect in tested]), strict=True):
            adjusted = msgspec.structs.replace(effect, adjusted_p=p)
            found[place] = msgspec.structs.replace(found[place], **{measure: adjusted})
    return tuple(msgspec.structs.replace(one, verdict=_verdict(one)) for one in found)


def _finding(arm: Arm, other: Arm, seeds: Sequence[int], runs: Runs) -> Finding:
    """Compare one pair, without adjusted p and verdict."""
    ended = [seed for seed in seeds if (arm.name, seed) in runs]
    finished = {key for key, run in runs.items() if run.finished}
    paired = [seed for seed in ended if {(arm.name, seed), (other.name, seed)} <= finished]
    mine, others = ([runs[name, seed] for seed in paired] for name in (arm.name, other.name))
    losses, against_losses = [run.val_loss for run in mine], [run.val_loss for run in others]
    times_s, against_s = [run.train_time_s for run in mine], [run.train_time_s for run in others]
    by_loss = [b - a for a, b in zip(against_losses, losses, strict=True)]
    by_time_s = [b - a for a, b in zip(against_s, times_s, strict=True)]
    s_per_nat = seconds_per_nat(others) if others else None
    return Finding(
        arm=arm.name,
        against=other.name,
        seeds=tuple(paired),
        losses=tuple(losses),
        against_losses=tuple(against_losses),
        train_times_s=tuple(times_s),
        against_train_times_s=tuple(against_s),
        num_non_finite=sum(not runs[arm.name, seed].finished for seed in ended),
        s_per_nat=s_per_nat,
        loss=_effect(by_loss),
        log_time=_effect([math.log(b / a) for a, b in zip(against_s, times_s, strict=True)]),
        together_s=_effect([s + nats * (s_per_nat or 0) for s, nats in zip(by_time_s, by_loss, strict=True)]),
        negligible_s=NEGLIGIBLE * fmean(against_s) if others else None,
        verdict="unresolved",
    )


def _effect(differences: Sequence[float]) -> Effect | None:
    from scipy import stats

    interval = mean_interval(differences)
    if interval is None:
        return None
    # Differences without any scatter are those of copies of one run, and prove nothing.
    tested: Any = stats.ttest_1samp(differences, 0) if stdev(differences) else None
    p = 1.0 if tested is None else float(tested.pvalue)
    return Effect(interval.mean, interval.low, interval.high, p, adjusted_p=p)


def _verdict(found: Finding) -> Verdict:
    """Judge by equivalent seconds. "Equal" needs an interval that excludes every difference of any worth."""
    effect = found.together_s
    if found.num_non_finite:
        return "non-finite"
    if effect is None or found.negligible_s is None:
        return "unresolved"
    if effect.adjusted_p < LEVEL:
        return "better" if effect.mean < 0 else "worse"
    if effect.low <= 0 <= effect.high and max(-effect.low, effect.high) <= found.negligible_s:
        return "equal"
    return "unresolved"


def winner(found: Sequence[Finding]) -> Finding | None:
    """Return the arm with the largest mean gain, resolved or not; None if none gains."""
    gains = [
        (one.together_s.mean, place)
        for place, one in enumerate(found)
        if one.together_s is not None and one.together_s.mean < 0 and one.verdict != "non-finite"
    ]
    return found[min(gains)[1]] if gains else None


def summary(experiment: Experiment, sha256: str, runs: Runs) -> Summary:
    """Summarize the runs so far."""
    pairs = [(arm, experiment.arm(arm.against)) for arm in experiment.arms if arm.against is not None]
    found = findings(pairs, experiment.seeds, runs)
    best = winner(found)
    confirmation = None
    if best is not None and experiment.confirming:
        pair = (experiment.arm(best.arm), experiment.arm(best.against))
        confirmation = findings([pair], experiment.confirming, runs)[0]
    return Summary(
        standing=experiment.standing,
        experiment_sha256=sha256,
        kind=experiment.kind,
        track=experiment.track.id,
        num_runs=len(runs),
        findings=found,
        winner=best and best.arm,
        confirmation=confirmation,
    )
