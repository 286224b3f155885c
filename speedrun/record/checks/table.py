"""The type of a check, the decorators that make one from a function, and comparisons: most checks are tables of them.

A log says most facts twice, or the track says them: `same` and `at_most` compare both, and name what they got and need.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from speedrun.record.logged_run import Run
from speedrun.record.reader import Record


class Skip(Exception):
    """Raised by a check that is skipped for this record; its text is the reason."""


def if_ranked(record: Record, problem: str) -> str:
    """Return the problem if the record's track ranks; otherwise raise Skip."""
    if not record.rules.rules.ranked:
        raise Skip(f"{problem}; this track does not rank")
    return problem


_Facts = TypeVar("_Facts")
_Find = Callable[[Record], Iterable[str]]
_FindOfRun = Callable[[Run, _Facts], Iterable[str]]
_Runs = Literal["runs", "finished", "finished, or skip"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One rule for records. An id never changes its meaning."""

    id: str
    title: str  #: what holds for a good record
    why: str  #: why it matters
    hint: str  #: what to do if it does not hold
    needs_runs: bool = True  #: skipped if a run cannot be read
    #: What decides it before the clock: this machine and its checkout, as `doctor` sees them; the settings of a run;
    #: the declaration of a batch; or nothing.
    before: Literal["", "machine", "run", "batch"] = ""
    severity: Literal["error", "error if ranked", "warning"] = "error"
    find: _Find  #: yields one line for each problem; an empty one is an identity that holds


def same(what: str, got: Any, need: Any, within: float = 0.0) -> str:
    """Return a problem unless two statements of one fact are equal, or at most `within` apart."""
    holds = abs(got - need) <= within if within else got == need
    return "" if holds else f"{what}: got {_shown(got)}, need {_shown(need)}"


def at_most(what: str, got: float, most: float) -> str:
    """Return a problem if a number exceeds the one that bounds it."""
    return "" if got <= most else f"{what}: got {_shown(got)}, need at most {_shown(most)}"


def _shown(fact: object) -> str:
    return f"{fact:,}" if type(fact) in (int, float) else repr(fact)


def check(rule: str, **fields: Any) -> Callable[[_Find], Check]:
    """Decorate a function that returns the problems of a record; `rule` is the id, a space and the title."""
    id, title = rule.split(" ", 1)
    return lambda find: Check(id=id, title=title, find=lambda record: filter(None, find(record)), **fields)


def check_run(
    rule: str, *, of: _Runs = "finished, or skip", **fields: Any
) -> Callable[[_FindOfRun[Record]], Check]:
    """Decorate a function that returns the problems of one run, and ask it of each run that is named."""

    def find_all(find: _FindOfRun[Record], record: Record) -> Iterator[str]:
        runs = record.runs if of == "runs" else record.finished
        if not runs and of == "finished, or skip":
            raise Skip("no run finished")
        yield from problems_of([(run, record) for run in runs], find)

    return lambda find: check(rule, **fields)(partial(find_all, find))


def problems_of(runs: Iterable[tuple[Run, _Facts]], find: _FindOfRun[_Facts]) -> Iterator[str]:
    """Yield the problems of each run after its folder name; raise the first Skip if there are none."""
    skipped: list[Skip] = []
    found = False
    for run, facts in runs:
        try:
            for problem in filter(None, find(run, facts)):
                found = True
                yield f"{run.folder}: {problem}"
        except Skip as skip:
            skipped.append(Skip(f"{run.folder}: {skip}"))
    if skipped and not found:
        raise skipped[0]
