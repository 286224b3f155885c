"""Tests of a batch's mean loss in nats per token, their power, confidence intervals, equivalence, and pairs of runs.

Validation needs only the distributions that are series here, since importing SciPy takes longer than validating a
record. Source of the rules: modded-nanogpt (p < 0.01).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev, variance
from typing import Literal

import msgspec

from speedrun.record.logged_run import Run

FEW_RUNS = 4  #: batches up to this size use a known sigma
#: Levels of the tests. The z-test is stricter, since its sigma comes from other runs.
ALPHA: dict[str, float] = {"t": 0.01, "z": 0.001}
POWER, MOST_RUNS = 0.9, 1000  #: power that a batch needs, and the largest batch considered
SAME_NATS, SAME_ALPHA = 0.001, 0.05  #: margin and level of the test of equivalence
CONFIDENCE = 0.95  #: of two-sided intervals

#: Factor on the known sigma, by the number of runs. In a tenth of 93 public groups the sd is at least 1.6 times the
#: known sigma. With these factors, false positives stay below 1 % up to 1.9 times: 0.0036 for 0.0019.
WIDENED: dict[int, float] = {1: 1.43, 2: 1.30, 3: 1.24, 4: 1.18}

Rule = Literal["t", "z"]


class MeanTest(msgspec.Struct, frozen=True):
    """Result of a one-sided test; its null hypothesis is a true mean at or above the target."""

    rule: Rule
    num_runs: int
    mean: float
    sigma: float  #: of single runs, as used
    statistic: float
    p: float
    alpha: float
    passed: bool


def normal_cdf(x: float) -> float:
    """Return the probability that a standard normal variable is below x."""
    return math.erfc(-x / math.sqrt(2)) / 2


def student_cdf(freedom: float, x: float) -> float:
    """Return the probability that Student's t is below x: half an incomplete beta function (DLMF 8.17), by symmetry."""
    square = x * x
    tail = _beta(freedom / 2, 0.5, freedom / (freedom + square), square / (freedom + square)) / 2
    return tail if x < 0 else 1 - tail


def _beta(a: float, b: float, x: float, rest: float) -> float:
    """The regularised incomplete beta function at x = 1 - rest, by the shorter of two series (DLMF 8.17.8)."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(b, a, rest, x)
    if x == 0:
        return 0.0
    scale = math.lgamma(a + b) - math.lgamma(a + 1) - math.lgamma(b)
    return _series(a * math.log(x) + b * math.log(rest) + scale, lambda n: x * (a + b + n) / (a + 1 + n))


def chi2_cdf(freedom: int, x: float) -> float:
    """Return the probability that a chi-squared variable is below x: an incomplete gamma function (DLMF 8.7.1)."""
    a, half = freedom / 2, x / 2
    if half == 0:
        return 0.0
    if half > 2 * a + 300:  # far in the tail, where the first term underflows
        return 1.0
    return _series(a * math.log(half) - half - math.lgamma(a + 1), lambda n: half / (a + 1 + n))


def _series(log_first: float, ratio: Callable[[int], float]) -> float:
    """Sum positive terms, given the logarithm of the first and the ratios of neighbours."""
    total = term = math.exp(log_first)
    n = 0
    while term > total * 1e-17:
        term *= ratio(n)
        total += term
        n += 1
    return total


def sd(numbers: Sequence[float]) -> float | None:
    """Return the sd of a sample; None with fewer than two numbers."""
    return stdev(numbers) if len(numbers) > 1 else None


def rule_for(num_runs: int, known_sigma: float | None) -> Rule:
    """Return "z" for few runs and a known sigma, else "t"."""
    return "z" if known_sigma is not None and num_runs <= FEW_RUNS else "t"


def mean_below(
    losses: Sequence[float], target: float, *, known_sigma: float | None = None, alpha: float | None = None
) -> MeanTest:
    """Test, one-sided, that the true mean of a batch is below the target; an infinite loss fails it.

        t = (mean - target) / (sd / sqrt(n)), n - 1 degrees of freedom
        z = (mean - target) / (max(sd, WIDENED[n] * known_sigma) / sqrt(n))

    `known_sigma` is the sd over seeds of earlier runs of the track. `alpha` replaces the level of the rule.
    """
    n, mean, rule = len(losses), fmean(losses), rule_for(len(losses), known_sigma)
    alpha = ALPHA[rule] if alpha is None else alpha
    if not math.isfinite(mean):
        return MeanTest(rule, n, mean, math.inf, math.inf, 1.0, alpha, passed=False)
    scatter = sd(losses) or 0.0
    sigma = max(scatter, WIDENED[n] * (known_sigma or 0.0)) if rule == "z" else scatter
    # Runs without scatter are copies and prove nothing.
    statistic = (mean - target) / (sigma / math.sqrt(n)) if sigma > 0 else 0.0
    p = normal_cdf(statistic) if rule == "z" or n == 1 else student_cdf(n - 1, statistic)
    return MeanTest(rule, n, mean, sigma, statistic, p, alpha, passed=p < alpha)


_QUANTILES = 2000  #: of the sample sd, over which the z-test's power is averaged; accurate to four digits


def power(num_runs: int, margin: float, sigma: float, known_sigma: float | None, num_looks: int = 1) -> float:
    """Return the probability that a batch passes one look if its true mean is `margin` nats below the target.

    `sigma` is the true sd of single runs, `known_sigma` that of the track. Mean and sd of normal samples are
    independent, so the power of the z-test is averaged over the sample sd.
    """
    from scipy import special

    shift, freedom, rule = margin / sigma * math.sqrt(num_runs), num_runs - 1, rule_for(num_runs, known_sigma)
    alpha = ALPHA[rule] / num_looks
    if rule == "t":
        return float(special.nctdtr(freedom, -shift, special.stdtrit(freedom, alpha))) if freedom else 0.0
    least, critical = WIDENED[num_runs] * (known_sigma or 0.0) / sigma, special.ndtri(alpha)
    if not freedom:
        return float(special.ndtr(shift + critical * least))
    tails = ((i + 0.5) / _QUANTILES for i in range(_QUANTILES))
    used = (max(math.sqrt(special.chdtri(freedom, tail) / freedom), least) for tail in tails)
    return fmean(special.ndtr(shift + critical * one) for one in used)


def batch_needed(margin: float, sigma: float, *, known_sigma: float | None, num_looks: int = 1) -> int | None:
    """Return the smallest batch that passes its first look with probability POWER, or None above MOST_RUNS."""
    for n in range(1, MOST_RUNS + 1) if margin > 0 else ():
        if power(n, margin, sigma, known_sigma, num_looks) >= POWER:
            return n
    return None


class Interval(msgspec.Struct, frozen=True):
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


def mean_interval(numbers: Sequence[float]) -> Interval | None:
    """Return Student's t interval of the mean; None with fewer than two numbers."""
    from scipy import special

    if len(numbers) < 2:
        return None
    mean, error = fmean(numbers), stdev(numbers) / math.sqrt(len(numbers))
    reach = float(special.stdtrit(len(numbers) - 1, (1 + CONFIDENCE) / 2)) * error
    return Interval(mean, mean - reach, mean + reach)


def p_of_zero(numbers: Sequence[float]) -> float:
    """Return p of Student's two-sided test that two numbers or more have a true mean of zero."""
    error = stdev(numbers) / math.sqrt(len(numbers))
    # Numbers without scatter come from copies of one run, and prove nothing.
    return 2 * student_cdf(len(numbers) - 1, -abs(fmean(numbers)) / error) if error else 1.0


class Equivalence(msgspec.Struct, frozen=True):
    """Result of two one-sided tests that two means differ by less than a margin."""

    difference: float  #: second mean minus first
    margin: float
    p: float  #: of the weaker test
    alpha: float

    @property
    def passed(self) -> bool:
        """Whether the means are equivalent."""
        return self.p < self.alpha


def equivalent(first: Sequence[float], second: Sequence[float]) -> Equivalence:
    """Test |difference of means| < SAME_NATS by two one-sided Welch tests, given two runs or more on each side."""
    difference = fmean(second) - fmean(first)
    parts = [(variance(side) / len(side), len(side) - 1) for side in (first, second)]
    if not all(square for square, _ in parts):  # copies prove nothing
        return Equivalence(difference, SAME_NATS, 1.0, SAME_ALPHA)
    square = sum(part for part, _ in parts)
    freedom = square**2 / sum(part**2 / less_one for part, less_one in parts)
    p = student_cdf(freedom, (abs(difference) - SAME_NATS) / math.sqrt(square))
    return Equivalence(difference, SAME_NATS, p, SAME_ALPHA)


# --- pairs of runs by seed: losses are nats per token, times are ranked seconds, and a loss counts as time

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
