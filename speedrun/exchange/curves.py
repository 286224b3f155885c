"""From readings, line after line, to the runs of a file: where one ends and the next begins, and what cannot be.

Each dialect turns its lines into `Reading`s; the rules for their order are here, once:

- a loss that is not finite is kept as None, and said;
- the same reading twice in a row is one (a console and a log file that were joined);
- a step that falls back to where the run began opens the next run; any other fall leaves the reading out;
- a time that goes back is left out, its loss is kept. Not before step 11: the oldest scripts of the speedrun started
  their clock anew after ten steps;
- a run that tells the same validations as an earlier one of the file, times and all, is a copy and left out.
"""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from speedrun.exchange.context import ContextRun, Point, Problem, context_run, is_telling, plausible
from speedrun.ground.console import clean

MOST_RUNS = 20_000
_MOST_PROBLEMS = 100
_CLOCK_STARTS_ANEW = 11  #: steps


class Reading(NamedTuple):
    """What one line of a log says."""

    line: int
    kind: Literal["val", "train"]
    step: int
    num_steps: int | None
    loss: float
    train_time_s: float | None


class Problems:
    """The first hundred lines with a problem, and how many there are."""

    def __init__(self) -> None:
        self.kept: list[Problem] = []
        self.count = 0

    def add(self, line: int, message: str) -> None:
        """Notes one; the message may quote the file."""
        self.count += 1
        if len(self.kept) < _MOST_PROBLEMS:
            self.kept.append(Problem(line, clean(message, limit=160)))


class _Curves:
    """One run that is being read."""

    def __init__(self, first: Reading) -> None:
        self.line = first.line
        self.num_steps = first.num_steps
        self.points: dict[str, list[Point]] = {"val": [], "train": []}
        self.time_s = {"val": 0.0, "train": 0.0}  #: the last ones told

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
        if time_s is not None and time_s < before_s and step > _CLOCK_STARTS_ANEW:
            problems.add(
                reading.line, f"the time of step {step} goes back from {before_s} to {time_s} s; left out"
            )
            time_s = None
        point = Point(step, loss, time_s)
        if not plausible(point):
            problems.add(reading.line, f"step {step} has numbers that no log can tell; left out")
            return
        points.append(point)
        self.time_s[reading.kind] = before_s if time_s is None else time_s
        self.num_steps = self.num_steps if reading.num_steps is None else reading.num_steps


def runs_of(name: str, readings: Iterable[Reading], problems: Problems) -> list[ContextRun]:
    """The runs that one log holds, in its order; the second is called `name#2`."""
    logs: list[_Curves] = []
    last: Reading | None = None
    for reading in readings:
        if last is not None and _same(last, reading):
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
        if is_telling(curves[0]) and curves in seen:
            problems.add(log.line, f"run {number} of {name} repeats run {seen[curves]}; left out")
        elif any(curves):
            seen[curves] = number
            runs.append(context_run(name if number == 1 else f"{name}#{number}", log.num_steps, *curves))
    return runs


def _same(a: Reading, b: Reading) -> bool:
    """Equal but for the line; NaN is not equal to itself, so texts are compared."""
    return repr(a[1:]) == repr(b[1:])
