"""Curves of other people's runs, for comparison with our records. They are never ranked.

Logs from elsewhere have no seed, no digest of the data and no chain of hashes, so none of them can become a `Record`. A
source is one imported file; it may hold many runs. Losses are nats per token. Times are seconds on the clock of whoever
made the log; what that clock counted is unknown.

Each dialect turns its lines into `Reading`s. The rules for their order are the same for all:

- A loss that is not finite is kept as None and reported.
- A reading that repeats the one before is dropped: a console and a log file may have been joined.
- A step at or below the first step of the run starts the next run. Any other step that does not rise is left out.
- A time that goes back is left out and its loss is kept, except before step 11: the oldest scripts of the speedrun
  restarted their clock after ten steps.
- A run with the same validations as an earlier run of the file is a copy and left out.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from speedrun.ground.console import clean

MOST_RUNS = 20_000
#: Of losses and times, as text; short enough to be read.
NUMBER = r"[+-]?[0-9]{1,15}(?:\.[0-9]{0,20})?(?:[eE][+-]?[0-9]{1,3})?"
_MOST_PROBLEMS = 100
_FIRST_STEPS = 11  #: before the clock restarts
_NAME_LIMIT = 200  #: characters
_MOST_STEPS = 10**12
_MOST_NUMBER = 1e12  #: of a loss, of seconds


class Point(msgspec.Struct, frozen=True, omit_defaults=True):
    """One loss of a curve."""

    step: int  #: steps done
    loss: float | None  #: None where it was not finite
    train_time_s: float | None = None  #: None where the log has none, or one that goes back

    @property
    def plausible(self) -> bool:
        """Whether all numbers are in range; NaN and infinity are not."""
        numbers = [number for number in (self.loss, self.train_time_s) if number is not None]
        return 0 <= self.step <= _MOST_STEPS and all(0 <= number <= _MOST_NUMBER for number in numbers)


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
    train_losses: tuple[Point, ...] = ()


class Context(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="schema", tag="speedrun.context/1"):
    """The contents of one file."""

    source: str  #: its name, without folders
    sha256: str  #: of the file, before decompression
    runs: tuple[ContextRun, ...]
    problems: tuple[Problem, ...] = ()  #: the first ones
    num_problems: int = 0  #: all of them


def context_run(
    name: str,
    num_steps: int | None,
    validations: Sequence[Point],
    train_losses: Sequence[Point] = (),
) -> ContextRun:
    """Return a run with its final loss and time, and a name that is safe to print."""
    last = validations[-1] if validations else Point(0, None)
    return ContextRun(
        name=clean(name, limit=_NAME_LIMIT),
        num_steps=num_steps,
        validations=tuple(validations),
        final_loss=last.loss,
        train_time_s=last.train_time_s,
        train_losses=tuple(train_losses),
    )


def can_identify(points: Sequence[Point]) -> bool:
    """Whether two runs with these validations are copies; a single loss without a time may be equal by chance."""
    return len(points) > 1 or any(point.train_time_s is not None for point in points)


class Reading(NamedTuple):
    """One line of a log."""

    line: int
    kind: Literal["val", "train"]
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


class _Curves:
    """One run while it is read."""

    def __init__(self, first: Reading) -> None:
        self.line = first.line
        self.num_steps = first.num_steps
        self.points: dict[str, list[Point]] = {"val": [], "train": []}
        self.time_s = {"val": 0.0, "train": 0.0}  #: of the last reading

    def begins_again(self, reading: Reading) -> bool:
        points = self.points[reading.kind]
        return bool(points) and reading.step <= points[0].step

    def take(self, reading: Reading, problems: Problems) -> None:
        points, step, time_s = self.points[reading.kind], reading.step, reading.train_time_s
        if points and step <= points[-1].step:
            problems.add(reading.line, f"step {step} comes after step {points[-1].step}; left out")
            return
        loss = reading.loss if math.isfinite(reading.loss) else None
        if loss is None:
            problems.add(reading.line, f"the {reading.kind} loss of step {step} is {reading.loss}")
        before_s = self.time_s[reading.kind]
        if time_s is not None and time_s < before_s and step > _FIRST_STEPS:
            problems.add(
                reading.line, f"the time of step {step} goes back from {before_s} to {time_s} s; left out"
            )
            time_s = None
        point = Point(step, loss, time_s)
        if not point.plausible:
            problems.add(reading.line, f"step {step} has numbers out of range; left out")
            return
        points.append(point)
        self.time_s[reading.kind] = before_s if time_s is None else time_s
        self.num_steps = self.num_steps if reading.num_steps is None else reading.num_steps


def runs_of(name: str, readings: Iterable[Reading], problems: Problems) -> list[ContextRun]:
    """Return the runs of one log in order; the second is called `name#2`."""
    logs: list[_Curves] = []
    last: Reading | None = None
    for reading in readings:
        # NaN is not equal to itself, so texts are compared.
        if last is not None and repr(last[1:]) == repr(reading[1:]):
            continue
        last = reading
        if not logs or logs[-1].begins_again(reading):
            if len(logs) == MOST_RUNS:
                problems.add(reading.line, f"more than {MOST_RUNS:,} runs; the rest is left out")
                break
            logs.append(_Curves(reading))
        logs[-1].take(reading, problems)
    runs, seen = [], {}
    for number, log in enumerate(logs, 1):
        curves = tuple(log.points["val"]), tuple(log.points["train"])
        if can_identify(curves[0]) and curves in seen:
            problems.add(log.line, f"run {number} of {name} repeats run {seen[curves]}; left out")
        elif any(curves):
            seen[curves] = number
            shown = name if number == 1 else f"{name}#{number}"
            runs.append(context_run(shown, log.num_steps, *curves))
    return runs
