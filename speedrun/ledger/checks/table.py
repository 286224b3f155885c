"""What a check is."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from speedrun.ledger.record import Record
from speedrun.ledger.run import Run

Severity = Literal["error", "warning"]
Need = Literal["runs", "manifest", "summary", "source", "track"]


class Skip(Exception):
    """Raised by a check that has nothing to say about this record; carries the reason."""


@dataclass(frozen=True)
class Check:
    """One rule of a record, with an id that never changes."""

    id: str
    title: str  #: what is true of a good record
    why: str  #: it matters
    hint: str  #: what to do if it is not
    needs: tuple[Need, ...]  #: parts of the record without which it cannot be asked
    severity: Severity
    find: Callable[[Record], Iterable[str]]  #: one line for each problem


def check(
    id: str,
    title: str,
    *,
    why: str,
    hint: str,
    needs: tuple[Need, ...] = ("runs",),
    severity: Severity = "error",
) -> Callable[[Callable[[Record], Iterable[str]]], Check]:
    """Makes a check of a function from a record to its problems."""
    return lambda find: Check(id, title, why, hint, needs, severity, find)


def check_run(
    id: str,
    title: str,
    *,
    why: str,
    hint: str,
    needs: tuple[Need, ...] = ("runs",),
    severity: Severity = "error",
) -> Callable[[Callable[[Run, Record], Iterable[str]]], Check]:
    """Makes a check of a function that looks at one finished run (the record is there for its rules)."""

    def decorate(find: Callable[[Run, Record], Iterable[str]]) -> Check:
        def find_all(record: Record) -> Iterator[str]:
            if not record.finished:
                raise Skip("no run finished")
            skipped: list[Skip] = []
            found = False
            for run in record.finished:
                try:
                    for problem in find(run, record):
                        found = True
                        yield f"{run.folder}: {problem}"
                except Skip as skip:  # of one run; another may have a problem
                    skipped.append(Skip(f"{run.folder}: {skip}"))
            if skipped and not found:
                raise skipped[0]

        return Check(id, title, why, hint, needs, severity, find_all)

    return decorate
