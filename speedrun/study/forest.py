"""The forest plot of an experiment: what each arm changes, with intervals, around a line that says "nothing".

The same summary gives the same bytes. matplotlib is imported when something is drawn.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from speedrun.board.drawing import GREY, INK, STYLE, VAL, in_font, save
from speedrun.study.effects import LEVEL, Effect, Finding, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW_INCHES = 0.42
_MOST_NAME = 44  #: characters


class _Panel(NamedTuple):
    """One measure."""

    title: str
    unit: str
    of: Callable[[Finding], Effect | None]
    scaled: Callable[[float], float]
    digits: int


_PANELS = (
    _Panel("loss", "nats per token", lambda found: found.loss, lambda x: x, 4),
    _Panel("train time", "%", lambda found: found.log_time, lambda x: 100 * math.expm1(x), 1),
    _Panel("both, as time", "equivalent seconds", lambda found: found.together_s, lambda x: x, 2),
)


def forest(summary: Summary, folder: Path, title: str) -> list[Path]:
    """Draws the effects into `plots/forest.svg` and `plots/forest.png`.

    Returns:
        The files written; none if no arm has two pairs of runs.
    """
    rows = [found for found in summary.findings if found.together_s is not None]
    rows.sort(key=lambda found: found.together_s.mean if found.together_s else 0.0)
    fresh = summary.confirmation
    if fresh is not None and fresh.together_s is not None:
        rows.append(fresh)
    if not rows:
        return []
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 1.7 + _ROW_INCHES * len(rows)), layout="constrained")
        axes = figure.subplots(1, len(_PANELS), sharey=True)
        for panel, one in zip(_PANELS, axes, strict=True):
            _draw(one, panel, rows)
        _name(axes[0], rows, fresh)
        figure.suptitle(in_font(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.supxlabel(in_font(_footnote(summary)), x=0.01, ha="left", fontsize=8.5, color=GREY)
        return save(figure, folder / "plots", "forest")


def _draw(axes: "Axes", panel: _Panel, rows: Sequence[Finding]) -> None:
    """A row an arm, the first one on top; hollow where nothing is resolved."""
    from matplotlib.patheffects import withStroke

    axes.axvline(0, color=GREY, linewidth=1, zorder=1)
    for place, found in enumerate(rows):
        effect = panel.of(found)
        if effect is None:
            continue
        mean, low, high = map(panel.scaled, (effect.mean, effect.low, effect.high))
        resolved = effect.adjusted_p < LEVEL
        colour = VAL if resolved else GREY
        axes.plot((low, high), (place, place), color=colour, linewidth=1.8, solid_capstyle="butt", zorder=2)
        face = colour if resolved else "white"
        axes.plot(mean, place, "o", color=colour, markerfacecolor=face, markersize=6.5, zorder=3)
        axes.annotate(
            f"{mean:+.{panel.digits}f}",
            (mean, place),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            color=colour,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )
    axes.set_title(panel.title, fontsize=10, color=INK)
    axes.set_xlabel(panel.unit)
    axes.margins(x=0.08)
    axes.locator_params(axis="x", nbins=5)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _name(axes: "Axes", rows: Sequence[Finding], fresh: Finding | None) -> None:
    names = [in_font(found.arm[:_MOST_NAME]) + (", fresh seeds" if found is fresh else "") for found in rows]
    axes.set_yticks(range(len(rows)), names)
    if fresh is not None and rows[-1] is fresh and len(rows) > 1:
        for one in axes.figure.axes:
            one.axhline(len(rows) - 1.5, color=GREY, linewidth=0.6, linestyle=(0, (2, 3)), zorder=1)


def _footnote(summary: Summary) -> str:
    seeds = max(len(found.seeds) for found in summary.findings)
    return (
        f"Left of the line: better. Paired over {seeds} seeds, 95 % intervals; filled: resolved after Holm. "
        f"{summary.standing.capitalize()}."
    )
