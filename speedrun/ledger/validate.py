"""Asks every check of a record. Offline, without JAX, and nothing in the record is executed."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from speedrun.ground.console import clean
from speedrun.ground.errors import unknown
from speedrun.ledger.checks import CHECKS
from speedrun.ledger.checks.examination import REPLAY_CHECKS
from speedrun.ledger.checks.table import Check, Need, Skip
from speedrun.ledger.record import Record, load

Status = Literal["ok", "failed", "warning", "skipped"]

#: A broken log could fail at every line; so many problems of one check are enough.
MAX_PROBLEMS = 5


@dataclass(frozen=True)
class Result:
    """What one check found."""

    check: Check
    status: Status
    messages: tuple[str, ...]  #: problems, or why it was skipped; safe to print


@dataclass(frozen=True, repr=False)
class Report:
    """What all checks found."""

    results: tuple[Result, ...]
    strict: bool

    def having(self, status: Status) -> list[Result]:
        """The results with one status."""
        return [result for result in self.results if result.status == status]

    @property
    def verdict(self) -> str:
        """One line: "good" or "refused", and how many checks said what."""
        counts = [(len(self.having(status)), status) for status in ("ok", "failed", "warning", "skipped")]
        said = ", ".join(f"{count} {status}" for count, status in counts if count)
        return f"{'refused' if self.exit_code else 'good'}: {said}"

    def shown(self, *, verbose: bool) -> list[Result]:
        """Return the results to print, problems last; without `verbose`, problems and what an examination found."""
        order: tuple[Status, ...] = ("skipped", "ok", "warning", "failed")
        return [
            result
            for status in order
            for result in self.having(status)
            if verbose
            or status in ("warning", "failed")
            or (status == "ok" and result.check.id.startswith("V6"))
        ]

    def facts(self) -> dict[str, object]:
        """Return the exit code and every result, as `--json` prints them."""
        results = [
            {"id": result.check.id, "status": result.status, "messages": result.messages}
            for result in self.results
        ]
        return {"exit_code": self.exit_code, "results": results}

    def __repr__(self) -> str:
        return f"<Report {self.verdict}>"

    @property
    def exit_code(self) -> int:
        """0: good; 1: a check failed, or, if strict, warned."""
        return int(bool(self.having("failed") or (self.strict and self.having("warning"))))


def validate(record_dir: Path, *, strict: bool = False) -> Report:
    """Reads a record and asks every check.

    Args:
        record_dir: the folder of the record.
        strict: whether warnings count as failures in `exit_code`.

    Raises:
        UsageError: if `record_dir` is not a folder.
    """
    return examine(load(record_dir), strict=strict)


def examine(record: Record, *, strict: bool = False) -> Report:
    """Asks every check of a record that was read."""
    return Report(tuple(ask(check, record) for check in CHECKS), strict)


def ask(check: Check, record: Record) -> Result:
    """Asks one check of a record."""
    if missing := [why for need, why in _missing(record).items() if need in check.needs]:
        return Result(check, "skipped", (missing[0],))
    try:
        problems = list(islice(check.find(record), MAX_PROBLEMS + 1))
    except Skip as skip:
        return Result(check, "skipped", (clean(str(skip)),))
    except ArithmeticError as error:
        # Fields have types but no ranges: a number may be too big to compute with.
        problems = [f"a number is out of range ({error})"]
    shown = tuple(clean(problem) for problem in problems[:MAX_PROBLEMS])
    more = ("and more",) if len(problems) > MAX_PROBLEMS else ()
    status: Status = "ok" if not problems else "failed" if check.severity == "error" else "warning"
    return Result(check, status, shown + more)


def _missing(record: Record) -> dict[Need, str]:
    """The parts that could not be read, and which check says why."""
    missing: dict[Need, str] = {}
    unread = "V008" if record.refused else "V001"
    if not record.whole:
        missing["runs"] = f"a run cannot be read: see {unread}"
    if record.manifest is None:
        missing["manifest"] = f"manifest.json cannot be read: see {unread}"
    if record.summary is None:
        missing["summary"] = f"summary.json cannot be read: see {unread}"
    if "source.txt" in record.refused:
        missing["source"] = "source.txt was not read: see V008"
    if record.track is None:
        missing["track"] = "the track is not known: see V006"
    return missing


def find_check(id: str) -> Check:
    """A check by its id.

    Raises:
        UsageError: if there is none (names the nearest).
    """
    checks = [*CHECKS, *(one.check for one in REPLAY_CHECKS)]
    for check in checks:
        if check.id == id.upper():
            return check
    raise unknown("check", id, [check.id for check in checks])
