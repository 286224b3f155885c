"""What a batch of runs proves: tests of its mean loss, how many runs that takes, intervals, equivalence.

Losses are nats per token. A test here asks one question: would a batch like this be this good by luck, if the true mean
were the target or above? All distributions are SciPy's, imported where they are used, so that reading a record stays
fast. Source of the rules: modded-nanogpt (p < 0.01 that the mean is at most the target).
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev, variance
from typing import Any, Literal, NamedTuple

import msgspec

#: With so few runs the sample's own sd says little: a known sigma takes its place.
FEW_RUNS = 4
#: What a test has to reach; the rule for few runs trusts a number from elsewhere, so it asks for more.
ALPHA: dict[str, float] = {"t": 0.01, "z": 0.001}
#: More runs than this are not worth declaring.
MOST_RUNS = 1000

#: What the known sigma is multiplied by, by the number of runs. One in ten of 93 public groups scatters 1.6 times as
#: much as the known sigma says, or more. So widened, false positives stay below 1 % up to 1.9 times: 0.0036 for 0.0019.
WIDENED: dict[int, float] = {1: 1.43, 2: 1.30, 3: 1.24, 4: 1.18}

Rule = Literal["t", "z"]


class MeanTest(NamedTuple):
    """The outcome of a one-sided test that the mean is below a target."""

    rule: Rule
    num_runs: int
    mean: float
    sigma: float  #: sample sd of the t-test; the widened known one, or the sample's if larger, of the z-test
    statistic: float
    p: float
    alpha: float  #: `p` must be below it

    @property
    def passed(self) -> bool:
        """Whether the batch proves it."""
        return self.p < self.alpha


def rule_for(num_runs: int, known_sigma: float | None) -> Rule:
    """The test that a batch of so many runs is put to: Student's t, or z where there are few and the noise is known."""
    return "z" if known_sigma is not None and num_runs <= FEW_RUNS else "t"


def mean_below(
    losses: Sequence[float], target: float, *, known_sigma: float | None = None, alpha: float | None = None
) -> MeanTest:
    """One-sided: the true mean is below the target.

        t = (mean - target) / (sd / sqrt(n)), n - 1 degrees of freedom
        z = (mean - target) / (max(sd, WIDENED[n] * known_sigma) / sqrt(n))

    Args:
        losses: of all finished runs of a declared batch, one number each.
        target: what the mean has to be below.
        known_sigma: sd over seeds from earlier runs of the track.
        alpha: instead of the rule's own.

    Raises:
        ValueError: without a loss.
    """
    from scipy import special

    if not losses:
        raise ValueError("got no loss; a test needs at least one")
    n, mean, rule = len(losses), fmean(losses), rule_for(len(losses), known_sigma)
    alpha = ALPHA[rule] if alpha is None else alpha
    if not math.isfinite(mean):  # a run that blew up proves the opposite
        return MeanTest(rule, n, mean, math.inf, math.inf, 1.0, alpha)
    sd = stdev(losses) if n > 1 else 0.0
    sigma = max(sd, WIDENED[n] * (known_sigma or 0.0)) if rule == "z" else sd
    # Runs that do not differ at all are one run: they prove nothing.
    statistic = (mean - target) / (sigma / math.sqrt(n)) if sigma > 0 else 0.0
    p = float(special.ndtr(statistic) if rule == "z" or n == 1 else special.stdtr(n - 1, statistic))
    return MeanTest(rule, n, mean, sigma, statistic, p, alpha)


#: Quantiles of the sample's sd over which the power of few runs is averaged: exact to four digits.
_QUANTILES = 2000


def power(
    num_runs: int, margin: float, sigma: float, *, rule: Rule, alpha: float, known_sigma: float | None = None
) -> float:
    """The probability that a batch passes whose true mean is `margin` below the target.

    Mean and sd of normal samples are independent, so the z rule's power is the mean, over the sample's sd, of the power
    with the sigma that it then uses.

    Args:
        num_runs: of the batch.
        margin: nats.
        sigma: the true sd of single runs.
        rule: of the test.
        alpha: of the test.
        known_sigma: what the z rule is given; None: it uses the true one as it is.
    """
    from scipy import special

    shift = margin / sigma * math.sqrt(num_runs)
    if rule == "z":
        if known_sigma is None:
            return float(special.ndtr(shift + special.ndtri(alpha)))
        least, freedom, critical = WIDENED[num_runs] * known_sigma / sigma, num_runs - 1, special.ndtri(alpha)
        if not freedom:
            return float(special.ndtr(shift + critical * least))
        used = (
            max(math.sqrt(special.chdtri(freedom, (i + 0.5) / _QUANTILES) / freedom), least)
            for i in range(_QUANTILES)
        )
        return fmean(special.ndtr(shift + critical * one) for one in used)
    if num_runs < 2:
        return 0.0
    freedom = num_runs - 1
    return float(special.nctdtr(freedom, -shift, special.stdtrit(freedom, alpha)))


def runs_needed(
    margin: float, sigma: float, *, power_wanted: float = 0.9, rule: Rule = "t", alpha: float = 0.01
) -> int | None:
    """The smallest batch that passes with the wanted probability; None if even MOST_RUNS would not do."""
    if margin <= 0:
        return None
    enough = (
        n for n in range(1, MOST_RUNS + 1) if power(n, margin, sigma, rule=rule, alpha=alpha) >= power_wanted
    )
    return next(enough, None)


def batch_needed(
    margin: float, sigma: float, *, known_sigma: float | None, power_wanted: float = 0.9, num_looks: int = 1
) -> int | None:
    """The smallest batch that passes with the wanted probability by the rule for its own size; None as above."""
    if margin <= 0:
        return None
    if known_sigma is not None:
        for n in range(1, FEW_RUNS + 1):
            alpha = ALPHA["z"] / num_looks
            if power(n, margin, sigma, rule="z", alpha=alpha, known_sigma=known_sigma) >= power_wanted:
                return n
    needed = runs_needed(margin, sigma, power_wanted=power_wanted, rule="t", alpha=ALPHA["t"] / num_looks)
    # Fewer are put to the z-test, which they would not pass.
    return needed if needed is None or known_sigma is None else max(needed, FEW_RUNS + 1)


class Interval(msgspec.Struct, frozen=True):
    """A mean and the interval that holds the true one with the stated confidence."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of its length."""
        return (self.high - self.low) / 2


def mean_interval(numbers: Sequence[float], *, confidence: float = 0.95) -> Interval | None:
    """Student's t interval of the mean; None with fewer than two numbers."""
    from scipy import special

    if len(numbers) < 2:
        return None
    mean, error = fmean(numbers), stdev(numbers) / math.sqrt(len(numbers))
    reach = float(special.stdtrit(len(numbers) - 1, (1 + confidence) / 2)) * error
    return Interval(mean, mean - reach, mean + reach)


class Equivalence(msgspec.Struct, frozen=True):
    """Two one-sided tests that two means differ by less than a margin."""

    difference: float  #: of the means, second less first
    margin: float
    p: float  #: the larger of the two
    alpha: float

    @property
    def passed(self) -> bool:
        """Whether they are equal for all that matters."""
        return self.p < self.alpha


def equivalent(
    first: Sequence[float], second: Sequence[float], *, margin: float = 0.001, alpha: float = 0.05
) -> Equivalence:
    """Whether a change of the system left the loss alone: |difference of means| < margin (Welch, both sides).

    Raises:
        ValueError: with fewer than two runs on a side.
    """
    from scipy import stats

    if min(len(first), len(second)) < 2:
        raise ValueError(f"got {len(first)} and {len(second)} runs; equivalence needs two on each side")
    difference = fmean(second) - fmean(first)
    if not stdev(first) * stdev(second):  # copies of one run on a side: they prove nothing
        return Equivalence(difference, margin, 1.0, alpha)
    sides: list[Any] = [
        stats.ttest_ind([x + margin for x in second], first, equal_var=False, alternative="greater"),
        stats.ttest_ind([x - margin for x in second], first, equal_var=False, alternative="less"),
    ]
    p = max(float(side.pvalue) for side in sides)
    return Equivalence(difference, margin, p, alpha)


def ratio_interval(first: Sequence[float], second: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Of second / first over pairs that were measured side by side: Student's t of the logarithms of their ratios.

    The mean is the geometric one. No bootstrap: of three pairs its interval lies between the smallest ratio and the
    largest, and misses the true one every fourth time.

    Raises:
        ValueError: if these are no pairs, fewer than two, or not all above zero.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"got {len(first)} and {len(second)} numbers; need two pairs or more")
    if min(*first, *second) <= 0:
        raise ValueError(f"got {min(*first, *second)}; a ratio needs numbers above zero")
    logs = mean_interval([math.log(b / a) for a, b in zip(first, second, strict=True)], confidence=confidence)
    assert logs is not None
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high))


def pooled_sd(groups: Sequence[Sequence[float]]) -> float:
    """Sd of single runs around the means of their groups: sqrt(sum of squares / sum of (n - 1)).

    Raises:
        ValueError: if no group has two runs.
    """
    freedom = sum(len(group) - 1 for group in groups if len(group) > 1)
    if not freedom:
        raise ValueError("no group has two runs; nothing can be pooled")
    squares = sum(variance(group) * (len(group) - 1) for group in groups if len(group) > 1)
    return math.sqrt(squares / freedom)


def difference_interval(
    first: Sequence[float],
    second: Sequence[float],
    sigma: float,
    *,
    freedom: int | None = None,
    confidence: float = 0.95,
) -> Interval:
    """Of mean(second) - mean(first), where single runs of both sides scatter alike.

        difference of means +- reach * sigma * sqrt(1 / n + 1 / m)

    So one new run can be held against a batch: its mean is itself.

    Args:
        first: n numbers.
        second: m numbers.
        sigma: sd of single runs.
        freedom: of Student's t, where `sigma` was estimated from so many and one more; None: it is known.
        confidence: of the interval, both sides.

    Raises:
        ValueError: with nothing on a side.
    """
    from scipy import special

    if not (first and second):
        raise ValueError(f"got {len(first)} and {len(second)} numbers; need one on each side")
    tail = (1 + confidence) / 2
    reach = float(special.ndtri(tail) if freedom is None else special.stdtrit(freedom, tail))
    half = reach * sigma * math.sqrt(1 / len(first) + 1 / len(second))
    difference = fmean(second) - fmean(first)
    return Interval(difference, difference - half, difference + half)
