"""How all pictures look, and how they are written: the same content gives the same bytes, without dates.

matplotlib is imported when something is drawn.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedrun.ground.errors import refusals_told
from speedrun.ground.wholefile import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, GREY, TRAIN, VAL, TARGET = "#1c2733", "#7a8691", "#93b1cf", "#1f5fa8", "#c8452f"
DASHED = (0, (5, 3))
#: Of any number; beyond it, what draws the pictures breaks down.
MOST = 1e15
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


@contextmanager
def canvas(width: float, height: float) -> Iterator["Figure"]:
    """An empty picture of so many inches; to be written inside the block, where its style holds."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", folder: Path, name: str) -> list[Path]:
    """Writes a picture into a folder, which is made, as SVG and as PNG; returns both, in this order."""
    with refusals_told(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    write_whole(paths[0], svg(figure))
    png = io.BytesIO()
    figure.savefig(png, dpi=160, metadata={"Software": None})
    write_whole(paths[1], png.getbuffer())
    return paths


def svg(figure: "Figure") -> bytes:
    """A picture as SVG."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def title(axes: "Axes", text: str) -> None:
    """A line above a picture."""
    axes.set_title(in_font(text), loc="left", fontsize=11, fontweight="bold", pad=14)


def key(axes: "Axes", *names: tuple[str, str]) -> None:
    """Names with their colours, below each other in the upper right corner."""
    for number, (name, colour) in enumerate(names):
        place = 0.995, 0.985 - 0.06 * number
        axes.text(*place, in_font(name), color=colour, transform=axes.transAxes, ha="right", va="top")


def level(axes: "Axes", value: float, text: str, colour: str) -> None:
    """A horizontal line with its name at the left end, where the curves are far above it."""
    axes.axhline(value, color=colour, linewidth=1, linestyle=DASHED, zorder=2)
    axes.annotate(
        text,
        (0, value),
        xycoords=("axes fraction", "data"),
        xytext=(5, 3),
        textcoords="offset points",
        color=colour,
        fontsize=9,
    )


def number_decades(axis: "Axis") -> None:
    """Plain numbers at 1, 2 and 5 of each decade of a logarithmic axis; its own words would be raw mathematics."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def in_font(text: str) -> str:
    """The font has few glyphs, and a stranger's text may be long."""
    return text[:120].encode("ascii", "backslashreplace").decode()
