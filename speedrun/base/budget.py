"""A budget of one or several runs: wall time, money, or floating-point operations. An instrument, which no recipe sees.

What was spent follows from the logs below a folder, and the seconds that none of them has: nothing refills it.
"""

import math
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, Self

import msgspec

from speedrun.base import runlog
from speedrun.base.atomic_files import read_regular, write_whole
from speedrun.base.clock import Stopwatch, now
from speedrun.base.console import duration
from speedrun.base.errors import SpeedrunError, Terminated, UsageError, translate_read_errors

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
GRACE_S = 60.0  #: for a step and the end of a run, when a budget is spent
_UNLOGGED_S = 5.0  #: between two lines of a log, before they are kept
_FORM = re.compile(rf"{_NUMBER}(s|m|h|d|flop)|\${_NUMBER}(?: at \${_NUMBER}/h)?")


class Budget(msgspec.Struct, frozen=True):
    """What runs may take together."""

    limit: float
    unit: Literal["s", "$", "flop"]
    dollars_per_hour: float = 0.0  #: of all devices of a run together; 0: not known yet
    spent: float = 0.0  #: by earlier runs
    folder: Path | None = None  #: keeps the seconds that no log has; None: there is nothing to resume

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the budget that `20m`, `$5`, `$5 at $20/h` or `1e15flop` names."""
        if (found := _FORM.fullmatch(text)) is None or not 0 < float(found[1] or found[3]) < 1e300:
            raise UsageError(f"--budget {text!r}; need 90s, 20m, 1.5h, 2d, '$5' or 1e15flop, more than zero")
        if found[3]:
            return cls(float(found[3]), "$", float(found[4] or 0))
        return cls(float(found[1]) * _SECONDS.get(found[2], 1), "flop" if found[2] == "flop" else "s")

    def __str__(self) -> str:  # `parse` takes it
        if self.unit == "$":
            return f"${self.limit:.6g} at ${self.dollars_per_hour:.6g}/h"
        return f"{self.limit:.6g}{self.unit}"

    def told(self, amount: float) -> str:
        """Return an amount in words."""
        if self.unit == "s":
            return duration(amount)
        return f"${amount:.2f}" if self.unit == "$" else f"{amount:.3g} flop"

    def charge(self, seconds: float, flops: float) -> float:
        """Return what wall time and operations cost, in the budget's unit. Nothing else prices them."""
        return {"s": seconds, "$": seconds * self.dollars_per_hour / 3600, "flop": flops}[self.unit]


def flops(newest: Mapping[type, Any]) -> float:
    """Return the operations of the steps so far, at the rate for a token that the run's plan states."""
    step, origin, plan = map(newest.get, (runlog.Step, runlog.Resume, runlog.Plan))
    seen = step.tokens_seen - (origin.tokens_seen if origin else 0) if step else 0
    return seen * plan.flops_per_token if plan else 0.0


class Meter:
    """Counts what a run takes of its budget, if it has one. What is killed between two lines of a log is paid, too."""

    def __init__(self, budget: Budget | None) -> None:
        self.budget, self.over = budget, ""  #: `over` tells that it is spent
        self.watch, self._since, self._ends_by_s = Stopwatch(), Stopwatch(), math.inf
        self._file = budget and budget.folder and budget.folder / f"unlogged-{now().mono_ns}.txt"

    def logged(self) -> None:
        """Begin anew to count what the log does not have."""
        self._since = Stopwatch()
        if self._file:
            with suppress(OSError):  # then it is paid for twice
                self._file.unlink(missing_ok=True)

    def keep_unlogged(self, *, has_log: bool) -> None:
        """Keep the seconds that the log does not have in a file, if they are many."""
        if self._file and self._since.seconds > _UNLOGGED_S * has_log:
            with suppress(SpeedrunError):  # the log fails, too, and says so
                write_whole(self._file, b"%.3f" % self._since.seconds)

    def signal(self, flops: float, *, may_stay: bool) -> int:
        """Return SIGTERM once, if the budget is spent, SIGKILL a minute later, or an hour if it `may_stay`; else 0."""
        if (budget := self.budget) is None:
            return 0
        spent = budget.spent + budget.charge(seconds := self.watch.seconds, flops)
        if not self.over and spent > budget.limit:
            self.over = f"spent {budget.told(spent)} of {budget}"
            self._ends_by_s = seconds + GRACE_S
            return signal.SIGTERM
        return 0 if seconds < self._ends_by_s + 3600 * may_stay else signal.SIGKILL


class Purse(NamedTuple):
    """A budget, and the folder below which all is that it pays."""

    folder: Path
    budget: Budget

    def costs(self) -> tuple[float, float]:
        """Return what all runs have cost, and the mean of the finished ones; 0 without any."""
        spent, finished = 0.0, list[float]()
        for one in self.folder.glob("unlogged-[0-9]*.txt"):
            with translate_read_errors(one, "take it out of the folder"):
                spent += self.budget.charge(max(0.0, float(read_regular(one, 64))), 0.0)  # nan counts as 0
        for lines in _logs(self.folder):
            newest: dict[type, Any] = {type(line.event): line.event for line in lines}
            stated, end = newest.get(runlog.Budget), newest.get(runlog.RunEnd)
            log_s = (lines[-1].t_mono_ns - lines[0].t_mono_ns) / 1e9
            spent += (cost := self.budget.charge(log_s + (stated.start_s if stated else 0.0), flops(newest)))
            finished += [cost] if end and end.status == "finished" else []
        return spent, fmean(finished) if finished else 0.0

    def left(self, exit_code: int = Terminated.exit_code) -> Budget:
        """Return the budget with what is spent; raise SpeedrunError if one more like the finished ones exceeds it."""
        (spent, planned), told = self.costs(), self.budget.told
        if spent + planned > self.budget.limit or spent == self.budget.limit:
            another = f"; another run takes {told(planned)}" if planned else ""
            found = f"spent {told(spent)} of {self.budget}{another}"
            raise SpeedrunError(f"{found}; --resume {self.folder} with a larger --budget goes on", exit_code)
        return msgspec.structs.replace(self.budget, spent=spent, folder=self.folder)


def purse_of(folder: Path, asked: str | None, declared: str = "", *, elsewhere: bool = False) -> Purse | None:
    """Return the purse of runs that go on: as asked now, else as the newest run had it, else as declared, if any.

    Raise UsageError for dollars without a price, and for runs `elsewhere`, whose logs are not here.
    """
    events = [line.event for lines in _logs(folder) for line in lines]
    stated = [event.limit for event in events if isinstance(event, runlog.Budget)]
    if not (text := asked or [declared, *stated][-1]):
        return None
    budget = Budget.parse(text)
    if elsewhere or (budget.unit == "$" and not budget.dollars_per_hour):
        raise UsageError(f"budget {text!r}; need runs here, without --on, and a price: '$5 at $20/h'")
    return Purse(folder, budget)


def _logs(folder: Path) -> list[list[runlog.Line]]:
    """Return the logs below a folder, the oldest first; of copies, which have the same first line, the longest."""
    found = dict[bytes, list[runlog.Line]]()
    for path in folder.glob("**/metrics.jsonl"):
        lines = list[runlog.Line]()
        with suppress(msgspec.DecodeError):  # what goes on with the record tells of damage
            lines += runlog.read(path)
        key = msgspec.json.encode(lines[:1])
        found[key] = max(found.get(key, []), lines, key=len)
    return sorted(filter(None, found.values()), key=lambda lines: lines[0].t_utc)
