"""The settings that a sweep tries: lists and ranges of values, and the combinations of them."""

import itertools
import math
import random
import re
from collections.abc import Mapping
from typing import NamedTuple

from speedrun.base.errors import UsageError

#: A limit on time and on the correction of p for the number of arms.
MOST_ARMS = 200


class Range(NamedTuple):
    """A range to draw from: uniform if both ends are whole, else log-uniform."""

    low: str
    high: str

    def draw(self, rng: random.Random) -> str:
        """Draw a number; three digits if it is not whole, so that it can be typed again."""
        if self.is_whole:
            return str(rng.randint(int(self.low), int(self.high)))
        low, high = math.log(float(self.low)), math.log(float(self.high))
        return f"{math.exp(rng.uniform(low, high)):.3g}"

    @property
    def is_whole(self) -> bool:
        """Whether both ends are whole numbers."""
        return self.low.isdigit() and self.high.isdigit()


Space = Mapping[str, tuple[str, ...] | Range]


def parse(key: str, text: str) -> tuple[str, ...] | Range:
    """Parse `1,2,3` as three values and `1..3` as a range; commas inside brackets belong to a value.

    Raises:
        UsageError: for a range that is empty, or not of numbers above zero.
    """
    if ".." not in text:
        return tuple(value.strip() for value in re.split(r",(?![^()]*\))", text) if value.strip())
    low, _, high = text.partition("..")
    found = Range(low, high)
    try:
        good = 0 < float(low) < float(high) < math.inf or (found.is_whole and int(low) < int(high))
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"--set {key}={text}; need LOW..HIGH, two numbers above zero, the smaller one first")
    return found


def grid(space: Space) -> list[dict[str, str]]:
    """Return every combination.

    Raises:
        UsageError: for a range, or too many.
    """
    axes: dict[str, tuple[str, ...]] = {}
    for key, values in space.items():
        if isinstance(values, Range):
            raise UsageError(f"--set {key} is a range; add --trials K to draw from it, or list values")
        axes[key] = values
    if (number := math.prod(map(len, axes.values()))) > MOST_ARMS:
        raise UsageError(f"got {number:,} combinations; need at most {MOST_ARMS}, or --trials K")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def draw(space: Space, trials: int, seed: int) -> list[dict[str, str]]:
    """Draw distinct combinations; fewer than `trials` if there are no more.

    Raises:
        UsageError: for too many.
    """
    if trials > MOST_ARMS:
        raise UsageError(f"got {trials:,} trials; need at most {MOST_ARMS}")
    rng, found = random.Random(seed), []
    for _ in range(100 * trials):  # a small grid is exhausted before that
        one = {key: v.draw(rng) if isinstance(v, Range) else rng.choice(v) for key, v in space.items()}
        if one not in found:
            found.append(one)
        if len(found) == trials:
            break
    return found
