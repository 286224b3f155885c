"""`speedrun sweep`: a recipe with other numbers."""

import itertools
import math
import random
import re
from collections.abc import Mapping
from typing import NamedTuple

import click

from speedrun.cli import experiment
from speedrun.cli.options import Integer, example, parse_settings
from speedrun.ground.errors import UsageError

#: More arms than this are more than anybody can wait for, or correct for.
MOST_ARMS = 200


class Between(NamedTuple):
    """All numbers from low to high; on a logarithmic scale, unless both are whole."""

    low: str
    high: str

    def draw(self, chance: random.Random) -> str:
        """One of them; with three digits, so that it can be typed again."""
        if self.is_whole:
            return str(chance.randint(int(self.low), int(self.high)))
        low, high = math.log(float(self.low)), math.log(float(self.high))
        return f"{math.exp(chance.uniform(low, high)):.3g}"

    @property
    def is_whole(self) -> bool:
        """Whether it holds whole numbers only."""
        return self.low.isdigit() and self.high.isdigit()


Space = Mapping[str, tuple[str, ...] | Between]


@click.command(
    epilog=example(
        "speedrun sweep --set optimizer.muon_lr=0.025,0.05,0.1 --set schedule.momentum_end=0.9,0.95 --runs 2",
        "speedrun sweep --set optimizer.muon_lr=0.01..0.2 --trials 8 --runs 2 --confirm 6",
        "speedrun sweep --resume runs/2026-11-21-smoke-cpu-sweep-1",
    )
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE,...",
    help="Values to try; LOW..HIGH with --trials. One value holds for every arm. Repeatable.",
)
@click.option("--trials", type=Integer(1), metavar="K", help="So many random choices, not the whole grid.")
@click.option("--seed", type=Integer(0), default=0, show_default=True, help="Of the random choices.")
@experiment.options
@click.pass_context
def command(
    ctx: click.Context, *, settings: tuple[str, ...], trials: int | None, seed: int, **_: object
) -> None:
    """Run a recipe as it is and with other settings, all with the same seeds; say which are better.

    Loss and time are compared inside pairs of one seed, p is adjusted for the number of arms, and the best arm runs
    again with fresh seeds. This is research: nothing of it is ranked.
    """
    space = {key: choices(key, text) for key, text in parse_settings(settings).items()}
    fixed = {
        key: values[0]
        for key, values in space.items()
        if not isinstance(values, Between) and len(values) == 1
    }
    free = {key: values for key, values in space.items() if key not in fixed}
    if not free and ctx.params["resume"] is None:
        raise UsageError("nothing to sweep; need values with commas, as in --set optimizer.muon_lr=0.025,0.1")
    variants = grid(free) if trials is None else drawn(free, trials, seed)
    experiment.perform(ctx, "sweep", fixed, variants=variants)


def choices(key: str, text: str) -> tuple[str, ...] | Between:
    """`1,2,3` as three values, `1..3` as a range; commas inside brackets belong to a value.

    Raises:
        UsageError: for a range that is empty, or not of numbers above zero.
    """
    if ".." not in text:
        return tuple(value.strip() for value in re.split(r",(?![^()]*\))", text) if value.strip())
    low, _, high = text.partition("..")
    try:
        good = 0 < float(low) < float(high) < math.inf or (
            Between(low, high).is_whole and int(low) < int(high)
        )
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"--set {key}={text}; need LOW..HIGH, two numbers above zero, the smaller one first")
    return Between(low, high)


def grid(space: Space) -> list[dict[str, str]]:
    """Every combination.

    Raises:
        UsageError: for a range, of which there is no every; for too many.
    """
    axes: dict[str, tuple[str, ...]] = {}
    for key, values in space.items():
        if isinstance(values, Between):
            raise UsageError(f"--set {key} is a range; add --trials K to draw from it, or list values")
        axes[key] = values
    if (number := math.prod(map(len, axes.values()))) > MOST_ARMS:
        raise UsageError(
            f"got {number:,} combinations; at most {MOST_ARMS} are run: list fewer, or add --trials K"
        )
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def drawn(space: Space, trials: int, seed: int) -> list[dict[str, str]]:
    """So many combinations by chance, none twice; all of them where there are no more.

    Raises:
        UsageError: for too many.
    """
    if trials > MOST_ARMS:
        raise UsageError(f"got {trials:,} trials; at most {MOST_ARMS} are run")
    chance, found = random.Random(seed), []
    for _ in range(100 * trials):  # a small grid runs out before that
        one = {
            key: v.draw(chance) if isinstance(v, Between) else chance.choice(v) for key, v in space.items()
        }
        if one not in found:
            found.append(one)
        if len(found) == trials:
            break
    return found
