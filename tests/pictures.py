"""Draws docs/ladder.svg and history.svg from records/context.toml and records/leaderboard.json.

python tests/pictures.py    # after `speedrun leaderboard build`
"""

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import svg_pictures
from msgspec import Meta

from speedrun.base import track as tracks
from speedrun.base.atomic_files import write_whole
from speedrun.board import plots
from speedrun.board.leaderboard import (
    PROVEN,
    Board,
    PastRecord,
    Published,
    Row,
    read_built,
    read_context,
)
from speedrun.board.plots import DASHED, GREY, INK, PAPER, TARGET, TRAIN, VAL
from speedrun.record.statistics import mean_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parent.parent
MAIN = ("h100", 8)  #: kind and number of devices of the published records
MAIN_TRACK = "main-8xh100@2"
LADDER_TRACK = "smoke-cpu"  #: of the losses of the ladder


class Rung(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A recipe of the ladder, oldest first."""

    recipe: str
    records: Annotated[str, Meta(pattern=r"^(\d+-)?\d+$")]  #: published ones that it implements
    #: At the end of runs on a small track, by seed.
    losses: Annotated[tuple[float, ...], Meta(min_length=2)]


class Prediction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The output of `speedrun plan` for a recipe."""

    recipe: str
    kind: str  #: a key of `accelerators.DEVICES`
    num_devices: int
    total_s: float
    step_ms: float  #: mean
    memory_gb: float  #: 10^9 bytes, on one device
    mfu: float  #: of the first stage


class Figures(msgspec.Struct, frozen=True):
    """The tables of context.toml that pages and pictures state."""

    history: tuple[PastRecord, ...]
    ladder: tuple[Rung, ...]
    predicted: tuple[Prediction, ...]


def read_figures() -> Figures:
    """Read them."""
    return msgspec.convert(msgspec.to_builtins(read_context(ROOT / "records")), Figures)


def rungs(context: Figures) -> list[tuple[str, float, float]]:
    """Return each recipe of the ladder with its published and its predicted minutes on eight H100."""
    published = {one.record: one.minutes for one in context.history}
    predicted = {(one.recipe, one.kind, one.num_devices): one.total_s / 60 for one in context.predicted}
    last = {rung.recipe: int(rung.records.rpartition("-")[2]) for rung in context.ladder}
    return [(recipe, published[record], predicted[recipe, *MAIN]) for recipe, record in last.items()]


def outputs() -> dict[Path, bytes]:
    """Return the pictures by path."""
    context, board = read_figures(), read_built(ROOT / "records")
    assert board is not None, "run 'speedrun leaderboard build' first"
    history, ladder = draw_history(context.history, board), draw_ladder(context)
    return {ROOT / "docs" / "history.svg": history, ROOT / "docs" / "ladder.svg": ladder}


# --- the ladder: what each recipe gains on a small track, beside the published and the predicted minutes ----


def draw_ladder(context: Figures) -> bytes:
    """Draw the ladder; return an SVG."""
    ladder = context.ladder
    with plots.canvas(9.5, 0.8 + 0.62 * len(ladder)) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _draw_losses(left, ladder)
        _draw_minutes(right, [minutes for _, *minutes in rungs(context)])
        left.set_yticks(range(len(ladder)), [rung.recipe for rung in ladder])
        left.set_ylim(len(ladder) - 0.4, -0.9)
        return svg_pictures.svg(figure)


def _draw_losses(axes: "Axes", rungs: tuple[Rung, ...]) -> None:
    rules = tracks.load(LADDER_TRACK)
    target = rules.target.loss
    axes.axvline(target, color=TARGET, linewidth=1, linestyle=DASHED, zorder=2)
    bars: dict[str, Any] = {"fmt": "o", "color": VAL, "markersize": 5, "capsize": 3, "zorder": 3}
    text: dict[str, Any] = {"va": "center", "fontsize": 8, "textcoords": "offset points"}
    for place, rung in enumerate(rungs):
        interval = mean_interval(rung.losses)
        assert interval is not None, "the type asks for two losses"
        axes.errorbar(interval.mean, place, xerr=interval.half_width, **bars)
        reached = sum(loss <= target for loss in rung.losses)
        said = f"{reached} of {len(rung.losses)} runs reach it" if reached else "not reached"
        axes.annotate(said, (interval.high, place), (6, 0), **text)
    axes.set_xlim(right=max(loss for rung in rungs for loss in rung.losses) + 0.5)
    axes.set_xlabel(f"loss on {rules.id} (nats per token), 95 % interval")
    axes.set_title(f"the same budget of tokens; dashed: {target:g}", loc="left", fontsize=10, color=INK)


def _draw_minutes(axes: "Axes", minutes: list[list[float]]) -> None:
    form: dict[str, Any] = {"va": "center", "fontsize": 8, "xytext": (6, 0), "textcoords": "offset points"}
    for place, (published, predicted) in enumerate(minutes):
        # Points: a bar has no length on a logarithmic axis, which has no zero.
        for shift, time, colour in ((-0.18, published, TRAIN), (0.18, predicted, VAL)):
            axes.plot(time, place + shift, "o", color=colour, markersize=5, zorder=2)
            axes.annotate(f"{time:.3g}", (time, place + shift), color=GREY, **form)
    axes.set_xscale("log")
    svg_pictures.number_decades(axes.xaxis)
    axes.margins(x=0.15)
    axes.tick_params(left=False)
    axes.set_xlabel("minutes to 3.28 on FineWeb, eight H100")
    for height, name, colour in ((0.10, "published, in PyTorch", TRAIN), (0.05, "predicted, in JAX", VAL)):
        axes.text(0.995, height, name, color=colour, transform=axes.transAxes, ha="right")


# --- the history: minutes to the target by date, with newer claims and our records --------------------------


def draw_history(history: Sequence[PastRecord], board: Board) -> bytes:
    """Draw published records with claims and our qualified records of `MAIN_TRACK`; return an SVG."""
    ours = [row for row in board.of(MAIN_TRACK) if row.status in PROVEN and row.train_time_s]
    claims = [one for one in board.published if one.claim and one.track == MAIN_TRACK.partition("@")[0]]
    claims = [one for one in claims if not one.rules.startswith("impossible")]  # by our rules: no goal here
    with plots.canvas(8.0, 4.2) as figure:
        _draw_history(figure.add_subplot(), sorted(history, key=lambda one: one.date), claims, ours)
        return svg_pictures.svg(figure)


def _draw_history(
    axes: "Axes", history: Sequence[PastRecord], claims: Sequence[Published], ours: Sequence[Row]
) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num

    days, minutes = date2num([one.date for one in history]), [one.minutes for one in history]
    axes.step(days, minutes, where="post", color=TRAIN, linewidth=1.2, zorder=1)
    axes.plot(days, minutes, "o", color=VAL, markersize=3, zorder=3)
    plain: dict[str, Any] = {"path_effects": (), "fontsize": 9}  # an outline would triple the file
    for day, one in zip(days, history, strict=True):
        text = f"{one.recipe or one.label}, {one.minutes:.3g}"
        if one.recipe:
            ring = {"color": TARGET, "markerfacecolor": PAPER, "markersize": 8, "markeredgewidth": 1.5}
            axes.plot(day, one.minutes, "o", zorder=4, **ring)
            form = {"offset": (-2, -7), "ha": "right", "va": "top", "color": TARGET}
            plots.label(axes, (day, one.minutes), text, **form, **plain)
        elif one.label:
            last: dict[str, Any] = {"offset": (4, -7), "ha": "right", "va": "top"}
            form = last if one is history[-1] else {"offset": (6, 4)}
            plots.label(axes, (day, one.minutes), text, **form, **plain)
    for claim in claims:
        day = date2num(date.fromisoformat(claim.date))
        axes.plot(day, claim.minutes, "o", color=VAL, markerfacecolor=PAPER, markersize=4, zorder=3)
    if claims:
        best = min(claims, key=lambda one: one.minutes)
        place = float(date2num(date.fromisoformat(best.date))), best.minutes
        plots.label(axes, place, f"{best.status}: {best.minutes:.3g}", (8, -22), ha="right", **plain)
    for row in ours:
        day, time_min = float(date2num(row.moment)), (row.train_time_s or 0.0) / 60
        axes.plot(day, time_min, "D", color=TARGET, markersize=7, zorder=4)
        plots.label(axes, (day, time_min), f"{time_min:.3g}", (6, 4), color=TARGET, **plain)
    since = (("small and hollow: claimed since, not against our rules, not verified", VAL),) if claims else ()
    own = "qualified here, in JAX" if ours else "implemented here, in JAX; no qualified run yet"
    plots.key(axes, ("records in PyTorch (modded-nanogpt)", VAL), *since, (own, TARGET))
    axes.set_yscale("log")
    svg_pictures.number_decades(axes.yaxis)
    axes.set_ylim(bottom=0.5 * axes.dataLim.ymin)
    axes.xaxis.set_major_locator(locator := AutoDateLocator(maxticks=8))
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, show_offset=False))
    axes.set_ylabel("minutes to a loss of 3.28")
    plots.title(axes, "The speedrun on eight H100: minutes to a validation loss of 3.28 on FineWeb")


if __name__ == "__main__":
    for path, content in outputs().items():
        write_whole(path, content)
