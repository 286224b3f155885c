"""The ghost of a record: the time and loss of its mean run after the same number of training tokens.

Straight lines join the steps, so batch sizes may differ. Both losses are means over the last twentieth of the ghost's
tokens: both runs read the same text there, so most of the noise cancels.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np

from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.base.runlog import Step
from speedrun.board.leaderboard import PROVEN, read_built
from speedrun.record.logged_run import Run
from speedrun.record.reader import load

_STRETCH = 0.05  #: of the ghost's tokens
_RECORDS = Path("records")


class Curve:
    """Train time and loss over training tokens, with straight lines between steps."""

    def __init__(self, tokens: int) -> None:
        """Start after this number of tokens, with the clock at zero."""
        self.tokens = [tokens]
        self._time_s, self._nats = [0.0], [0.0]

    def add(self, tokens: int, time_s: float, loss: float) -> None:
        """Add a step: the tokens and train time at its end, and the mean loss of its batch."""
        self._nats.append(self._nats[-1] + loss * (tokens - self.tokens[-1]))
        self._time_s.append(time_s)
        self.tokens.append(tokens)

    def time_s(self, tokens: float) -> float:
        """Return the train time after a number of tokens."""
        return float(np.interp(tokens, self.tokens, self._time_s))

    def loss(self, start: float, stop: float) -> float:
        """Return the mean loss from one number of tokens to another."""
        before, after = np.interp((start, stop), self.tokens, self._nats)
        return float(after - before) / (stop - start)


class Ghost:
    """A function from each step of a run to the text on its console line."""

    def __init__(self, record: Path, runs: list[Run]) -> None:
        """Average runs that saw the same batches."""
        self.record = record
        self._num_runs, self._curve = len(runs), Curve(0)
        for steps in zip(*(run.steps for run in runs), strict=True):
            time_s = fmean(step.train_time_s for step in steps)
            self._curve.add(steps[0].tokens_seen, time_s, fmean(step.loss for step in steps))
        self._last = self._curve.tokens[-1]
        self._stretch = max(1, round(_STRETCH * self._last))
        self._own: Curve | None = None

    @property
    def legend(self) -> str:
        """The meaning of the numbers, in one line."""
        runs = f"{self._num_runs} run{'s' * (self._num_runs > 1)}"
        name = f"ghost {self.record} ({runs}, {self._curve.time_s(self._last):.2f} s)"
        loss = f"loss: mean of the last {self._stretch:,} tokens"
        return f"{name} | below zero: ahead of it at equal tokens | {loss}"

    def points(self) -> dict[str, list[float]]:
        """Return tokens and train time after each step, and the mean loss of its batch."""
        seen = self._curve.tokens
        return {
            "tokens": [float(tokens) for tokens in seen[1:]],
            "time_s": [self._curve.time_s(tokens) for tokens in seen[1:]],
            "loss": [self._curve.loss(before, after) for before, after in pairwise(seen)],
        }

    def __call__(self, step: Step) -> str:
        """Return the differences in time and loss after a step, negative if the run is ahead."""
        if self._own is None:
            self._own = Curve(step.tokens_seen - step.batch_tokens)
        seen, own = step.tokens_seen, self._own
        own.add(seen, step.train_time_s, step.loss)
        if seen > self._last:
            return "ghost done"
        start = max(own.tokens[0], seen - self._stretch)
        gain_s = step.train_time_s - self._curve.time_s(seen)
        return f"ghost {gain_s:+.1f} s {own.loss(start, seen) - self._curve.loss(start, seen):+.3f}"


def same_batches(runs: Sequence[Run]) -> list[Run]:
    """Return the finished, never resumed runs that saw the same batches as the first of them."""
    whole = [run for run in runs if run.finished and not run.resumed and run.steps]
    return [run for run in whole if _tokens(run) == _tokens(whole[0])]


def _tokens(run: Run) -> list[int]:
    return [step.tokens_seen for step in run.steps]


def read(folder: Path, track: str) -> Ghost:
    """Return the ghost of a record; raise UsageError without a finished run on the track `NAME@VERSION`."""
    try:
        record = load(folder)
        runs = same_batches(record.runs)
        if others := sorted({run.start.track for run in runs} - {track}):
            raise UsageError(f"{folder} is a record of {', '.join(others)}; need one of {track}")
        if not runs:
            why = f": {record.malformed[0]}" if record.malformed else ""
            raise UsageError(f"{folder} has no finished run{why}")
        if any(before >= after for before, after in pairwise([0, *_tokens(runs[0])])):
            raise UsageError(f"{folder}: tokens_seen does not rise with each step")
        return Ghost(folder, runs)
    except (OSError, ArithmeticError) as error:
        raise UsageError(f"{folder} cannot be read: {error}") from None


def best(records: Path, track: str) -> Path | None:
    """Return the fastest qualified record of a track on the built board, or None."""
    board = read_built(records)
    rows = [row for row in (board.of(track) if board else ()) if row.status in PROVEN]
    timed = [(row.train_time_s, row.path) for row in rows if row.train_time_s is not None]
    return records / min(timed)[1] if timed else None


def chosen(choice: str, track: str) -> Ghost | None:
    """Return the ghost of a folder or of the 'best' record; warn and return None if it cannot be read."""
    try:
        folder = best(_RECORDS, track) if choice == "best" else Path(choice)
        return read(folder, track) if folder else None
    except UsageError as error:
        sys.stderr.write(clean(f"warning: no ghost: {error}") + "\n")
        return None
