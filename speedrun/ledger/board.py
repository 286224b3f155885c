"""The board: every record of a folder, validated again, in one table for each track. Unranked ones are shown, too.

Nothing a record says of itself is taken over: standing, means and intervals follow from its logs.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from speedrun import track as tracks
from speedrun.errors import UsageError
from speedrun.ledger.assemble import derive_summary
from speedrun.ledger.record import Record, load
from speedrun.ledger.statistics import Interval, mean_interval
from speedrun.ledger.validate import Report, examine

CONTEXT = "context.toml"

#: From best to worst. "valid": passed every check on a track that does not rank.
STANDINGS = ("qualified", "valid", "provisional", "no result", "refused")


class Row(msgspec.Struct, frozen=True):
    """One record."""

    track: str  #: name and version
    path: str  #: of its folder, from the folder of records
    standing: str  #: one of STANDINGS
    failed: tuple[str, ...]  #: ids of the checks that failed
    title: str
    authors: tuple[str, ...]
    changes: tuple[str, ...]
    parent: str | None
    date: str
    device: str
    num_runs: int  #: finished
    val_loss: float | None  #: mean
    val_loss_half_width: float | None  #: of its 95 % interval; None for one run
    p: float | None  #: of the declared test
    train_time_s: float | None  #: mean
    train_time_half_width_s: float | None  #: of its 95 % interval; None for one run
    cold_wall_s: float | None
    num_steps: int
    num_tokens: int
    source_lines: int
    rank: int | None = None  #: among the qualified ones of a track that ranks


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A result of others, as they told it."""

    name: str
    track: str
    hardware: str
    minutes: float
    link: str
    caveat: str


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`context.toml`."""

    published: tuple[Published, ...] = ()


class Board(msgspec.Struct, frozen=True):
    """All there is to show."""

    rows: tuple[Row, ...]
    published: tuple[Published, ...]

    def of(self, track: str) -> tuple[Row, ...]:
        """The rows of one track (name and version), best first."""
        return tuple(row for row in self.rows if row.track == track)

    @property
    def tracks(self) -> list[str]:
        """Those that have a record, or a published result to beat."""
        aims = {tracks.load(one.track).id for one in self.published}
        return sorted({row.track for row in self.rows} | aims)


def read(folder: Path) -> Board:
    """Validates every record below a folder (`<track>/<record>/`) and puts them in order.

    Raises:
        UsageError: if there is no such folder, or its context file is malformed.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; need one that holds <track>/<record>/manifest.json")
    folders = [path.parent for path in sorted(folder.glob("*/*/manifest.json"))]
    rows = [row for one in folders if (row := row_of(one, one.relative_to(folder).as_posix()))]
    return Board(tuple(_ranked(rows)), _context(folder / CONTEXT).published)


def _context(path: Path) -> Context:
    try:
        context = msgspec.convert(tomllib.loads(path.read_text()), Context)
    except FileNotFoundError:
        return Context()
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{path}: {error}; mend it") from None
    for one in context.published:
        if not one.link.startswith("https://"):
            raise UsageError(f"{path}: link {one.link!r} of {one.name!r}; need one that begins with https://")
    return context


def row_of(folder: Path, path: str) -> Row | None:
    """What a record comes to, under a name for its place; None if not even its track can be told.

    Raises:
        UsageError: if there is no such folder.
    """
    record = load(folder)
    report = examine(record)
    manifest = record.manifest
    if manifest is None or record.track is None or not record.whole:
        return None
    failed = tuple(result.check.id for result in report.having("failed"))
    summary = derive_summary(record.runs, record.track, record.declaration)
    times = mean_interval([run.train_time_s for run in record.finished])
    losses = mean_interval([run.val_loss for run in record.finished])
    return Row(
        track=record.track.id,
        path=path,
        standing=standing_of(record, report),
        failed=failed,
        title=manifest.about.title,
        authors=manifest.about.authors,
        changes=manifest.about.changes,
        parent=manifest.about.parent_record,
        date=manifest.created_utc[:10],
        device=f"{manifest.hardware.num_devices} x {manifest.hardware.device_kind}",
        num_runs=summary.num_finished,
        val_loss=summary.val_loss_mean,
        val_loss_half_width=_half_width(losses),
        p=summary.test.p if summary.test else None,
        train_time_s=summary.train_time_s_mean,
        train_time_half_width_s=_half_width(times),
        cold_wall_s=summary.cold_wall_s_mean,
        num_steps=summary.num_steps,
        num_tokens=summary.num_tokens,
        source_lines=manifest.source.lines,
    )


def _half_width(interval: Interval | None) -> float | None:
    return None if interval is None else interval.half_width


def standing_of(record: Record, report: Report) -> str:
    """One of `STANDINGS`, for a record whose track is known."""
    failed = [result.check.id for result in report.having("failed")]
    warned = [result.check.id for result in report.having("warning")]
    if failed:
        return "no result" if failed == ["V301"] else "refused"
    summary = derive_summary(record.runs, record.rules, record.declaration)
    if summary.test is not None and summary.test.passed and "V302" not in warned:
        return "qualified"
    return "provisional" if record.rules.rules.ranked else "valid"


def _ranked(rows: Iterable[Row]) -> Iterable[Row]:
    """By track and standing, then by time; a rank only where the track ranks."""

    def order(row: Row) -> tuple[str, int, float]:
        return row.track, STANDINGS.index(row.standing), row.train_time_s or float("inf")

    rank: dict[str, int] = {}
    for row in sorted(rows, key=order):
        if row.standing == "qualified" and tracks.load(row.track.rpartition("@")[0]).rules.ranked:
            rank[row.track] = rank.get(row.track, 0) + 1
            yield msgspec.structs.replace(row, rank=rank[row.track])
        else:
            yield row
