"""The summary of an experiment: a table of text, and the plot of each arm's effect around a line of no effect."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from speedrun.board.drawing import GREY, INK, PAPER, VAL, canvas, in_font, label, save
from speedrun.lab.effects import LEVEL, NEGLIGIBLE, Effect, Finding, Summary
from speedrun.lab.proof import RATE_FROM
from speedrun.lab.trials import Kind

TITLES: dict[Kind, str] = {
    "features": "without each feature",
    "ladder": "each recipe against its parent",
    "sweep": "with other settings",
}
_HEAD = ("arm", "loss (nats)", "train time", "both (equivalent s)", "p (Holm)", "verdict")
_NOTE = (
    f"paired by seed, 95 % intervals; resolved means Holm's p below {LEVEL:g}; a barnacle is worth less than "
    f"{NEGLIGIBLE:.0%} of the time"
)


def table(found: Summary) -> list[str]:
    """Return the lines: one for each arm, the price of a nat, and what the fresh seeds show."""
    rows = [_HEAD, *(_row(one, found.kind) for one in found.findings)]
    if found.confirmation is not None:
        arm, *rest = _row(found.confirmation, found.kind)
        rows.append((f"{arm}, fresh seeds", *rest))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [*lines, *_price(found), f"best    {_best(found)}", f"note    {found.standing}: {_NOTE}"]


def count(number: int, noun: str) -> str:
    """Return a number and its noun: `2 runs`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _row(one: Finding, kind: Kind) -> tuple[str, ...]:
    time = "-"
    if (effect := one.log_time) is not None:
        mean, low, high = (100 * math.expm1(x) for x in (effect.mean, effect.low, effect.high))
        time = f"{mean:+.1f} % [{low:+.1f}, {high:+.1f}]"
    p = "-" if one.together_s is None else f"{one.together_s.adjusted_p:.2g}"
    loss, together = _interval(one.loss, ".4f"), _interval(one.together_s, ".2f")
    return one.arm, loss, time, together, p, _verdict(one, kind)


def _interval(effect: Effect | None, digits: str) -> str:
    if effect is None:
        return "-"
    return f"{effect.mean:+{digits}} [{effect.low:+{digits}}, {effect.high:+{digits}}]"


def _verdict(one: Finding, kind: Kind) -> str:
    """Return the verdict in words; with `features`, the arm is the recipe without the feature."""
    if one.verdict == "non-finite":
        return f"{count(one.num_non_finite, 'run')} became non-finite"
    if one.verdict == "unresolved":
        return f"not resolvable with {count(len(one.seeds), 'seed')}{_resolved_alone(one)}"
    if one.verdict == "equal":
        return ("barnacle" if kind == "features" else "no difference") + ": interval covers zero"
    if kind == "features":
        return "worth it" if one.verdict == "worse" else "harmful: better without it"
    return f"{one.verdict} than {one.against!r}"


def _resolved_alone(one: Finding) -> str:
    """Return whether loss or time is resolved by itself: noise in the time does not blur the loss."""
    alone = [
        f"{what} alone is: {'better' if effect.mean < 0 else 'worse'}"
        for what, effect in (("loss", one.loss), ("time", one.log_time))
        if effect is not None and effect.adjusted_p < LEVEL
    ]
    return f" ({', '.join(alone)})" if alone else ""


def _price(found: Summary) -> list[str]:
    """Return the price of a nat for each arm that others are compared with."""
    prices = {one.against: one.s_per_nat for one in found.findings if one.s_per_nat is not None}
    lines = [f"price   {s_per_nat:.1f} s a nat for {name!r}" for name, s_per_nat in prices.items()]
    return [*lines, f"price   {RATE_FROM}"] if lines else []


def _best(found: Summary) -> str:
    if found.winner is None:
        return "no arm gains anything; nothing to confirm"
    if (fresh := found.confirmation) is None:
        return f"{found.winner}: not confirmed, because no fresh seeds ran"
    confirmed = "confirmed" if found.confirmed else "NOT confirmed"
    return f"{found.winner}: {confirmed} by {count(len(fresh.seeds), 'fresh seed')}"


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
