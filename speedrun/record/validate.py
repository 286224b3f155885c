"""Runs all checks on a record, offline, without JAX and without executing anything from it."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from speedrun.base.console import clean
from speedrun.base.errors import unknown
from speedrun.record.checks import CHECKS
from speedrun.record.checks.table import Check, Skip
from speedrun.record.checks.v6_examination import LOWERED, REPLAY_CHECKS
from speedrun.record.reader import Record, UnknownTrack, load

Status = Literal["ok", "failed", "warning", "skipped"]

#: Problems shown for each check; a broken log could have one in every line.
_MAX_PROBLEMS = 5


@dataclass(frozen=True)
class Result:
    """The result of one check."""

    check: Check
    status: Status
    messages: tuple[str, ...]  #: problems, or the reason for skipping; safe to print


@dataclass(frozen=True, repr=False)
class Report:
    """The results of all checks."""

    results: tuple[Result, ...]
    strict: bool

    def having(self, status: Status) -> list[Result]:
        """Return the results with a status."""
        return [result for result in self.results if result.status == status]

    @property
    def verdict(self) -> str:
        """One line with "good" or "refused", and the number of checks by status."""
        counts = [(len(self.having(status)), status) for status in ("ok", "failed", "warning", "skipped")]
        said = ", ".join(f"{count} {status}" for count, status in counts if count)
        return f"{'refused' if self.exit_code else 'good'}: {said}"

    def shown(self, *, verbose: bool) -> list[Result]:
        """Return the results to print, problems last; without `verbose`, only problems and examinations."""
        found = [result for result in self.having("ok") if verbose or result.check.id.startswith("V6")]
        skipped = self.having("skipped") if verbose else []
        return [*skipped, *found, *self.having("warning"), *self.having("failed")]

    def __repr__(self) -> str:
        return f"<Report {self.verdict}>"

    @property
    def exit_code(self) -> int:
        """0: good; 1: a check failed, or, if strict, warned."""
        return int(bool(self.having("failed") or (self.strict and self.having("warning"))))


def validate(record_dir: Path, *, strict: bool = False) -> Report:
    """Read a record and run all checks; if `strict`, warnings count as failures in `exit_code`."""
    return examine(load(record_dir), strict=strict)


def examine(record: Record, *, strict: bool = False) -> Report:
    """Run all checks on a loaded record."""
    return Report(tuple(ask(check, record) for check in CHECKS), strict)


def ask(check: Check, record: Record) -> Result:
    """Run one check on a record."""
    if check.needs_runs and not record.whole:
        unread = "V008" if record.refused else "V001"
        return Result(check, "skipped", (f"a run cannot be read: see {unread}",))
    try:
        problems = list(islice(check.find(record), _MAX_PROBLEMS + 1))
    except (Skip, UnknownTrack) as skip:
        return Result(check, "skipped", (clean(str(skip)),))
    except ArithmeticError as error:
        problems = [f"a number is out of range ({error})"]
    shown = tuple(clean(problem) for problem in problems[:_MAX_PROBLEMS])
    more = ("and more",) if len(problems) > _MAX_PROBLEMS else ()
    is_ranked = record.track is None or record.track.rules.ranked
    is_error = check.severity == "error" or (check.severity == "error if ranked" and is_ranked)
    status: Status = "ok" if not problems else "failed" if is_error else "warning"
    return Result(check, status, shown + more)


def find_check(id: str) -> Check:
    """Return a check by its id; raise UsageError with the nearest id if there is none."""
    checks = [*CHECKS, *REPLAY_CHECKS, LOWERED]
    for check in checks:
        if check.id == id.upper():
            return check
    raise unknown("check", id, [check.id for check in checks])
