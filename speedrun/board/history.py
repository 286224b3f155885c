"""The published history of the speedrun: minutes to the target by date, with newer claims and our records."""

from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from speedrun.board.drawing import PAPER, TARGET, TRAIN, VAL, canvas, key, label, number_decades, svg, title
from speedrun.board.figures import PastRecord, Published
from speedrun.board.standings import Board, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRACK = "main-8xh100@1"


def draw(history: Sequence[PastRecord], board: Board) -> bytes:
    """Draw published records with claims and our qualified records of `TRACK`; return an SVG."""
    ours = [row for row in board.of(TRACK) if row.standing == "qualified" and row.train_time_s]
    claims = [one for one in board.published if one.claim and f"{one.track}@1" == TRACK]
    with canvas(8.0, 4.2) as figure:
        _draw(figure.add_subplot(), sorted(history, key=lambda one: one.date), claims, ours)
        return svg(figure)


def _draw(
    axes: "Axes", history: Sequence[PastRecord], claims: Sequence[Published], ours: Sequence[Row]
) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    days, minutes = [_day(one.date) for one in history], [one.minutes for one in history]
    axes.step(days, minutes, where="post", color=TRAIN, linewidth=1.2, zorder=1)
    axes.plot(days, minutes, "o", color=VAL, markersize=3, zorder=3)
    plain: dict[str, Any] = {"path_effects": (), "fontsize": 9}  # an outline would triple the file
    for day, one in zip(days, history, strict=True):
        text = f"{one.recipe or one.label}, {one.minutes:.3g}"
        if one.recipe:
            ring = {"color": TARGET, "markerfacecolor": PAPER, "markersize": 8, "markeredgewidth": 1.5}
            axes.plot(day, one.minutes, "o", zorder=4, **ring)
            label(axes, (day, one.minutes), text, (-2, -7), ha="right", va="top", color=TARGET, **plain)
        elif one.label:
            last: dict[str, Any] = {"offset": (4, -7), "ha": "right", "va": "top"}
            form = last if one is history[-1] else {"offset": (6, 4)}
            label(axes, (day, one.minutes), text, **form, **plain)
    for claim in claims:
        day = _day(date.fromisoformat(claim.date))
        axes.plot(day, claim.minutes, "o", color=VAL, markerfacecolor=PAPER, markersize=4, zorder=3)
    if claims:
        best = min(claims, key=lambda one: one.minutes)
        place = _day(date.fromisoformat(best.date)), best.minutes
        label(axes, place, f"{best.standing}: {best.minutes:.3g}", (-6, -3), ha="right", **plain)
    for row in ours:
        day, time_min = _day(row.moment), (row.train_time_s or 0.0) / 60
        axes.plot(day, time_min, "D", color=TARGET, markersize=7, zorder=4)
        label(axes, (day, time_min), f"{time_min:.3g}", (6, 4), color=TARGET, **plain)
    since = (("hollow: claimed since, not verified", VAL),) if claims else ()
    own = "qualified here, in JAX" if ours else "implemented here, in JAX; no qualified run yet"
    key(axes, ("records in PyTorch (modded-nanogpt)", VAL), *since, (own, TARGET))
    axes.set_yscale("log")
    number_decades(axes.yaxis)
    axes.set_ylim(bottom=0.7 * axes.dataLim.ymin)
    axes.xaxis.set_major_locator(locator := AutoDateLocator(maxticks=8))
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, show_offset=False))
    axes.set_ylabel("minutes to a loss of 3.28")
    title(axes, "The speedrun on eight H100: minutes to a validation loss of 3.28 on FineWeb")


def _day(moment: date) -> float:
    """Return a date as matplotlib counts it: days since 1970."""
    return float(moment.toordinal() - date(1970, 1, 1).toordinal())
