"""The forest plot of an experiment: the effect of each arm with its interval, around a line of no effect.

Train times are compared as log ratios: halving and doubling are equally far from the line. The same summary gives the
same bytes. matplotlib is imported when something is drawn.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from speedrun.board.drawing import GREY, INK, PAPER, VAL, canvas, in_font, label, save
from speedrun.lab.effects import LEVEL, Effect, Finding, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW_INCHES = 0.42
_MOST_NAME = 44  #: characters


class _Panel(NamedTuple):
    """One measure."""

    title: str
    unit: str
    of: Callable[[Finding], Effect | None]
    shown: Callable[[float], str]


_PANELS = (
    _Panel("loss", "nats per token", lambda found: found.loss, "{:+.4f}".format),
    _Panel("train time", "ratio, log scale", lambda found: found.log_time, lambda x: f"{math.exp(x):.3f}"),
    _Panel("both, as time", "equivalent seconds", lambda found: found.together_s, "{:+.2f}".format),
)


def forest(summary: Summary, folder: Path, title: str) -> list[Path]:
    """Draw the effects into `plots/forest.svg` and `plots/forest.png`.

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
    with canvas(10.0, 1.7 + _ROW_INCHES * len(rows)) as figure:
        axes = figure.subplots(1, len(_PANELS), sharey=True)
        for panel, one in zip(_PANELS, axes, strict=True):
            _draw(one, panel, rows)
        _number_ratios(axes[1])
        _name(axes[0], rows, fresh)
        figure.suptitle(in_font(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.supxlabel(in_font(_footnote(summary)), x=0.01, ha="left", fontsize=8.5, color=GREY)
        return save(figure, folder / "plots", "forest")


def _draw(axes: "Axes", panel: _Panel, rows: Sequence[Finding]) -> None:
    """Draw a row for each arm, the first one on top; hollow where the effect is not resolved."""
    axes.axvline(0, color=GREY, linewidth=1, zorder=1)
    for place, found in enumerate(rows):
        effect = panel.of(found)
        if effect is None:
            continue
        resolved = effect.adjusted_p < LEVEL
        colour = VAL if resolved else GREY
        ends = effect.low, effect.high
        axes.plot(ends, (place, place), color=colour, linewidth=1.8, solid_capstyle="butt", zorder=2)
        face = colour if resolved else PAPER
        axes.plot(effect.mean, place, "o", color=colour, markerfacecolor=face, markersize=6.5, zorder=3)
        # Away from the line of no effect, which a label would hide.
        form: dict[str, Any] = {"fontsize": 8.5, "color": colour, "va": "center_baseline"}
        text = panel.shown(effect.mean)
        if effect.mean < 0:
            label(axes, (effect.low, place), text, (-5, 0), ha="right", **form)
        else:
            label(axes, (effect.high, place), text, (5, 0), ha="left", **form)
    axes.set_title(panel.title, fontsize=10, color=INK)
    axes.set_xlabel(panel.unit)
    axes.margins(x=0.4)
    axes.locator_params(axis="x", nbins=5)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _number_ratios(axes: "Axes") -> None:
    """Write ratios at the ticks of an axis of natural logarithms."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_xlim()
    ratios = MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(math.exp(low), math.exp(high))
    inside = [float(ratio) for ratio in ratios if ratio > 0 and low <= math.log(ratio) <= high]
    axes.set_xticks([math.log(ratio) for ratio in inside], [f"{ratio:g}" for ratio in inside])


def _name(axes: "Axes", rows: Sequence[Finding], fresh: Finding | None) -> None:
    names = [in_font(found.arm[:_MOST_NAME]) + (", fresh seeds" if found is fresh else "") for found in rows]
    axes.set_yticks(range(len(rows)), names)
    if fresh is not None and rows[-1] is fresh and len(rows) > 1:
        for one in axes.figure.axes:
            one.axhline(len(rows) - 1.5, color=GREY, linewidth=0.6, linestyle=(0, (2, 3)), zorder=1)


def _footnote(summary: Summary) -> str:
    seeds = max(len(found.seeds) for found in summary.findings)
    return (
        f"Left of the line is better. Paired over {seeds} seeds, 95 % intervals; filled: resolved after Holm. "
        f"{summary.standing.capitalize()}."
    )
