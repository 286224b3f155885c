"""The ghost of a record: where it stood after as many training tokens, for a run that races it.

Runs are compared at equal tokens, between whose steps the ghost moves in a straight line, so that batches of another
size are no hindrance. The loss of one step is mostly noise. Both sides are therefore means over the same stretch of
tokens, a twentieth of the ghost's; where data come in one order, as on every track, both read the same text there,
and its noise cancels. The ghost is the mean of all runs of its record.

Everything is read before the run. During it a step costs some microseconds, and nothing of this enters a log.
"""

from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import msgspec

from speedrun.board.standings import Board
from speedrun.ground.errors import UsageError
from speedrun.ground.runlog import Step
from speedrun.ledger.record import load
from speedrun.ledger.run import Run

BOARD = "leaderboard.json"
_STRETCH = 0.05  #: of the ghost's tokens


class Curve:
    """Train time and loss over training tokens."""

    def __init__(self, tokens: int) -> None:
        """Begins after so many tokens, with a clock at zero."""
        self._tokens, self._time_s, self._nats = [tokens], [0.0], [0.0]

    @property
    def first(self) -> int:
        """Tokens before the first step."""
        return self._tokens[0]

    @property
    def last(self) -> int:
        """Tokens after the last step."""
        return self._tokens[-1]

    def add(self, tokens: int, time_s: float, loss: float) -> None:
        """One step: tokens and seconds after it, and the loss of what it saw."""
        self._nats.append(self._nats[-1] + loss * (tokens - self._tokens[-1]))
        self._time_s.append(time_s)
        self._tokens.append(tokens)

    def time_s(self, tokens: float) -> float:
        """Train time after so many tokens, between `first` and `last`."""
        return self._between(self._time_s, tokens)

    def loss(self, start: float, stop: float) -> float:
        """Mean loss of a stretch of tokens."""
        return (self._between(self._nats, stop) - self._between(self._nats, start)) / (stop - start)

    def _between(self, values: list[float], tokens: float) -> float:
        """On the straight line between two steps."""
        right = min(max(1, bisect_left(self._tokens, tokens)), len(self._tokens) - 1)
        before, after = self._tokens[right - 1], self._tokens[right]
        share = (tokens - before) / (after - before)
        return values[right - 1] + share * (values[right] - values[right - 1])


class Ghost:
    """What the console shows beside a step: seconds and loss against a record, below zero where the run is ahead."""

    def __init__(self, record: Path, runs: list[Run]) -> None:
        """The mean of runs that saw the same batches: see `read`."""
        self.record = record
        self._num_runs = len(runs)
        self._curve = Curve(0)
        for steps in zip(*(run.steps for run in runs), strict=True):
            time_s = fmean(step.train_time_s for step in steps)
            self._curve.add(steps[0].tokens_seen, time_s, fmean(step.loss for step in steps))
        self._stretch = max(1, round(_STRETCH * self._curve.last))
        self._own: Curve | None = None

    @property
    def legend(self) -> str:
        """What the numbers mean, in one line."""
        runs = f"{self._num_runs} run{'s' * (self._num_runs > 1)}"
        return (
            f"ghost {self.record} ({runs}, {self._curve.time_s(self._curve.last):.2f} s) | below zero: ahead of it "
            f"at equal tokens | loss: mean of the last {self._stretch:,} tokens"
        )

    def __call__(self, step: Step) -> str:
        """The two differences after a step; every step of a run has to be told, in order."""
        if self._own is None:
            self._own = Curve(step.tokens_seen - step.batch_tokens)
        seen, own = step.tokens_seen, self._own
        own.add(seen, step.train_time_s, step.loss)
        if seen > self._curve.last:
            return "ghost done"
        start = max(own.first, seen - self._stretch)
        gain_s = step.train_time_s - self._curve.time_s(seen)
        return f"ghost {gain_s:+.1f} s {own.loss(start, seen) - self._curve.loss(start, seen):+.3f}"


def read(folder: Path, track: str) -> Ghost:
    """The ghost of a record.

    Args:
        folder: any record, of any standing.
        track: name and version; on others the time or the text is another.

    Raises:
        UsageError: no record of that track, or none with a finished run.
    """
    try:
        record = load(folder)
        whole = [run for run in record.finished if run.steps and not run.resumed]
        runs = [run for run in whole if _tokens(run) == _tokens(whole[0])]
        if others := sorted({run.start.track for run in runs} - {track}):
            raise UsageError(f"{folder} is of {', '.join(others)}, not of {track}")
        if not runs:
            why = f": {record.malformed[0]}" if record.malformed else ""
            raise UsageError(f"{folder} has no finished run{why}")
        if any(before >= after for before, after in pairwise([0, *_tokens(runs[0])])):
            raise UsageError(f"{folder}: its count of tokens does not rise with each step")
        return Ghost(folder, runs)
    except (OSError, ArithmeticError) as error:
        raise UsageError(f"{folder} cannot be read: {error}") from None


def _tokens(run: Run) -> list[int]:
    return [step.tokens_seen for step in run.steps]


def best(records: Path, track: str) -> Path | None:
    """The qualified record of a track with the lowest mean train time, as the board in a folder of records tells it.

    Raises:
        UsageError: if there is a board that cannot be read.
    """
    path = records / BOARD
    try:
        board = msgspec.json.decode(path.read_bytes(), type=Board)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {error}; 'speedrun leaderboard build' makes it anew") from None
    rows = [row for row in board.of(track) if row.standing == "qualified" and row.train_time_s is not None]
    return records / min(rows, key=lambda row: row.train_time_s or 0.0).path if rows else None
