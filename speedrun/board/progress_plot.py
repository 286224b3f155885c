"""The pictures of a board: how fast its records became, and how they trade cost against loss.

The cost is what the track ranks by: train time or steps.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speedrun.base import track as tracks
from speedrun.board import drawing
from speedrun.board.drawing import DASHED, GREY, MOST, PAPER, TARGET, TRAIN, VAL
from speedrun.board.standings import Board, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_DATES = 6
_MOST_COSTS = 6
_MOST_NAMED = 12
_MOST_NAME = 32  #: characters
_LOG_FROM = 10.0  #: ratio of the longest time to the shortest from which the scale is logarithmic


def pictures(board: Board) -> dict[str, bytes]:
    """Draw the history and the trade-off of each track that has a result; return SVGs by caption."""
    drawn: dict[str, bytes] = {}
    for name in sorted({row.track for row in board.rows}):
        rows = results(board.of(name))
        if any(row.standing != "missed" for row in rows):
            caption = "each record that reached the target; the line is the best qualified (filled) one"
            with drawing.canvas(6.0, 3.2) as figure:
                _draw_history(figure.add_subplot(), rows)
                drawn[f"{name}: {_unit(rows)[0]} of {caption}"] = drawing.svg(figure)
        if rows:
            with drawing.canvas(6.0, 3.2) as figure:
                _draw_pareto(figure, name, rows)
                drawn[f"{name}: loss against {_unit(rows)[0]}, with the Pareto front"] = drawing.svg(figure)
    return drawn


def pareto(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw loss against cost into `pareto-<track>-<version>.svg` and `.png` for each track; return the paths."""
    paths: list[Path] = []
    for name in sorted({row.track for row in rows}):
        with drawing.canvas(8.0, 4.5) as figure:
            _draw_pareto(figure, name, sorted((row for row in rows if row.track == name), key=_place))
            paths += drawing.save(figure, folder, f"pareto-{name.replace('@', '-')}")
    return paths


def results(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with a time and a loss that no check refused and that can be drawn."""

    def is_drawable(row: Row) -> bool:
        numbers = row.train_time_s, row.val_loss, row.num_steps
        half_widths = row.train_time_half_width_s or 0.0, row.val_loss_half_width or 0.0
        return all(number is not None and abs(number) <= MOST for number in (*numbers, *half_widths))

    return [row for row in rows if row.standing != "refused" and is_drawable(row)]


def _qualifies(row: Row) -> bool:
    return row.standing == "qualified"


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Return the Pareto front, fastest first: rows not dominated in cost and loss."""
    best: list[Row] = []
    for row in sorted(rows, key=_place):
        if not best or _place(row)[1] < _place(best[-1])[1]:
            best.append(row)
    return best


def _place(row: Row) -> tuple[float, float]:
    return row.cost or 0.0, row.val_loss or 0.0


def _unit(rows: Sequence[Row]) -> tuple[str, str, list[float]]:
    """Return the name of the rows' cost, how it is written, and its half widths. Equal runs take equal steps."""
    if rows[0].rules.rank_by == "steps":
        return "steps", "{:,.0f}", [0.0] * len(rows)
    return "train time (s)", "{:.1f} s", [row.train_time_half_width_s or 0.0 for row in rows]


def progress(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """Return place and cost of each qualified row that beats all qualified rows before it."""
    steps: list[tuple[int, float]] = []
    for place, row in enumerate(rows):
        if _qualifies(row) and (not steps or _place(row)[0] < steps[-1][1]):
            steps.append((place, _place(row)[0]))
    return steps


def _draw_history(axes: "Axes", rows: Sequence[Row]) -> None:
    """Draw a point for each record that reached the target, by date, filled where qualified, and the best so far."""
    from matplotlib.ticker import MaxNLocator

    rows = sorted((row for row in rows if row.standing != "missed"), key=lambda row: row.moment)
    places, costs = range(len(rows)), [_place(row)[0] for row in rows]
    name, form, half_widths = _unit(rows)
    steps = progress(rows)
    if steps:
        line = [*steps, (len(rows) - 1, steps[-1][1])]
        axes.step(*zip(*line, strict=True), where="post", color=TRAIN, linewidth=1.2, zorder=1)
    _points(axes, rows, places, costs, half_widths, [0.0] * len(rows))
    bests = [place for place, _ in steps]
    for place in places if len(rows) <= _MOST_COSTS else bests[-_MOST_COSTS:]:
        drawing.label(axes, (place, costs[place]), form.format(costs[place]), (6, 5))
    dates: dict[float, str] = {place: row.date for place, row in enumerate(rows)}
    axes.xaxis.set_major_locator(MaxNLocator(_MOST_DATES, integer=True))
    axes.xaxis.set_major_formatter(lambda place, _: dates.get(place, ""))
    axes.tick_params(axis="x", rotation=20)
    axes.set_ylim(bottom=0, top=1.25 * max(c + h for c, h in zip(costs, half_widths, strict=True)))
    axes.margins(x=0.15)
    axes.set_ylabel(name)


def _draw_pareto(figure: "Figure", track: str, rows: Sequence[Row]) -> None:
    """Draw a point with intervals for each record, filled where qualified, and the Pareto front; names to the right."""
    axes, best = figure.add_subplot(), frontier(rows)
    axes.step(*zip(*map(_place, best), strict=True), where="post", color=TRAIN, linewidth=1.2, zorder=1)
    costs, losses = zip(*map(_place, rows), strict=True)
    loss_half_widths = [row.val_loss_half_width or 0.0 for row in rows]
    name, _, half_widths = _unit(rows)
    _points(axes, rows, costs, losses, loss_half_widths, half_widths)
    target = tracks.load(track.rpartition("@")[0]).target.loss
    axes.axhline(target, color=TARGET, linewidth=1, linestyle=DASHED, zorder=2)
    if min(costs) > 0 and max(costs) > _LOG_FROM * min(costs):
        axes.set_xscale("log")
        drawing.number_decades(axes.xaxis)
    drawing.title(axes, f"{track} (filled: qualified)")
    axes.margins(x=0.12, y=0.15)
    axes.set_xlabel(f"mean {name}")
    axes.set_ylabel("mean loss (nats per token)")
    axes.ticklabel_format(axis="y", useOffset=False)
    _note(axes, 0, f"target {target:g}", TARGET)
    named = sorted(rows, key=_place) if len(rows) <= _MOST_NAMED else best
    for number, row in enumerate(named[-_MOST_NAMED:], 1):
        name = row.path.rpartition("/")[2][:_MOST_NAME]
        _note(axes, number, f"{number}  {name}", VAL if _qualifies(row) else GREY)
        drawing.label(axes, _place(row), str(number), (6, 5))


def _points(axes: "Axes", rows: Sequence[Row], *numbers: Sequence[float]) -> None:
    """Draw a point for each row, filled where qualified; the numbers are x, y and the half widths in y and x."""
    form = {"color": VAL, "markersize": 4, "elinewidth": 1, "capsize": 2, "zorder": 3}
    for face, filled in ((VAL, True), (PAPER, False)):
        shown = [place for place, row in enumerate(rows) if _qualifies(row) == filled]
        if shown:
            at = [[one[place] for place in shown] for one in numbers]
            axes.errorbar(*at, fmt="o", markerfacecolor=face, **form)


def _note(axes: "Axes", line: int, text: str, colour: str) -> None:
    """Write a numbered line to the right of the axes."""
    place, shown = (1.03, 1.0 - 0.075 * line), drawing.in_font(text)
    axes.text(*place, shown, transform=axes.transAxes, va="top", fontsize=8.5, color=colour)
