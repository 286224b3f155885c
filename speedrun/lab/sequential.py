"""A test of paired differences that may end after any pair, fixed before the first one.

After pair k of N, Student's two-sided test of a mean of zero has the level ALPHA k^3 / (1^3 + ... + N^3). All looks
together have at most ALPHA, by Boole's inequality, for normal differences of any variance. Source: alpha spending (Lan
and DeMets 1983, Discrete sequential boundaries for clinical trials); docs/LOG.md compares other tests.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import msgspec

from speedrun.base.track import Track
from speedrun.record.reproduction import LOSS_SD
from speedrun.record.statistics import Interval, Verdict

ALPHA, POWER = 0.01, 0.8
MOST_PAIRS = 1000


def levels(num_pairs: int) -> tuple[float, ...]:
    """Return the level of the test after each of so many pairs."""
    cubes = [k**3 for k in range(1, num_pairs + 1)]
    total = sum(cubes)
    return tuple(ALPHA * cube / total for cube in cubes)


def resolved(num_pairs: int) -> float:
    """Return the true mean, in sds of a difference, that the last look finds with POWER; earlier looks add to it."""
    from scipy import optimize, special

    freedom = num_pairs - 1
    critical = special.stdtrit(freedom, 1 - levels(num_pairs)[-1] / 2)
    missed = optimize.bisect(
        lambda shift: special.nctdtr(freedom, shift, critical) - 1 + POWER, 0, 2 * critical
    )
    return float(missed) / math.sqrt(num_pairs)  # pyright: ignore[reportArgumentType] - it is the root alone


def promise(rules: Track, num_pairs: int) -> str:
    """Say what so many pairs find, at the noise of the track."""
    sd = math.sqrt(2) * (rules.target.sigma or LOSS_SD * rules.target.loss)
    found = f"with {num_pairs} pairs in this budget, differences of at least {resolved(num_pairs) * sd:.4f} nats are"
    return f"{found} found with {POWER}, at an sd of {sd:.4f}; of equal recipes, {ALPHA:.0%} at most seem unequal"


class Answer(msgspec.Struct, frozen=True, tag_field="schema", tag="speedrun.try/1"):
    """`summary.json` of a try: a recipe less its parent, after some pairs."""

    verdict: Verdict
    num_pairs: int
    most_pairs: int
    loss: Interval | None = None  #: nats; valid at every look; None before two pairs that differ

    def __str__(self) -> str:
        said = {"unresolved": "cannot tell", "non-finite": "a run became non-finite"}
        loss = f": {self.loss.mean:+.4f} +- {self.loss.half_width:.4f} nats" if self.loss else ""
        return f"{said.get(self.verdict, self.verdict)}, {self.num_pairs} of at most {self.most_pairs} pairs{loss}"


def answer(differences: Sequence[float], declared: Sequence[float]) -> Answer:
    """Return the answer of the look after these pairs, of which none before has decided. Copies prove nothing."""
    from scipy import special

    n, sd = len(differences), stdev(differences) if len(differences) > 1 else 0.0
    if not sd:
        return Answer("unresolved", n, len(declared))
    mean, reach = (
        fmean(differences),
        -float(special.stdtrit(n - 1, declared[n - 1] / 2)) * sd / math.sqrt(n),
    )
    verdict = "unresolved" if abs(mean) <= reach else "better" if mean < 0 else "worse"
    return Answer(verdict, n, len(declared), Interval(mean, mean - reach, mean + reach))
