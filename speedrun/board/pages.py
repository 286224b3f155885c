"""The board as Markdown and as an HTML page that loads nothing; and figures in pages.

A page has a figure between two marks, `<!-- figure: NAME -->1.23<!-- end -->`. Titles, authors and folder names come
from strangers, so they are escaped.
"""

import base64
import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

from speedrun.base.console import clean, quantity
from speedrun.base.errors import UsageError
from speedrun.board.standings import Board, Published, Row

BEGIN, END = "<!-- figure: {} -->", "<!-- end -->"
BOARD = "board"  #: the name of the board in a page
_MARK = re.compile(f"({BEGIN.format('(.+?)')})(.*?)({END})", re.DOTALL)
_ELSEWHERE = "Elsewhere: published or claimed by others; not verified by us, never ranked"
_COLUMNS = (
    *("track", "rank", "train time", "val loss", "runs", "standing", "cold wall", "steps", "tokens"),
    *("lines changed", "record", "date", "by our rules"),
)
_LONGEST = 80  #: characters of a stranger's text in a cell
_MARKUP = re.compile(r"([\\|`*_\[\]<>&~#@$!()])")


class _Entry(NamedTuple):
    """One line of a table."""

    cells: dict[str, str]  #: our own words and numbers, by column
    name: str
    path: str  #: of the record in the folder of records, or a link
    about: str  #: text after the name
    changes: tuple[str, ...]
    published: bool  #: by somebody else


def _tables(board: Board) -> Iterator[tuple[str, list[str], list[_Entry]]]:
    """Yield head, columns and lines of a table for each track with a record, then of one for others' results."""
    first = {row.track: row for row in board.rows}
    parts = [(track, row.rules.rank_by, [*map(_of_record, board.of(track))]) for track, row in first.items()]
    if theirs := sorted(board.published, key=lambda one: (one.track, one.minutes)):
        parts.append((_ELSEWHERE, "train time", [*map(_of_published, theirs)]))
    for head, rank_by, entries in parts:
        # The column that the track ranks by follows the rank.
        names = dict.fromkeys(("track", "rank", rank_by, *_COLUMNS))
        used = [name for name in names if name == "record" or any(one.cells.get(name) for one in entries)]
        yield head, used, entries


def _of_record(row: Row) -> _Entry:
    loss, p = row.val_loss, row.p
    cells = {
        "rank": "" if row.rank is None else str(row.rank),
        "train time": _seconds(row.train_time_s, row.train_time_half_width_s),
        "val loss": "" if loss is None else f"{loss:.4f}" + ("" if p is None else f" (p = {p:.1g})"),
        "runs": str(row.num_runs),
        "standing": row.standing + (f": {', '.join(row.failed)}" if row.failed else ""),
        "cold wall": _seconds(row.cold_wall_s, None),
        "steps": f"{row.num_steps:,}",
        "tokens": quantity(row.num_tokens),
        "lines changed": "" if row.changed_lines is None else f"{row.changed_lines:,}",
        "date": row.date,
    }
    about = "".join(f", {author}" for author in row.authors)
    return _Entry(cells, row.title, row.path, about, row.changes, published=False)


def _of_published(one: Published) -> _Entry:
    cells = {"track": one.track, "train time": f"{one.minutes:g} min", "standing": one.standing}
    cells |= {"date": one.date, "by our rules": one.rules}
    return _Entry(cells, one.name, one.link, f": {one.hardware}; {one.caveat}", (), published=True)


def _seconds(mean: float | None, half_width: float | None) -> str:
    if mean is None:
        return ""
    return f"{mean:.2f} s" if half_width is None else f"{mean:.2f} ± {half_width:.2f} s"


def filled(page: str, figures: Mapping[str, str]) -> str:
    """Return a page with these figures between their marks."""
    if page.count(BEGIN.partition("{")[0]) != len(_MARK.findall(page)):
        raise UsageError(f"a mark {BEGIN.format('NAME')} has no {END}; restore the marks")
    return _MARK.sub(lambda mark: f"{mark[1]}{figures.get(mark[2], mark[3])}{mark[4]}", page)


def markdown(board: Board, *, records: str = "records") -> str:
    """Return all tables; `records` is the path to the folder of records."""
    return "\n\n".join(_markdown(*table, records) for table in _tables(board)) + "\n"


def _markdown(head: str, columns: list[str], entries: list[_Entry], records: str) -> str:
    lines = [f"**{_words(head)}**", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for entry in entries:
        link = entry.path if entry.published else f"{records}/{quote(entry.path)}"
        cells = entry.cells | {"record": f"[{_words(entry.name)}]({link}){_words(entry.about, limit=200)}"}
        if entry.published:
            cells |= {name: f"*{cells[name]}*" for name in ("standing", "record")}
            cells["by our rules"] = _words(cells["by our rules"], limit=200)
        lines.append(f"| {' | '.join(cells.get(name, '') for name in columns)} |")
    return "\n".join(lines)


def _words(text: str, limit: int = _LONGEST) -> str:
    """Return a stranger's text as plain text in Markdown."""
    return _MARKUP.sub(r"\\\1", clean(text, limit=limit))


_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2733;--grey:#5d6974;--line:#dde3e9;
--link:#1f5fa8;--good:#1b7a3d;--bad:#b5391f}
@media(prefers-color-scheme:dark){:root{--paper:#12181e;--ink:#e3e9ef;--grey:#98a4af;--line:#313b45;
--link:#7ab6f5;--good:#5fce87;--bad:#ff8b73}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:80rem;margin:2rem auto;
padding:0 1rem}
a{color:var(--link)}:focus-visible{outline:2px solid var(--link);outline-offset:2px}
table{border-collapse:collapse;width:100%;margin:1rem 0 2rem}
th,td{text-align:left;padding:.35rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
th{white-space:nowrap}
.published{color:var(--grey);font-style:italic}.qualified .standing{color:var(--good);font-weight:600}
.refused .standing{color:var(--bad)}.number{white-space:nowrap;font-variant-numeric:tabular-nums}
figure{display:inline-block;margin:0 1rem 1rem 0;max-width:36rem;vertical-align:top}
img{width:100%}figcaption{color:var(--grey)}
@media(max-width:50rem){table{display:block;overflow-x:auto}figure{margin:0 0 1rem}}
"""


def page(board: Board, plots: dict[str, bytes]) -> str:
    """Return the board as one HTML page; `plots` are SVGs by caption."""
    parts: list[str] = []
    for head, columns, entries in _tables(board):
        heads = [f'<th scope="col">{name}</th>' for name in columns]
        rows = [_html_row(entry, columns) for entry in entries]
        body = f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody>"
        parts.append(f"<h2>{_text(head)}</h2>\n<table>{body}</table>\n")
    figures = [
        f'<figure><img alt="{_text(name)}" src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'
        f"<figcaption>{_text(name, limit=200)}</figcaption></figure>"
        for name, svg in plots.items()
    ]
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>speedrun: the board</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style>\n<h1>The board</h1>\n<p>Every record was validated again for this page. Times and "
        "losses are means, with 95 % intervals for two runs or more. Results that others published or claim are "
        "grey: unranked, not verified by us.</p>\n"
        f"{''.join(parts)}{''.join(figures)}\n</html>\n"
    )


def _html_row(entry: _Entry, columns: Sequence[str]) -> str:
    link = _text(entry.path, limit=400) if entry.published else f"{quote(entry.path)}/README.md"
    changes = "".join(f"<br>{_text(change)}" for change in entry.changes)
    record = f'<a href="{link}">{_text(entry.name)}</a>{_text(entry.about, limit=200)}{changes}'
    cells = []
    for name in columns:
        kind = name if name in ("record", "standing") else "rules" if name == "by our rules" else "number"
        content = record if name == "record" else _text(entry.cells.get(name, ""), limit=200)
        cells.append(f'<td class="{kind}">{content}</td>')
    standing = "published" if entry.published else entry.cells["standing"].partition(":")[0]
    return f'<tr class="{standing.replace(" ", "-")}">{"".join(cells)}</tr>\n'


def _text(text: str, limit: int = _LONGEST) -> str:
    """Return a stranger's text as plain text in HTML."""
    return html.escape(clean(text, limit=limit), quote=True)
