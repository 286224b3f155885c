"""What the pictures of the documentation are, beyond those of records: SVG with colours for dark mode."""

import io
from typing import TYPE_CHECKING

from speedrun.board.plots import GREY, INK, PAPER, TARGET, TRAIN, VAL

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_DARK = {
    INK: "#e3e9ef",
    GREY: "#98a4af",
    TRAIN: "#5a82b0",
    VAL: "#7ab6f5",
    TARGET: "#ff8b73",
    PAPER: "#12181e",
}


def svg(figure: "Figure") -> bytes:
    """Return a figure as SVG, with a style sheet for dark mode."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    paints = [(paint, *colours) for colours in _DARK.items() for paint in ("fill", "stroke")]
    swaps = "".join(f'[style*="{paint}: {a}"]{{{paint}:{b}!important}}' for paint, a, b in paints)
    style = f"<defs>\n  <style>@media(prefers-color-scheme:dark){{{swaps}}}</style>"
    return file.getvalue().replace(b"<defs>", style.encode(), 1)


def number_decades(axis: "Axis") -> None:
    """Write plain numbers at 1, 2 and 5 of each decade of a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())
