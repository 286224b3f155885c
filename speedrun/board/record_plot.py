"""The pictures of one record: loss against train time, loss against tokens, and a histogram of step times."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from speedrun.board.drawing import (
    DASHED,
    GREY,
    MOST,
    TARGET,
    TRAIN,
    VAL,
    canvas,
    keep_clear,
    key,
    label,
    level,
    number_decades,
    save,
    title,
)
from speedrun.board.ghost import same_batches
from speedrun.ground.console import quantiles_ms
from speedrun.ground.errors import UsageError
from speedrun.ground.runlog import Resume, Step
from speedrun.ledger.record import Record, load
from speedrun.ledger.run import Run, loss_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation

Kind = Literal["loss", "tokens", "steps"]  #: also the names of the files
KINDS: tuple[Kind, ...] = get_args(Kind)

_MAX_LABELS = 6
_NUM_BINS = 60
_FAR = 3.0  #: times the 95th percentile; longer steps are counted in the key and not shown
_NARROWEST_MS = 0.01  #: half width of a histogram whose steps all take the same time
_LOG_FROM = 50.0  #: ratio of the tallest bar to the shortest from which the scale is logarithmic


class _Axis(NamedTuple):
    """The horizontal axis of a loss curve."""

    of: Callable[[Step | Resume], float]
    label: str


_TIME = _Axis(lambda at: at.train_time_s, "train time (s)")


def _token_axis(most_tokens: int) -> _Axis:
    sizes = ((10**9, "billions"), (10**6, "millions"), (10**3, "thousands"))
    size, word = next(((size, f" ({word})") for size, word in sizes if most_tokens >= size), (1, ""))
    return _Axis(lambda at: at.tokens_seen / size, f"training tokens{word}")


def plot(record_dir: Path, kinds: Sequence[Kind] = ("loss",)) -> list[Path]:
    """Draw a record into `plots/<kind>.svg` and `plots/<kind>.png`; return the paths.

    The kinds are `loss` against train time, loss against `tokens`, or a histogram of `steps`.

    Raises:
        UsageError: if no run of the folder can be read and has a step, or a number is too large to draw.
    """
    record = load(record_dir)
    runs = [run for run in record.runs if run.steps]
    if not runs:
        raise UsageError(f"{record_dir} holds no run with a step; 'speedrun validate {record_dir}' says why")
    _check_drawable(runs)
    tokens = _token_axis(max(run.steps[-1].tokens_seen for run in runs))
    draw: dict[Kind, Callable[[Axes], None]] = {
        "loss": lambda axes: _draw_loss(axes, record, runs, _TIME),
        "tokens": lambda axes: _draw_loss(axes, record, runs, tokens),
        "steps": lambda axes: _draw_steps(axes, runs),
    }
    paths: list[Path] = []
    for kind in kinds:
        with canvas(8.0, 4.5) as figure:
            draw[kind](figure.add_subplot())
            paths += save(figure, record_dir / "plots", kind)
    return paths


def _check_drawable(runs: Sequence[Run]) -> None:
    for run in runs:
        facts = [(at.train_time_s, at.tokens_seen) for at in (run.origin, *run.steps)]
        losses = [step.loss for step in run.steps] + [loss_of(val) for val in run.vals if val.tokens > 0]
        for number in (*chain.from_iterable(facts), *losses):
            if not abs(number) <= MOST:  # neither is NaN
                raise UsageError(f"{run.folder}: {number:g} cannot be drawn; need numbers below {MOST:g}")


def _draw_loss(axes: "Axes", record: Record, runs: Sequence[Run], axis: _Axis) -> None:
    same = same_batches(runs)
    alike = same if len(same) > 1 else []
    if alike:
        _band(axes, alike, axis)
    for run in runs:
        if run not in alike:
            at, losses = [axis.of(step) for step in run.steps], [step.loss for step in run.steps]
            axes.plot(at, losses, color=GREY if alike else TRAIN, linewidth=0.7, alpha=0.8, zorder=1)
        # No line through the validations: there are few, and the train loss shows what happens between them.
        axes.plot(*_vals(run, axis), "o", color=VAL, markersize=5, clip_on=False, zorder=3)
    levels: list[float] = []
    if record.track is not None:
        target = record.track.target
        levels.append(target.loss)
        level(axes, target.loss, f"target {target.loss:g}", TARGET)
        if target.entropy_rate:
            levels.append(target.entropy_rate)
            level(axes, target.entropy_rate, f"entropy rate {target.entropy_rate:.2f}", GREY)
    axes.set_xlim(left=0)
    axes.margins(x=0.02)
    axes.set_xlabel(axis.label)
    axes.set_ylabel("loss (nats per token)")
    title(axes, _headline(runs))
    labels = _label_validations(axes, runs, axis)
    train = f"train: mean and range of {len(alike)} runs" if alike else "train"
    others = [("other runs", GREY)] if 0 < len(alike) < len(runs) else []
    key(axes, (train, TRAIN), *others, ("validation", VAL))
    keep_clear(axes, labels, levels)


def _band(axes: "Axes", runs: Sequence[Run], axis: _Axis) -> None:
    """Draw the mean and range of each step's loss over the runs, at the mean place of the step."""
    steps = [*zip(*(run.steps for run in runs), strict=True)]
    at = [fmean(axis.of(step) for step in same) for same in steps]
    losses = [[step.loss for step in same] for same in steps]
    low, high = [min(same) for same in losses], [max(same) for same in losses]
    axes.fill_between(at, low, high, color=TRAIN, alpha=0.5, linewidth=0, zorder=1)
    axes.plot(at, [fmean(same) for same in losses], color=TRAIN, linewidth=1.0, zorder=1.5)


def _vals(run: Run, axis: _Axis) -> tuple[list[float], list[float]]:
    """Return place and loss of the validations; one before step s is placed at the end of step s - 1."""
    ends = [axis.of(at) for at in (run.origin, *run.steps)]
    places = [(val.step - run.origin.step, val) for val in run.vals if val.tokens > 0]
    known = [(ends[place], loss_of(val)) for place, val in places if 0 <= place < len(ends)]
    return [place for place, _ in known], [loss for _, loss in known]


def _label_validations(axes: "Axes", runs: Sequence[Run], axis: _Axis) -> list["Annotation"]:
    """Write the mean loss of the runs at some of the validations, always at the last; return what may be moved."""
    points: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        for number, point in enumerate(zip(*_vals(run, axis), strict=True)):
            points[number].append(point)
    last, movable = len(points) - 1, []
    every = max(1, -(-last // (_MAX_LABELS - 1)))
    for number in range(last, -1, -every):
        places, losses = zip(*points[number], strict=True)
        point, mean = (fmean(places), max(losses)), fmean(losses)
        if number == last:
            movable.append(label(axes, point, f"{mean:.4f}", (0, 8), ha="center", fontweight="bold"))
        elif number:
            movable.append(label(axes, point, f"{mean:.2f}", (0, 8), ha="center", fontsize=9))
        else:  # the first point is on the axis
            label(axes, point, f"{mean:.2f}", (8, 0), fontsize=9)
    return movable


def _draw_steps(axes: "Axes", runs: Sequence[Run]) -> None:
    """Draw a histogram of the steps of all runs, with median and 95th percentile."""
    times_s = [seconds for run in runs for seconds in run.step_s]
    if min(times_s) < 0:
        raise UsageError(f"a step takes {min(times_s):g} s; need a time of at least 0")
    p50_ms, p95_ms, max_ms = quantiles_ms(times_s)
    most_ms = min(max_ms, _FAR * p95_ms)
    shown_ms = [1e3 * seconds for seconds in times_s if 1e3 * seconds <= most_ms]
    least_ms = min(shown_ms)
    slack_ms = 0.0 if most_ms - least_ms > _NARROWEST_MS else _NARROWEST_MS
    ends_ms = least_ms - slack_ms, most_ms + slack_ms
    counts, _, _ = axes.hist(shown_ms, bins=_NUM_BINS, range=ends_ms, color=TRAIN, zorder=1)
    tall = [float(count) for count in counts if count]
    if max(tall) > _LOG_FROM * min(tall):
        axes.set_yscale("log", nonpositive="clip")
        axes.set_ylim(bottom=0.7)
        number_decades(axes.yaxis)
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
