"""The ladder of recipes: what each rung gains on a small track, beside the published and the predicted minutes."""

from typing import TYPE_CHECKING, Any

from speedrun.board.drawing import DASHED, GREY, INK, TARGET, TRAIN, VAL, canvas, number_decades, svg
from speedrun.board.figures import Context, Rung
from speedrun.ground import track as tracks
from speedrun.ledger.statistics import mean_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRACK = "smoke-cpu"  #: of the losses


def draw(context: Context) -> bytes:
    """Draw the ladder; return an SVG."""
    rungs = context.rungs
    with canvas(9.5, 0.8 + 0.62 * len(rungs)) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _draw_losses(left, context.ladder)
        _draw_minutes(right, [(published, predicted) for _, published, predicted in rungs])
        left.set_yticks(range(len(rungs)), [rung.recipe for rung in context.ladder])
        left.set_ylim(len(rungs) - 0.4, -0.9)
        return svg(figure)


def _draw_losses(axes: "Axes", rungs: tuple[Rung, ...]) -> None:
    rules = tracks.load(_TRACK)
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
    axes.set_xlabel(f"loss at the end on {rules.id} (nats per token), 95 % interval; dashed: {target:g}")
    axes.set_title("the same budget of tokens", loc="left", fontsize=10, color=INK)


def _draw_minutes(axes: "Axes", rungs: list[tuple[float, float]]) -> None:
    form: dict[str, Any] = {"va": "center", "fontsize": 8, "xytext": (3, 0), "textcoords": "offset points"}
    for place, (published, predicted) in enumerate(rungs):
        for shift, minutes, colour in ((-0.18, published, TRAIN), (0.18, predicted, VAL)):
            axes.barh(place + shift, minutes, 0.32, color=colour, zorder=2)
            axes.annotate(f"{minutes:.3g}", (minutes, place + shift), color=GREY, **form)
    axes.set_xscale("log")
    number_decades(axes.xaxis)
    axes.margins(x=0.15)
    axes.tick_params(left=False)
    axes.set_xlabel("minutes to 3.28 on FineWeb, eight H100")
    for height, name, colour in ((0.10, "published, in PyTorch", TRAIN), (0.05, "predicted, in JAX", VAL)):
        axes.text(0.995, height, name, color=colour, transform=axes.transAxes, ha="right")
