"""Curves of other people's runs, for comparison with our records. They are never ranked.

Logs from elsewhere have no seed, no digest of the data and no chain of hashes, so none of them can become a `Record`. A
source is one imported file; it may hold many runs. Losses are nats per token. Times are seconds on the clock of whoever
made the log; what that clock counted is unknown.

Each dialect turns its validations into `Reading`s. The rules for their order are the same for all:

- A loss that is not finite is kept as None and reported.
- A reading that repeats the one before is dropped: a console and a log file may have been joined.
- A step at or below the first step of the run starts the next run. Any other step that does not rise is left out.
- A time that goes back is left out and its loss is kept, except before step 11: the oldest scripts of the speedrun
  restarted their clock after ten steps.
- A run with the same validations as an earlier run of the file is a copy and left out.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from speedrun.ground.console import clean

MOST_RUNS = 20_000
_MOST_PROBLEMS = 100
_FIRST_STEPS = 11  #: before the clock restarts
_NAME_LIMIT = 200  #: characters
_MOST = 1e12  #: of a loss, of seconds


class Point(msgspec.Struct, frozen=True, omit_defaults=True):
    """One loss of a curve."""

    step: int  #: steps done
    loss: float | None  #: None where it was not finite
    train_time_s: float | None = None  #: None where the log has none, or one that goes back


class Problem(msgspec.Struct, frozen=True):
    """A line that could not be taken as it is, and what was done with it."""

    line: int  #: from 1
    message: str


class ContextRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run of a source."""

    name: str
    num_steps: int | None  #: planned; the last validation may come earlier
    validations: tuple[Point, ...]
    final_loss: float | None
    train_time_s: float | None  #: at the last validation


class Context(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="schema", tag="speedrun.context/1"):
    """The contents of one file."""

    source: str  #: its name, without folders
    sha256: str  #: of the file, before decompression
    runs: tuple[ContextRun, ...]
    problems: tuple[Problem, ...] = ()  #: the first ones
    num_problems: int = 0  #: all of them


def can_identify(points: Sequence[Point]) -> bool:
    """Whether two runs with these validations are copies; a single loss without a time may be equal by chance."""
    return len(points) > 1 or any(point.train_time_s is not None for point in points)


class Reading(NamedTuple):
    """A validation, as a line of a log has it."""

    line: int
    step: int
    num_steps: int | None
    loss: float
    train_time_s: float | None


class Problems:
    """Problems by line: the first hundred, and the number of all."""

    def __init__(self) -> None:
        self.kept: list[Problem] = []
        self.count = 0

    def add(self, line: int, message: str) -> None:
        """Add one; the message may quote the file."""
        self.count += 1
        if len(self.kept) < _MOST_PROBLEMS:
            self.kept.append(Problem(line, clean(message, limit=160)))


class _Run:
    """One run while it is read."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.num_steps: int | None = None
        self.points: list[Point] = []
        self._time_s = 0.0  #: of the last reading

    def take(self, reading: Reading, problems: Problems) -> None:
        line, step, num_steps, loss, time_s = reading
        if self.points and step <= self.points[-1].step:
            problems.add(line, f"step {step} comes after step {self.points[-1].step}; left out")
            return
        if not math.isfinite(loss):
            problems.add(line, f"the loss of step {step} is {loss}")
        if time_s is not None and time_s < self._time_s and step > _FIRST_STEPS:
            problems.add(
                line, f"the time of step {step} goes back from {self._time_s} to {time_s} s; left out"
            )
            time_s = None
        point = Point(step, loss if math.isfinite(loss) else None, time_s)
        if not all(0 <= number <= _MOST for number in (point.loss, time_s) if number is not None):
            problems.add(line, f"step {step} has numbers out of range; left out")
            return
        self.points.append(point)
        self._time_s = self._time_s if time_s is None else time_s
        self.num_steps = self.num_steps if num_steps is None else num_steps


def runs_of(name: str, readings: Iterable[Reading], problems: Problems) -> list[ContextRun]:
    """Return the runs of one log in order, with names that are safe to print; the second is called `name#2`."""
    read: list[_Run] = []
    last: Reading | None = None
    for reading in readings:
        # NaN is not equal to itself, so texts are compared.
        if last is not None and repr(last[1:]) == repr(reading[1:]):
            continue
        last = reading
        if not read or (read[-1].points and reading.step <= read[-1].points[0].step):
            if len(read) == MOST_RUNS:
                problems.add(reading.line, f"more than {MOST_RUNS:,} runs; the rest is left out")
                break
            read.append(_Run(reading.line))
        read[-1].take(reading, problems)
    runs, seen = [], {}
    for number, one in enumerate(read, 1):
        points = tuple(one.points)
        if can_identify(points) and points in seen:
            problems.add(one.line, f"run {number} of {name} repeats run {seen[points]}; left out")
        elif points:
            seen[points] = number
            shown = clean(name if number == 1 else f"{name}#{number}", limit=_NAME_LIMIT)
            runs.append(ContextRun(shown, one.num_steps, points, points[-1].loss, points[-1].train_time_s))
    return runs
