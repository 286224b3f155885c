"""The ladder of recipes: what each rung gains on a small track, beside the published and the predicted minutes.

The table is tab-separated, with `#` comments and one line for each rung, oldest first: `recipe`, `records` (that it
mirrors), `minutes` (published, on eight H100) and `predicted` (by `speedrun plan`, on the same).
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from speedrun.board.drawing import DASHED, GREY, INK, TARGET, TRAIN, VAL, canvas, number_decades, save
from speedrun.exchange.history import read_rows
from speedrun.ground import track as tracks
from speedrun.ground.errors import UsageError
from speedrun.ledger.record import load
from speedrun.ledger.run import Run, loss_of
from speedrun.ledger.statistics import Interval, mean_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Rung(msgspec.Struct, frozen=True):
    """A line of the table."""

    recipe: str
    records: str
    minutes: float
    predicted: float


Climb = tuple[Rung, Sequence[Run]]  #: a rung, and its runs on the small track


def target_reached(run: Run, target: float) -> tuple[float, float] | None:
    """Return step and train time at which the validation loss crosses the target, None if it does not.

    Linear between the two validations around it, so it is as exact as they are close.
    """
    time_s = {0: 0.0} | {event.step + 1: event.train_time_s for event in run.steps}
    vals = [(val.step, loss_of(val)) for val in run.vals]
    for (before, high), (after, low) in pairwise(vals):
        if low <= target < high:
            part = (high - target) / (high - low)
            return before + part * (after - before), time_s[before] + part * (time_s[after] - time_s[before])
    return None


def climbs(table: Path, records: Sequence[Path]) -> tuple[tracks.Track, list[Climb]]:
    """Return the track of the records, and the runs of each rung.

    Raises:
        UsageError: if a record has no result, two have one recipe, or the tracks differ; if a rung has no record.
    """
    runs = [found for path in records if (found := load(path).finished)]
    by_recipe = {found[0].file.recipe: found for found in runs}
    names = {found[0].file.track for found in runs}
    if len(by_recipe) < len(records) or len(names) != 1:
        raise UsageError("a ladder needs one record with a result for each recipe, all of one track")
    rungs = read_rows(table, Rung)
    if missing := [rung.recipe for rung in rungs if rung.recipe not in by_recipe]:
        raise UsageError(f"{table}: no record of {', '.join(missing)}; pass one for each recipe of the table")
    return tracks.load(names.pop().rpartition("@")[0]), [(rung, by_recipe[rung.recipe]) for rung in rungs]


def draw(table: Path, records: Sequence[Path], folder: Path) -> list[Path]:
    """Draw the ladder into `ladder.svg` and `ladder.png` of a folder; return their paths. Raise as `climbs` does."""
    rules, found = climbs(table, records)
    with canvas(9.5, 0.8 + 0.62 * len(found)) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _draw_losses(left, found, rules)
        _draw_minutes(right, [rung for rung, _ in found])
        left.set_yticks(range(len(found)), [rung.recipe for rung, _ in found])
        left.set_ylim(len(found) - 0.4, -0.9)
        return save(figure, folder, "ladder")


def _draw_losses(axes: "Axes", found: Sequence[Climb], rules: tracks.Track) -> None:
    target = rules.target.loss
    axes.axvline(target, color=TARGET, linewidth=1, linestyle=DASHED, zorder=2)
    bars: dict[str, Any] = {"fmt": "o", "color": VAL, "markersize": 5, "capsize": 3, "zorder": 3}
    text: dict[str, Any] = {"va": "center", "fontsize": 8, "textcoords": "offset points"}
    for place, (_, runs) in enumerate(found):
        interval = _interval([run.val_loss for run in runs])
        axes.errorbar(interval.mean, place, xerr=interval.half_width, **bars)
        axes.annotate(_reached(runs, target), (interval.high, place), (6, 0), **text)
    axes.set_xlim(right=max(run.val_loss for _, runs in found for run in runs) + 0.5)
    axes.set_xlabel(f"loss at the end on {rules.id} (nats per token), 95 % interval; dashed: {target:g}")
    axes.set_title("the same budget of tokens", loc="left", fontsize=10, color=INK)


def _reached(runs: Sequence[Run], target: float) -> str:
    """Say when the runs reached the target."""
    reached = [found for run in runs if (found := target_reached(run, target))]
    if len(reached) < len(runs):
        return f"{len(reached)} of {len(runs)} runs reach it" if reached else "not reached"
    steps, times_s = map(_interval, zip(*reached, strict=True))
    in_steps = f"{steps.mean:.0f} +- {steps.half_width:.0f} steps"
    return f"reached: {in_steps}, {times_s.mean:.0f} +- {times_s.half_width:.0f} s"


def _interval(numbers: Sequence[float]) -> Interval:
    return mean_interval(numbers) or Interval(numbers[0], numbers[0], numbers[0])


def _draw_minutes(axes: "Axes", rungs: Sequence[Rung]) -> None:
    form: dict[str, Any] = {"va": "center", "fontsize": 8, "xytext": (3, 0), "textcoords": "offset points"}
    for place, rung in enumerate(rungs):
        for shift, minutes, colour in ((-0.18, rung.minutes, TRAIN), (0.18, rung.predicted, VAL)):
            axes.barh(place + shift, minutes, 0.32, color=colour, zorder=2)
            axes.annotate(f"{minutes:.3g}", (minutes, place + shift), color=GREY, **form)
    axes.set_xscale("log")
    number_decades(axes.xaxis)
    axes.margins(x=0.15)
    axes.tick_params(left=False)
    axes.set_xlabel("minutes to 3.28 on FineWeb, eight H100")
    for height, name, colour in ((0.10, "published, in PyTorch", TRAIN), (0.05, "predicted, in JAX", VAL)):
        axes.text(0.995, height, name, color=colour, transform=axes.transAxes, ha="right")
