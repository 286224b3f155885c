"""The board: the records of a folder, judged from their logs alone, and the results that others published."""

import re
from collections.abc import Iterable, Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import Meta

from speedrun.base import track as tracks
from speedrun.base.console import clean, quantity
from speedrun.base.errors import UsageError, translate_read_errors
from speedrun.record.checks.v6_examination import MOST_CONSTANT_BYTES, memory_nats
from speedrun.record.reader import Record, load
from speedrun.record.reproduction import judged
from speedrun.record.source import changed_lines
from speedrun.record.statistics import mean_interval
from speedrun.record.summary import held_out_loss, summarize
from speedrun.record.validate import Report, examine

_PATH = re.compile(r"[A-Za-z0-9._/-]+")  #: of a record
BOARD, CONTEXT = "leaderboard.json", "context.toml"
#: From best to worst. "reproduced": qualified, and new seeds of somebody else have the same loss. "qualified": a batch
#: proves the target. "valid", "provisional": reached, if the track does not rank or does. "missed": above the target.
STATUSES = ("reproduced", "qualified", "valid", "provisional", "missed", "no result", "refused")
PROVEN = STATUSES[:2]
#: Warnings that rule out "qualified": too few runs, an implausible result, a resumed run, worse held-out text.
_UNPROVEN = frozenset({"V302", "V308", "V311", "V314"})
Minutes = Annotated[float, Meta(gt=1e-3, lt=1e6)]


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A result that somebody else published."""

    name: str
    track: str
    hardware: str
    minutes: Minutes
    link: Annotated[str, Meta(pattern="^https://")]
    caveat: str
    date: Annotated[str, Meta(pattern=r"^(\d{4}-\d\d(-\d\d)?)?$")] = ""
    #: State of its pull request, if it is only claimed there.
    claim: Literal["", "merged", "open", "closed"] = ""
    rules: str = ""  #: verdict of RULES.md

    def __post_init__(self) -> None:
        if self.claim and len(self.date) != len("2026-07-17"):
            raise ValueError(f"{self.name!r} is claimed on {self.date!r}; need year, month and day")

    @property
    def status(self) -> str:
        """The status on the board."""
        return f"claimed, {self.claim}" if self.claim else "published"


class PastRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A record of the PyTorch speedrun. If it was timed again, its last entry counts."""

    record: int
    date: date
    minutes: Minutes
    label: str = ""  #: text next to the point
    recipe: str = ""  #: our recipe that implements the record
    link: Annotated[str, Meta(pattern="^(https://.+)?$")] = ""  #: puts the record on the board
    caveat: str = ""
    rules: str = ""

    @property
    def published(self) -> Published:
        """The record as a row of the board."""
        name = f"PyTorch, record {self.record}" + (f": {self.label}" if self.label else "")
        where, when = ("main-8xh100", "8 H100", self.minutes, self.link), self.date.isoformat()
        return Published(name, *where, self.caveat, when, rules=self.rules)


class BoardContext(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`context.toml`."""

    history: tuple[PastRecord, ...] = ()
    published: tuple[Published, ...] = ()
    ladder: tuple[Any, ...] = ()  #: of tests/pictures.py
    predicted: tuple[Any, ...] = ()  #: likewise


class Row(msgspec.Struct, frozen=True):
    """One record."""

    track: str  #: name and version
    path: str  #: in the folder of records
    status: str  #: one of STATUSES
    failed: tuple[str, ...]  #: ids of the checks that failed
    title: str
    authors: tuple[str, ...]
    changes: tuple[str, ...]
    parent: str | None
    created_utc: str  #: of the first run
    device: str
    num_runs: int  #: finished
    val_loss: float | None  #: mean
    val_loss_half_width: float | None  #: of the 95 % interval; None for one run
    p: float | None  #: of the declared test
    train_time_s: float | None  #: mean
    train_time_half_width_s: float | None  #: of the 95 % interval; None for one run
    cold_wall_s: float | None
    num_steps: int
    num_tokens: int
    source_lines: int
    held_out: str = ""  #: `held_out_loss`
    changed_lines: int | None = None  #: of science, against the parent; None without a readable parent
    rank: int | None = None  #: among the qualified records of a ranked track

    @property
    def rules(self) -> tracks.Rules:
        """The rules of the track."""
        return tracks.version(self.track).rules

    @property
    def cost(self) -> float | None:
        """Seconds of training or steps, whichever the track ranks by; None without a finished run."""
        return self.num_steps or None if self.rules.rank_by == "steps" else self.train_time_s

    @property
    def moment(self) -> datetime:
        """The start of the first run."""
        return datetime.fromisoformat(self.created_utc)


class LeftOut(msgspec.Struct, frozen=True):
    """A record that cannot be judged."""

    path: str
    why: str  #: safe to print


class Board(msgspec.Struct, frozen=True):
    """`leaderboard.json`."""

    rows: tuple[Row, ...]
    published: tuple[Published, ...]
    left_out: tuple[LeftOut, ...] = ()

    def of(self, track: str) -> tuple[Row, ...]:
        """Return the rows of one track (name and version), best first."""
        return tuple(row for row in self.rows if row.track == track)


def read(folder: Path) -> Board:
    """Validate every record in a folder (`<track>/<record>/`) and sort them.

    Raises:
        UsageError: if there is no such folder, or its context file is malformed.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; need one that holds <track>/<record>/source.txt")
    inside = sorted({path.parent for name in ("source.txt", "runs") for path in folder.glob(f"*/*/{name}")})
    judged: list[Row | LeftOut] = []
    sources: dict[str, bytes] = {}
    for one in inside:
        record, path = load(one), one.relative_to(folder).as_posix()
        if not _PATH.fullmatch(path):
            judged.append(LeftOut(ascii(path), "its folders need names of letters, digits and ._-"))
            continue
        judged.append(judge(record, path))
        sources[path] = record.raw.get("source.txt", b"")
    rows = [one for one in judged if isinstance(one, Row)]
    rows = [msgspec.structs.replace(one, changed_lines=_changed_lines(one, sources)) for one in rows]
    left_out = tuple(one for one in judged if isinstance(one, LeftOut))
    context = read_context(folder)
    past = (one.published for one in context.history if one.link)
    return Board(tuple(_ranked(rows)), (*past, *context.published), left_out)


def read_context(folder: Path) -> BoardContext:
    """Return the context of a folder of records, empty without its file."""
    path = folder / CONTEXT
    with translate_read_errors(path, "correct it", kind=UsageError):
        return msgspec.toml.decode(path.read_bytes(), type=BoardContext) if path.exists() else BoardContext()


def read_built(folder: Path) -> Board | None:
    """Return the board that was last built in a folder of records, or None."""
    path = folder / BOARD
    with translate_read_errors(path, "run 'speedrun leaderboard build' to make it again", kind=UsageError):
        return msgspec.json.decode(path.read_bytes(), type=Board) if path.exists() else None


def judge(record: Record, path: str) -> Row | LeftOut:
    """Judge one record; `path` is the name of its folder on the board."""
    report = examine(record)
    if record.track is None or not record.whole:
        failed = report.having("failed")
        why = next((one for one in failed if one.check.id in ("V001", "V006", "V008")), failed[0])
        return LeftOut(path, f"{why.check.id}: {why.messages[0]}")
    try:
        summary = summarize(record)
        times = mean_interval([run.train_time_s for run in record.finished])
        losses = mean_interval([run.val_loss for run in record.finished])
        status = status_of(record, report)
    except ArithmeticError as error:  # a number that no check refuses
        return LeftOut(path, f"a number is out of range ({error})")
    return Row(
        track=record.rules.id,
        path=path,
        status=status,
        failed=tuple(result.check.id for result in report.having("failed")),
        title=record.about.title,
        authors=record.about.authors,
        changes=record.about.changes,
        parent=record.about.parent_record,
        created_utc=record.created_utc,
        device="{} x {}".format(*record.reference_run.hardware),
        num_runs=summary.num_finished,
        val_loss=summary.val_loss_mean,
        val_loss_half_width=None if losses is None else losses.half_width,
        p=summary.test.p if summary.test else None,
        train_time_s=summary.train_time_s_mean,
        train_time_half_width_s=None if times is None else times.half_width,
        cold_wall_s=summary.cold_wall_s_mean,
        num_steps=summary.num_steps,
        num_tokens=summary.num_tokens,
        source_lines=record.source_lines,
        held_out=held_out_loss(summary),
    )


def _changed_lines(row: Row, sources: Mapping[str, bytes]) -> int | None:
    if row.parent is None or row.parent not in sources or row.parent == row.path:
        return None
    try:
        return changed_lines(sources[row.path].decode(), sources[row.parent].decode())
    except ValueError:  # V003 reports a source that cannot be split
        return None


def status_of(record: Record, report: Report) -> str:
    """Return one of `STATUSES`, for a record whose track is known."""
    failed = [result.check.id for result in report.having("failed")]
    warned = [result.check.id for result in report.having("warning")]
    if failed:
        return "no result" if failed == ["V301"] else "refused"
    summary = summarize(record)
    if summary.test is not None and summary.test.passed and _UNPROVEN.isdisjoint(warned):
        return "reproduced" if _is_reproduced(record) else "qualified"
    if not summary.target_reached:
        return "missed"
    return "provisional" if record.rules.rules.ranked else "valid"


def _is_reproduced(record: Record) -> bool:
    found = record.reproduction
    if found is None or found.same_seeds or len(found.runs) < 2 or not record.about.authors:
        return False
    by, *authors = (clean(name).strip().casefold() for name in (found.by, *record.about.authors))
    verdict = judged(found, record.finished, record.rules.target.sigma).verdict
    return by not in ("", *authors) and verdict != "loss mismatch"


def _ranked(rows: Iterable[Row]) -> Iterable[Row]:
    """Sort by track, status, cost and date, and number the proven records of ranked tracks."""

    def order(row: Row) -> tuple[str, int, float, datetime]:
        status = "qualified" if row.status in PROVEN else row.status
        return row.track, STATUSES.index(status), row.cost or float("inf"), row.moment

    rank: dict[str, int] = {}
    for row in sorted(rows, key=order):
        if row.status in PROVEN and row.rules.ranked:
            rank[row.track] = rank.get(row.track, 0) + 1
            yield msgspec.structs.replace(row, rank=rank[row.track])
        else:
            yield row


# --- as Markdown: titles, authors and folder names come from strangers, so they are escaped

_ELSEWHERE = "Elsewhere: published or claimed by others; not verified by us, never ranked"
_COLUMNS = (
    *("track", "rank", "train time", "val loss", "held-out loss", "record", "status", "runs", "date"),
    *("by our rules", "total wall", "steps", "tokens", "lines changed", "memory"),
)
_LONGEST = 80  #: characters of a stranger's text in a cell
_MARKUP = re.compile(r"([\\|`*_\[\]<>&~#@$!()])")


def markdown(board: Board) -> str:
    """Return a table for each track with a record, then one of others' results; links start at the records."""
    ranks = {row.track: row.rules.rank_by for row in board.rows}
    tables = [_table(track, by, [*map(_of_record, board.of(track))]) for track, by in ranks.items()]
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
        "held-out loss": row.held_out.removesuffix(" nats per token"),
        "runs": str(row.num_runs),
        "status": row.status + (f": {', '.join(row.failed)}" if row.failed else ""),
        "total wall": _seconds(row.cold_wall_s, None),
        "steps": f"{row.num_steps:,}",
        "tokens": quantity(row.num_tokens),
        "memory": f"at most {memory_nats(MOST_CONSTANT_BYTES, tracks.version(row.track).data.val_tokens):.4f} nats",
        "lines changed": "" if row.changed_lines is None else f"{row.changed_lines:,}",
        "record": _link(row.title, f"./{quote(row.path)}", authors),
        "date": row.created_utc[:10],
    }


def _of_published(one: Published) -> dict[str, str]:
    return {
        "track": one.track,
        "train time": f"{one.minutes:g} min",
        "status": f"*{one.status}*",
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
