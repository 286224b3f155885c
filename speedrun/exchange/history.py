"""The published history of the speedrun: minutes to the target by date; a picture with newer claims and our records.

The table is tab-separated, with `#` comments and one line for each record: `record`, `date`, `minutes`, `label` (shown
beside the point) and `recipe` (of this repository, if one implements the record).
"""

import csv
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from speedrun.board.drawing import PAPER, TARGET, TRAIN, VAL, canvas, key, label, number_decades, svg, title
from speedrun.board.standings import Published, Row, read_built
from speedrun.ground.errors import UsageError, translate_os_errors
from speedrun.ground.wholefile import read_regular, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRACK = "main-8xh100@1"
_Row = TypeVar("_Row", bound=msgspec.Struct)


class PastRecord(msgspec.Struct, frozen=True):
    """A published record."""

    record: int
    date: date
    minutes: float
    label: str
    recipe: str


def read_rows(path: Path, kind: type[_Row]) -> list[_Row]:
    """Read a tab-separated table with `#` comments.

    Raises:
        UsageError: if it cannot be read, or a line is not of this kind.
    """
    try:
        lines = [line for line in read_regular(path).decode().splitlines() if not line.startswith("#")]
        return msgspec.convert([*csv.DictReader(lines, delimiter="\t")], list[kind], strict=False)
    except (OSError, ValueError, csv.Error) as error:
        *columns, last = kind.__struct_fields__
        raise UsageError(f"{path}: {error}; need columns {', '.join(columns)} and {last}") from None


def read(path: Path) -> list[PastRecord]:
    """Return the records of a table by date; raise UsageError as `read_rows` does."""
    found = read_rows(path, PastRecord)
    if not found or not all(1e-3 < one.minutes < 1e6 for one in found):
        raise UsageError(f"{path}: need at least one record, each of more than 0.001 minutes")
    return sorted(found, key=lambda one: (one.date, one.record))


def draw(table: Path, records: Path, folder: Path) -> Path:
    """Draw a table with claims and our qualified records of `TRACK` into `<name of the table>.svg`; return its path.

    `records` is the folder of a built board, which has both; without one they are left out.

    Raises:
        UsageError: if the table or the board cannot be read.
    """
    history, board = read(table), read_built(records)
    rows = board.of(TRACK) if board else ()
    ours = [row for row in rows if row.standing == "qualified" and row.train_time_s]
    claims = [one for one in board.published if one.claim and f"{one.track}@1" == TRACK] if board else []
    path = folder / f"{table.stem}.svg"
    with canvas(8.0, 4.2) as figure, translate_os_errors(folder):
        _draw(figure.add_subplot(), history, claims, ours)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, svg(figure))
    return path


def _draw(
    axes: "Axes", history: Sequence[PastRecord], claims: Sequence[Published], ours: Sequence[Row]
) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    days, minutes = [_day(one.date) for one in history], [one.minutes for one in history]
    axes.step(days, minutes, where="post", color=TRAIN, linewidth=1.2, zorder=1)
    axes.plot(days, minutes, "o", color=VAL, markersize=3, zorder=3)
    plain: dict[str, Any] = {"path_effects": (), "fontsize": 9}  # an outline would triple the file
    for day, one in zip(days, history, strict=True):
        text = f"{one.label or one.recipe}, {one.minutes:.3g}"
        if one.recipe:
            ring = {"color": TARGET, "markerfacecolor": PAPER, "markersize": 8, "markeredgewidth": 1.5}
            axes.plot(day, one.minutes, "o", zorder=4, **ring)
            label(axes, (day, one.minutes), text, (-2, -7), ha="right", va="top", color=TARGET, **plain)
        elif one.label:
            last: dict[str, Any] = {"offset": (4, -7), "ha": "right", "va": "top"}
            form = last if one is history[-1] else {"offset": (6, 4)}
            label(axes, (day, one.minutes), text, **form, **plain)
    for claim in claims:
        day = _day(date.fromisoformat(claim.date))
        axes.plot(day, claim.minutes, "o", color=VAL, markerfacecolor=PAPER, markersize=4, zorder=3)
    if claims:
        best = min(claims, key=lambda one: one.minutes)
        place = _day(date.fromisoformat(best.date)), best.minutes
        label(axes, place, f"{best.standing}: {best.minutes:.3g}", (-6, -3), ha="right", **plain)
    for row in ours:
        day, time_min = _day(row.moment), (row.train_time_s or 0.0) / 60
        axes.plot(day, time_min, "D", color=TARGET, markersize=7, zorder=4)
        label(axes, (day, time_min), f"{time_min:.3g}", (6, 4), color=TARGET, **plain)
    since = (("hollow: claimed since, not verified", VAL),) if claims else ()
    own = "qualified here, in JAX" if ours else "implemented here, in JAX; no qualified run yet"
    key(axes, ("records in PyTorch (modded-nanogpt)", VAL), *since, (own, TARGET))
    axes.set_yscale("log")
    number_decades(axes.yaxis)
    axes.set_ylim(bottom=0.7 * axes.dataLim.ymin)
    axes.xaxis.set_major_locator(locator := AutoDateLocator(maxticks=8))
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, show_offset=False))
    axes.set_ylabel("minutes to a loss of 3.28")
    title(axes, "The speedrun on eight H100: minutes to a validation loss of 3.28 on FineWeb")


def _day(moment: date) -> float:
    """Return a date as matplotlib counts it: days since 1970."""
    return float(moment.toordinal() - date(1970, 1, 1).toordinal())
