"""The pictures of a record, and their style. Equal content gives equal bytes. matplotlib is imported on use."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, get_args

from speedrun.base.atomic_files import write_whole
from speedrun.base.console import quantiles_ms
from speedrun.base.errors import UsageError, translate_os_errors, unknown
from speedrun.board.ghost import same_batches
from speedrun.record.logged_run import Run, loss_of
from speedrun.record.reader import Record, load

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, TRAIN, VAL, TARGET, PAPER = "#1c2733", "#6b7782", "#93b1cf", "#1f5fa8", "#c8452f", "#ffffff"
DASHED = (0, (5, 3))
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "speedrun",
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), GREY),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
}
Kind = Literal["loss", "tokens", "steps"]  #: also the names of the files
KINDS: tuple[Kind, ...] = get_args(Kind)
#: The attribute of a step on the horizontal axis, and the axis label.
_AXES = {"loss": ("train_time_s", "train time (s)"), "tokens": ("tokens_seen", "training tokens")}

_MAX_LABELS = 6
_NUM_BINS = 60
_FAR = 3.0  #: times the 95th percentile; longer steps are counted in the key and not drawn
_NARROWEST_MS = 0.01  #: half width of a histogram whose steps all take the same time
_MOST = 1e15  #: the largest number to draw; matplotlib fails far beyond it


def plot(record_dir: Path, kinds: Sequence[Kind] = ("loss",)) -> list[Path]:
    """Draw a record into `plots/<kind>.png`; return the paths."""
    for kind in {*kinds} - {*KINDS}:
        raise unknown("kind of plot", kind, KINDS)
    record = load(record_dir)
    runs = [run for run in record.runs if run.steps]
    if not runs:
        raise UsageError(f"{record_dir} holds no run with a step; 'speedrun validate {record_dir}' says why")
    for run in runs:
        for number in (*(step.loss for step in run.steps), *map(loss_of, run.vals)):
            if not abs(number) <= _MOST:  # neither is NaN
                raise UsageError(f"{run.folder}: {number:g} cannot be drawn; need numbers below {_MOST:g}")
    paths: list[Path] = []
    for kind in kinds:
        with canvas(8.0, 4.5) as figure:
            axes = figure.add_subplot()
            if kind == "steps":
                _draw_steps(axes, runs)
            else:
                _draw_loss(axes, record, runs, *_AXES[kind])
            paths.append(save(figure, record_dir / "plots", kind))
    return paths


def _draw_loss(axes: "Axes", record: Record, runs: Sequence[Run], of: str, name: str) -> None:
    """Draw losses against the attribute `of` of steps."""
    from matplotlib.ticker import EngFormatter

    same = same_batches(runs)
    alike = same if len(same) > 1 else []
    if alike:
        _band(axes, alike, of)
    for run in runs:
        if run not in alike:
            at, losses = [getattr(step, of) for step in run.steps], [step.loss for step in run.steps]
            axes.plot(at, losses, color=GREY if alike else TRAIN, linewidth=0.7, alpha=0.8, zorder=1)
    # No line through the validations: there are few, and the train loss shows what happens between them.
    places, losses = zip(*chain(*(_vals(run, of) for run in runs)), strict=True)
    size, alpha = (3, 0.6) if alike else (5, 1.0)
    axes.plot(places, losses, "o", color=VAL, markersize=size, alpha=alpha, clip_on=False, zorder=3)
    if record.track is not None:
        target = record.track.target
        level(axes, target.loss, f"target {target.loss:g}", TARGET)
        if target.entropy_rate:
            level(axes, target.entropy_rate, f"entropy rate {target.entropy_rate:.2f}", GREY)
    axes.set_xlim(left=0)
    axes.margins(x=0.02)
    if of == "tokens_seen":
        axes.xaxis.set_major_formatter(EngFormatter())
    axes.set_xlabel(name)
    axes.set_ylabel("loss (nats per token)")
    title(axes, _headline(runs))
    most = max(runs, key=lambda run: len(run.vals))
    of_runs = zip(*(_vals(run, of) for run in alike or [most]), strict=False)
    means = [(fmean(place for place, _ in each), fmean(loss for _, loss in each)) for each in of_runs]
    if alike:
        axes.plot(*zip(*means, strict=True), "D", color=VAL, markeredgecolor=PAPER, clip_on=False, zorder=4)
    _label(axes, means, record.track.target.loss if record.track else 0.0)
    train = f"train: mean and range of {len(alike)} runs" if alike else "train"
    others = [("other runs", GREY)] if 0 < len(alike) < len(runs) else []
    val = "validation: each run, and their mean" if alike else "validation"
    key(axes, (train, TRAIN), *others, (val, VAL))


def _band(axes: "Axes", runs: Sequence[Run], of: str) -> None:
    """Draw the mean and range of each step's loss over the runs, at the mean place of the step."""
    steps = [*zip(*(run.steps for run in runs), strict=True)]
    at = [fmean(getattr(step, of) for step in same) for same in steps]
    losses = [[step.loss for step in same] for same in steps]
    low, high = [min(same) for same in losses], [max(same) for same in losses]
    axes.fill_between(at, low, high, color=TRAIN, alpha=0.5, linewidth=0, zorder=1)
    axes.plot(at, [fmean(same) for same in losses], color=TRAIN, linewidth=1.0, zorder=1.5)


def _vals(run: Run, of: str) -> list[tuple[float, float]]:
    """Return place and loss of the validations; the one before step s is at the end of step s - 1."""
    ends = [getattr(at, of) for at in (run.origin, *run.steps)]
    places = [(val.step - run.origin.step, val) for val in run.vals]
    return [(ends[place], loss_of(val)) for place, val in places if 0 <= place < len(ends)]


def _label(axes: "Axes", points: Sequence[tuple[float, float]], target: float) -> None:
    """Write the losses at some points, including the last: below a point that is not above the target's line."""
    last = len(points) - 1
    every = max(1, -(-last // (_MAX_LABELS - 1)))
    for number in range(last, -1, -every):
        digits, weight = (4, "bold") if number == last else (2, "normal")
        offset, side = ((0, 8), "center") if number else ((8, 0), "left")  # the first point is on the axis
        offset = (0, -13) if points[number][1] <= target else offset
        text = f"{points[number][1]:.{digits}f}"
        label(axes, points[number], text, offset, ha=side, fontweight=weight, fontsize=9)


def _draw_steps(axes: "Axes", runs: Sequence[Run]) -> None:
    """Draw a histogram of the steps of all runs, with median and 95th percentile."""
    times_s = [seconds for run in runs for seconds in run.step_s]
    if min(times_s) < 0:
        raise UsageError(f"a step takes {min(times_s):g} s; need a time of at least 0")
    p50_ms, p95_ms, max_ms = quantiles_ms(times_s)
    shown_ms = [1e3 * seconds for seconds in times_s if 1e3 * seconds <= _FAR * p95_ms]
    ends_ms = min(shown_ms) - _NARROWEST_MS, max(shown_ms) + _NARROWEST_MS
    axes.hist(shown_ms, bins=_NUM_BINS, range=ends_ms, color=TRAIN, zorder=1)
    for at_ms, colour in ((p50_ms, VAL), (p95_ms, TARGET)):
        axes.axvline(at_ms, color=colour, linewidth=1.2, linestyle=DASHED, zorder=2)
    names = [(f"median {p50_ms:,.1f} ms", VAL), (f"95th percentile {p95_ms:,.1f} ms", TARGET)]
    names.append((f"longest {max_ms:,.1f} ms", GREY))
    if beyond := len(times_s) - len(shown_ms):
        names.append((f"{beyond:,} of {len(times_s):,} beyond the right end", GREY))
    key(axes, *names)
    axes.set_xlabel("step time (ms)")
    axes.set_ylabel("steps")
    of = "" if len(runs) == 1 else f" of {len(runs)} runs"
    title(axes, f"{_what(runs)}: {len(times_s):,} steps{of}")


def _what(runs: Sequence[Run]) -> str:
    return f"{runs[0].start.recipe} on {runs[0].start.track}"


def _headline(runs: Sequence[Run]) -> str:
    """Return recipe, track and result in one line."""
    done = [run for run in runs if run.finished]
    if not done:
        return f"{_what(runs)}: not finished"
    mean = "" if len(done) == 1 else f", mean of {len(done)} runs"
    val, train = fmean(run.val_loss for run in done), fmean(run.train_time_s for run in done)
    return f"{_what(runs)}: {val:.4f} after {train:.1f} s{mean}"


# --- the style of all pictures


@contextmanager
def canvas(width: float, height: float) -> Iterator["Figure"]:
    """Yield an empty figure of this size in inches; its style holds inside the block."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", folder: Path, name: str) -> Path:
    """Write a figure as PNG into a folder; return its path. An SVG in a record could run code."""
    with translate_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path, png = folder / f"{name}.png", io.BytesIO()
    figure.savefig(png, dpi=160, metadata={"Software": None})
    write_whole(path, png.getbuffer())
    return path


def title(axes: "Axes", text: str) -> None:
    """Write a line above a picture."""
    axes.set_title(in_font(text), loc="left", fontsize=11, fontweight="bold", pad=14)


def key(axes: "Axes", *names: tuple[str, str]) -> None:
    """Write names in their colours into the upper right corner."""
    for number, (name, colour) in enumerate(names):
        place = 0.995, 0.985 - 0.06 * number
        axes.text(*place, in_font(name), color=colour, transform=axes.transAxes, ha="right", va="top")


def level(axes: "Axes", value: float, text: str, colour: str) -> None:
    """Draw a horizontal line with its name at the left end, where the curves are far above it."""
    axes.axhline(value, color=colour, linewidth=1, linestyle=DASHED, zorder=2)
    form: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "path_effects": ()}
    label(axes, (0, value), text, (5, 3), color=colour, fontsize=9, **form)


def label(
    axes: "Axes", place: tuple[float, float], text: str, offset: tuple[float, float], **form: Any
) -> None:
    """Write a text with an outline next to a point; the offset is in typographic points."""
    from matplotlib.patheffects import withStroke

    form = {"color": VAL, "path_effects": [withStroke(linewidth=3, foreground=PAPER)], "zorder": 5} | form
    axes.annotate(text, place, xytext=offset, textcoords="offset points", **form)


def in_font(text: str) -> str:
    """Cut a text to 120 characters, and escape those that the font may lack."""
    return text[:120].encode("ascii", "backslashreplace").decode()
