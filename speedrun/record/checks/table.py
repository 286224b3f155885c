"""The types of a check, and the decorators that make one of a function."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NotRequired, TypedDict, TypeVar, Unpack

from speedrun.record.logged_run import Run
from speedrun.record.reader import Record

Severity = Literal["error", "error if ranked", "warning"]


class Skip(Exception):
    """Raised by a check that does not apply to this record; carries the reason."""


def if_ranked(record: Record, problem: str) -> str:
    """Return a problem of a record on a track that ranks; raise Skip on any other track."""
    if not record.rules.rules.ranked:
        raise Skip(f"{problem}; this track does not rank")
    return problem


_Facts = TypeVar("_Facts")
_Find = Callable[[Record], Iterable[str]]
_FindOfRun = Callable[[Run, _Facts], Iterable[str]]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One rule of a record, with an id that never changes."""

    id: str
    title: str  #: what holds for a good record
    why: str  #: why it matters
    hint: str  #: what to do if it does not hold
    needs_runs: bool = True  #: skipped where a run cannot be read
    severity: Severity = "error"
    find: _Find  #: one line for each problem


class Texts(TypedDict):
    """What describes a check besides its id and title."""

    why: str
    hint: str
    needs_runs: NotRequired[bool]
    severity: NotRequired[Severity]


def check(rule: str, **texts: Unpack[Texts]) -> Callable[[_Find], Check]:
    """Decorate a function from a record to its problems; `rule` is the id, a space and the title."""
    id, title = rule.split(" ", 1)
    return lambda find: Check(id=id, title=title, find=find, **texts)


def check_run(rule: str, **texts: Unpack[Texts]) -> Callable[[_FindOfRun[Record]], Check]:
    """Decorate a function from one finished run and its record to the problems of that run."""
    return lambda find: check(rule, **texts)(partial(_problems_of_finished, find))


def _problems_of_finished(find: _FindOfRun[Record], record: Record) -> Iterator[str]:
    if not record.finished:
        raise Skip("no run finished")
    yield from problems_of([(run, record) for run in record.finished], find)


def problems_of(runs: Iterable[tuple[Run, _Facts]], find: _FindOfRun[_Facts]) -> Iterator[str]:
    """Yield the problems of each run, after its folder's name.

    Raises:
        Skip: the first one raised, if some run was skipped and no run has a problem.
    """
    skipped: list[Skip] = []
    found = False
    for run, facts in runs:
        try:
            for problem in find(run, facts):
                found = True
                yield f"{run.folder}: {problem}"
        except Skip as skip:
            skipped.append(Skip(f"{run.folder}: {skip}"))
    if skipped and not found:
        raise skipped[0]
