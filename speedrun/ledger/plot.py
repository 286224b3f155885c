"""Loss against train time: what a record looks like.

The same record gives the same bytes: no dates, fixed ids. matplotlib is imported when something is drawn.
"""

import io
import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from speedrun.errors import UsageError
from speedrun.ledger.board import Board, Row
from speedrun.ledger.record import Record, load
from speedrun.ledger.run import Run, loss_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GREY, TRAIN, VAL, TARGET = "#1c2733", "#7a8691", "#93b1cf", "#1f5fa8", "#c8452f"
_MAX_LABELS = 6
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "speedrun",
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


def plot(record_dir: Path) -> list[Path]:
    """Draws the record into `plots/loss.svg` and `plots/loss.png`.

    Returns:
        The files written.

    Raises:
        UsageError: if the folder is no record, or none of its runs can be read or has a step.
    """
    record = load(record_dir)
    runs = [run for run in record.runs if run.steps]
    if not runs:
        raise UsageError(f"{record_dir} holds no run with a step; 'speedrun validate {record_dir}' says why")
    import matplotlib
    from matplotlib.figure import Figure

    folder = record_dir / "plots"
    folder.mkdir(exist_ok=True)
    paths = [folder / "loss.svg", folder / "loss.png"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 4.5), layout="constrained")
        _draw(figure.add_subplot(), record, runs)
        figure.savefig(paths[0], metadata={"Date": None, "Creator": None})
        figure.savefig(paths[1], dpi=160, metadata={"Software": None})
    return paths


def history(board: Board) -> dict[str, bytes]:
    """For each track with a result, mean train time by date, with its interval: SVGs by what they show."""
    import matplotlib
    from matplotlib.figure import Figure

    pictures: dict[str, bytes] = {}
    for name in board.tracks:
        shown = [row for row in board.of(name) if row.train_time_s is not None and row.standing != "refused"]
        if not shown:
            continue
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(6.0, 3.2), layout="constrained")
            _draw_history(figure.add_subplot(), sorted(shown, key=lambda row: row.date))
            file = io.BytesIO()
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        pictures[f"{name}: mean train time of each record, with its 95 % interval"] = file.getvalue()
    return pictures


def _draw_history(axes: "Axes", rows: Sequence[Row]) -> None:
    """One point a record, in the order of dates; the best so far as a line."""
    places, times_s = range(len(rows)), [row.train_time_s or 0.0 for row in rows]
    half_widths_s = [row.train_time_half_width_s or 0.0 for row in rows]
    best_s = list(itertools.accumulate(times_s, min))
    axes.step(places, best_s, where="post", color=TRAIN, linewidth=1.2, zorder=1)
    axes.errorbar(places, times_s, half_widths_s, fmt="o", color=VAL, markersize=5, capsize=3, zorder=3)
    for place, time_s in zip(places, times_s, strict=True):
        axes.annotate(
            in_font(f"{time_s:.1f} s"), (place, time_s), xytext=(6, 6), textcoords="offset points", color=VAL
        )
    axes.set_xticks(list(places), [row.date for row in rows], rotation=20, ha="right")
    axes.set_ylim(bottom=0, top=1.25 * max(t + h for t, h in zip(times_s, half_widths_s, strict=True)))
    axes.margins(x=0.15)
    axes.set_ylabel("train time (s)")


def _draw(axes: "Axes", record: Record, runs: Sequence[Run]) -> None:
    for run in runs:
        times_s, losses = [step.train_time_s for step in run.steps], [step.loss for step in run.steps]
        axes.plot(times_s, losses, color=TRAIN, linewidth=0.7, alpha=0.8, zorder=1)
        # No line through the validations: there are few, and the train loss shows the way between them.
        axes.plot(*_vals(run), "o", color=VAL, markersize=5, clip_on=False, zorder=3)
    if record.track is not None:
        target = record.track.target
        _level(axes, target.loss, f"target {target.loss:g}", TARGET)
        if target.entropy_rate:
            _level(axes, target.entropy_rate, f"entropy rate {target.entropy_rate:.2f}", GREY)
    _label(axes, runs)
    axes.set_xlim(left=0)
    axes.margins(x=0.02)
    axes.set_xlabel("train time (s)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(in_font(_headline(runs)), loc="left", fontsize=11, fontweight="bold", pad=14)
    for height, name, colour in ((0.985, "train", TRAIN), (0.925, "validation", VAL)):
        axes.text(0.995, height, name, color=colour, transform=axes.transAxes, ha="right", va="top")


def _vals(run: Run) -> tuple[list[float], list[float]]:
    """Train time and loss of the validations: one before step s stands where step s - 1 ended."""
    ends_s = [0.0, *(step.train_time_s for step in run.steps)]
    known = [val for val in run.vals if 0 <= val.step < len(ends_s) and val.tokens > 0]
    return [ends_s[val.step] for val in known], [loss_of(val) for val in known]


def _level(axes: "Axes", loss: float, text: str, colour: str) -> None:
    """A horizontal line with its name at the left end, where the curves are far above it."""
    axes.axhline(loss, color=colour, linewidth=1, linestyle=(0, (5, 3)), zorder=2)
    axes.annotate(
        text,
        (0, loss),
        xycoords=("axes fraction", "data"),
        xytext=(5, 3),
        textcoords="offset points",
        color=colour,
        fontsize=9,
    )


def _label(axes: "Axes", runs: Sequence[Run]) -> None:
    """Writes the mean loss of the runs above some of the validations; always above the last."""
    from matplotlib.patheffects import withStroke

    points: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        for number, point in enumerate(zip(*_vals(run), strict=True)):
            points[number].append(point)
    last = len(points) - 1
    every = max(1, -(-last // (_MAX_LABELS - 1)))
    for number in range(last, -1, -every):
        times_s, losses = zip(*points[number], strict=True)
        axes.annotate(
            f"{fmean(losses):.4f}" if number == last else f"{fmean(losses):.2f}",
            (fmean(times_s), max(losses)),
            xytext=(0, 8) if number else (8, 0),
            textcoords="offset points",
            ha="center" if number else "left",  # the first one stands on the axis
            color=VAL,
            fontsize=10 if number == last else 9,
            path_effects=[withStroke(linewidth=3, foreground="white")],
            fontweight="bold" if number == last else "normal",
            zorder=4,
        )


def _headline(runs: Sequence[Run]) -> str:
    """Recipe, track and result in one line."""
    done = [run for run in runs if run.finished]
    what = f"{runs[0].file.recipe} on {runs[0].file.track}"
    if not done:
        return f"{what}: not finished"
    mean = "" if len(done) == 1 else f", mean of {len(done)} runs"
    val, train = fmean(run.val_loss for run in done), fmean(run.train_time_s for run in done)
    return f"{what}: {val:.4f} after {train:.1f} s{mean}"


def in_font(text: str) -> str:
    """The font has few glyphs, and a stranger's text may be long."""
    return text[:120].encode("ascii", "backslashreplace").decode()
