"""The board as Markdown, as JSON and as one page that works from a file: nothing is asked of any network.

Every word of a record is a stranger's, and so is the name of its folder: it is escaped for where it stands, and plots
are drawn anew from the logs.
"""

import base64
import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from speedrun.board.standings import Board, Published, Row
from speedrun.ground.console import clean, quantity
from speedrun.ground.wholefile import write_whole

BEGIN, END = "<!-- leaderboard: made by `speedrun leaderboard build` -->", "<!-- end of leaderboard -->"
_HEAD = ("rank", "train time", "val loss", "runs", "standing", "cold wall", "steps", "lines")
_LONGEST = 80  #: characters of a stranger's text in a cell
_MARKUP = re.compile(r"([\\|`*_\[\]<>&~#@$!()])")


def markdown(board: Board, *, records: str = "records") -> str:
    """Tables for all tracks. `records` is the path of the records from where the text will stand."""
    return "\n\n".join(_markdown_track(board, name, records) for name in board.tracks) + "\n"


def _markdown_track(board: Board, track: str, records: str) -> str:
    head = [*_HEAD, "record", "date"]
    lines = [f"**{_words(track)}**", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in board.of(track):
        link = f"[{_words(row.title)}]({records}/{quote(row.path)})"
        cells = [*_cells(row), f"{link}{_by(row)}", row.date]
        lines.append(f"| {' | '.join(cells)} |")
    for one in _context(board, track):
        about = f"*[{_words(one.name)}]({one.link}): {_words(one.hardware)}; {_words(one.caveat)}*"
        cells = ["", f"{one.minutes:g} min", "", "", "*published*", "", "", "", about, ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _context(board: Board, track: str) -> Sequence[Published]:
    found = [one for one in board.published if one.track == track.rpartition("@")[0]]
    return sorted(found, key=lambda one: one.minutes)


def _cells(row: Row) -> list[str]:
    """Rank, time, loss, runs, standing, wall, steps, lines: numbers and our own words."""
    return [
        "" if row.rank is None else str(row.rank),
        _seconds(row.train_time_s, row.train_time_half_width_s),
        ""
        if row.val_loss is None
        else f"{row.val_loss:.4f}" + ("" if row.p is None else f" (p = {row.p:.1g})"),
        str(row.num_runs),
        row.standing + (f": {', '.join(row.failed)}" if row.failed else ""),
        _seconds(row.cold_wall_s, None),
        f"{row.num_steps:,}",
        f"{row.source_lines:,}",
    ]


def _seconds(mean: float | None, half_width: float | None) -> str:
    if mean is None:
        return ""
    return f"{mean:.2f} s" if half_width is None else f"{mean:.2f} +- {half_width:.2f} s"


def _by(row: Row) -> str:
    return f", {_words(', '.join(row.authors))}" if row.authors else ""


def _words(text: str) -> str:
    """A stranger's text as Markdown that is nothing but text."""
    return _MARKUP.sub(r"\\\1", clean(text, limit=_LONGEST))


def spliced(text: str, block: str) -> str:
    """A text with the part between the two marks replaced.

    Raises:
        ValueError: if the marks are not there, once and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after:
        raise ValueError(f"need {BEGIN!r}, then {END!r}, once each")
    return f"{before}{BEGIN}\n\n{block}\n{END}{after}"


def json(board: Board) -> bytes:
    """All of it for programs."""
    return msgspec.json.format(msgspec.json.encode(board), indent=2) + b"\n"


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1c2733;max-width:76rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;width:100%;margin:1rem 0 2rem}
th,td{text-align:left;padding:.35rem .6rem;border-bottom:1px solid #dde3e9;vertical-align:top}
th{cursor:pointer;white-space:nowrap}th:hover{background:#f2f5f8}
tr.published td{color:#7a8691;font-style:italic}
figure{display:inline-block;margin:0 1rem 1rem 0;max-width:36rem}img{width:100%}figcaption{color:#7a8691}
.qualified{color:#1b7a3d;font-weight:600}.refused{color:#c8452f}
"""
_SCRIPT = """
for(const th of document.querySelectorAll('th'))th.onclick=()=>{
const body=th.closest('table').tBodies[0],i=th.cellIndex,key=r=>r.cells[i].dataset.key??r.cells[i].textContent;
const up=th.dataset.up!=='1';th.dataset.up=up?'1':'0';
[...body.rows].sort((a,b)=>(key(a).localeCompare(key(b),undefined,{numeric:true}))*(up?1:-1)).forEach(r=>body.append(r))}
"""


def page(board: Board, plots: dict[str, bytes]) -> str:
    """One HTML page. `plots` holds SVGs by what they show."""
    parts = [_html_track(board, name) for name in board.tracks]
    figures = [
        f'<figure><img alt="{_text(name)}" src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'
        f"<figcaption>{_text(name)}</figcaption></figure>"
        for name, svg in plots.items()
    ]
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>speedrun: the board</title>\n'
        f"<style>{_STYLE}</style>\n<h1>The board</h1>\n<p>Every record was validated again for this page. Means "
        f"with 95 % intervals; what others published stands in grey, unranked and unchecked.</p>\n"
        f"{''.join(parts)}{''.join(figures)}\n<script>{_SCRIPT}</script></html>\n"
    )


def _html_track(board: Board, track: str) -> str:
    head = [*_HEAD, "record", "tokens", "date"]
    rows = [_html_row(row) for row in board.of(track)]
    for one in _context(board, track):
        name = (
            f'<a href="{_text(one.link)}">{_text(one.name)}</a>: {_text(one.hardware)}; {_text(one.caveat)}'
        )
        key = f' data-key="{one.minutes * 60:.2f}"'
        rows.append(
            f'<tr class="published"><td></td><td{key}>{one.minutes:g} min</td><td></td><td></td><td>published</td>'
            f"<td></td><td></td><td></td><td>{name}</td><td></td><td></td></tr>"
        )
    heads = "".join(f"<th>{name}</th>" for name in head)
    return f"<h2>{_text(track)}</h2>\n<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>\n"


def _html_row(row: Row) -> str:
    cells = [_text(cell) for cell in _cells(row)]
    what = f'<a href="{quote(row.path)}/README.md">{_text(row.title)}</a>{_text(_authors(row.authors))}'
    changes = "".join(f"<br>{_text(change)}" for change in row.changes)
    keyed = [f"<td>{cell}</td>" for cell in cells]
    keyed[1] = f'<td data-key="{row.train_time_s or 0:.4f}">{cells[1]}</td>'
    keyed[4] = f'<td class="{row.standing.replace(" ", "-")}">{cells[4]}</td>'
    tokens = f'<td data-key="{row.num_tokens}">{quantity(row.num_tokens)}</td>'
    return f"<tr>{''.join(keyed)}<td>{what}{changes}</td>{tokens}<td>{row.date}</td></tr>\n"


def _authors(names: Iterable[str]) -> str:
    return "".join(f", {name}" for name in names)


def _text(text: str) -> str:
    """A stranger's text as HTML that is nothing but text."""
    return html.escape(clean(text, limit=_LONGEST), quote=True)


def write(path: Path, content: str | bytes) -> None:
    """Writes a generated file."""
    write_whole(path, content.encode() if isinstance(content, str) else content)
