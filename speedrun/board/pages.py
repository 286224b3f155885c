"""The board as Markdown. Titles, authors and folder names come from strangers, so they are escaped."""

import re
from urllib.parse import quote

from speedrun.base.console import clean, quantity
from speedrun.board.standings import Board, Published, Row

_ELSEWHERE = "Elsewhere: published or claimed by others; not verified by us, never ranked"
_COLUMNS = (
    *("track", "rank", "train time", "val loss", "record", "standing", "runs", "date", "by our rules"),
    *("cold wall", "steps", "tokens", "lines changed"),
)
_LONGEST = 80  #: characters of a stranger's text in a cell
_MARKUP = re.compile(r"([\\|`*_\[\]<>&~#@$!()])")


def markdown(board: Board) -> str:
    """Return a table for each track with a record, then one of others' results; links start at the records."""
    first = {row.track: row for row in board.rows}
    tables = [
        _table(track, row.rules.rank_by, [*map(_of_record, board.of(track))]) for track, row in first.items()
    ]
    if theirs := sorted(board.published, key=lambda one: (one.track, one.minutes)):
        tables.append(_table(_ELSEWHERE, "train time", [*map(_of_published, theirs)]))
    return "\n\n".join(tables) + "\n"


def _table(head: str, rank_by: str, rows: list[dict[str, str]]) -> str:
    """Return a table of rows by column, without empty columns; what the track ranks by follows the rank."""
    names = dict.fromkeys(("track", "rank", rank_by, *_COLUMNS))
    used = [name for name in names if any(row.get(name) for row in rows)]
    lines = [f"## {_words(head)}", "", f"| {' | '.join(used)} |", "|" + "---|" * len(used)]
    return "\n".join([*lines, *(f"| {' | '.join(row.get(name, '') for name in used)} |" for row in rows)])


def _of_record(row: Row) -> dict[str, str]:
    loss, p = row.val_loss, row.p
    authors = "".join(f", {author}" for author in row.authors)
    return {
        "rank": "" if row.rank is None else str(row.rank),
        "train time": _seconds(row.train_time_s, row.train_time_half_width_s),
        "val loss": "" if loss is None else f"{loss:.4f}" + ("" if p is None else f" (p = {p:.1g})"),
        "runs": str(row.num_runs),
        "standing": row.standing + (f": {', '.join(row.failed)}" if row.failed else ""),
        "cold wall": _seconds(row.cold_wall_s, None),
        "steps": f"{row.num_steps:,}",
        "tokens": quantity(row.num_tokens),
        "lines changed": "" if row.changed_lines is None else f"{row.changed_lines:,}",
        "record": _link(row.title, f"./{quote(row.path)}", authors),
        "date": row.created_utc[:10],
    }


def _of_published(one: Published) -> dict[str, str]:
    return {
        "track": one.track,
        "train time": f"{one.minutes:g} min",
        "standing": f"*{one.standing}*",
        "record": f"*{_link(one.name, one.link, f': {one.hardware}; {one.caveat}')}*",
        "date": one.date,
        "by our rules": _words(one.rules, limit=200),
    }


def _link(name: str, link: str, about: str) -> str:
    return f"[{_words(name)}]({link}){_words(about, limit=200)}"


def _seconds(mean: float | None, half_width: float | None) -> str:
    if mean is None:
        return ""
    return f"{mean:.2f} s" if half_width is None else f"{mean:.2f} ± {half_width:.2f} s"


def _words(text: str, limit: int = _LONGEST) -> str:
    """Return a stranger's text as plain text in Markdown."""
    return _MARKUP.sub(r"\\\1", clean(text, limit=limit))
