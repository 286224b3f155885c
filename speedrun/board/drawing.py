"""The style of all pictures. Equal content gives equal bytes. matplotlib is imported on use."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedrun.base.errors import translate_os_errors
from speedrun.base.wholefile import write_whole

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
