"""A budget of one or several runs: wall time, money, or floating-point operations. An instrument, which no recipe sees.

What was spent follows from the logs below a folder, so neither a kill nor `--resume` refills it.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple, Self

import msgspec

from speedrun.base import runlog
from speedrun.base.console import duration
from speedrun.base.errors import SpeedrunError, Terminated, UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_NUMBER = r"(\d+(?:\.\d+)?(?:e\+?\d+)?)"
_FORM = re.compile(rf"{_NUMBER}(s|m|h|d|flop)|\${_NUMBER}(?: at \${_NUMBER}/h)?")


class Budget(msgspec.Struct, frozen=True):
    """What runs may take together."""

    limit: float
    unit: Literal["s", "$", "flop"]
    dollars_per_hour: float = 0.0  #: of all devices of a run together; 0: not known yet
    spent: float = 0.0  #: by earlier runs

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the budget that `20m`, `$5`, `$5 at $20/h` or `1e15flop` names."""
        if (found := _FORM.fullmatch(text)) is None or not float(found[1] or found[3]):
            need = "need a time (90s, 20m, 1.5h, 2d), dollars ('$5') or operations (1e15flop), more than zero"
            raise UsageError(f"--budget {text!r}; {need}")
        if found[3]:
            return cls(float(found[3]), "$", float(found[4] or 0))
        return cls(float(found[1]) * _SECONDS.get(found[2], 1), "flop" if found[2] == "flop" else "s")

    def __str__(self) -> str:
        """Return a text that `parse` takes."""
        if self.unit == "$":
            return f"${self.limit:.6g} at ${self.dollars_per_hour:.6g}/h"
        return f"{self.limit:.6g}{self.unit}"

    def charge(self, seconds: float, flops: float) -> float:
        """Return what a run costs by its wall time and its operations, in the budget's unit; nothing else does."""
        return {"s": seconds, "$": seconds * self.dollars_per_hour / 3600, "flop": flops}[self.unit]

    def told(self, amount: float) -> str:
        """Return an amount in words."""
        if self.unit == "s":
            return duration(amount)
        return f"${amount:,.2f}" if self.unit == "$" else f"{amount:.3g} flop"

    def cost(self, lines: Sequence[runlog.Line]) -> float:
        """Return what a run cost by its log, from the start of its process to the last line."""
        log_s, meter = (lines[-1].t_mono_ns - lines[0].t_mono_ns) / 1e9, Meter()
        for line in lines:
            meter.take(line.event)
        return self.charge(log_s + sum(one.start_s for one in stated(lines)), meter.flops)


class Meter:
    """Counts the operations of training, at the rate for a token that the run's plan states."""

    flops = _of_token = 0.0

    def take(self, event: runlog.AnyEvent) -> None:
        """Take the next event of the log."""
        if isinstance(event, runlog.Plan):
            self._of_token = event.flops_per_token
        elif isinstance(event, runlog.Step):
            self.flops += event.batch_tokens * self._of_token


def stated(lines: Sequence[runlog.Line]) -> list[runlog.Budget]:
    """Return what a log says of its budget."""
    return [line.event for line in lines if isinstance(line.event, runlog.Budget)]


class Purse(NamedTuple):
    """A budget, and the folder below which all is that it pays."""

    folder: Path
    budget: Budget

    def left(self, exit_code: int = Terminated.exit_code) -> Budget:
        """Return the budget with what is spent; raise SpeedrunError if a run like the finished ones would exceed it."""
        logs, finished = _logs(self.folder), []
        spent = sum(costs := [self.budget.cost(lines) for lines in logs])
        for lines, one in zip(logs, costs, strict=True):
            if isinstance(last := lines[-1].event, runlog.RunEnd) and last.status == "finished":
                finished.append(one)
        planned = fmean(finished) if finished else 0.0
        if spent + planned > self.budget.limit or spent == self.budget.limit:
            told = self.budget.told
            found = f"spent {told(spent)} of {self.budget}" + f", and a run takes {told(planned)}" * (
                planned > 0
            )
            raise SpeedrunError(f"{found}; --resume {self.folder} with a larger --budget goes on", exit_code)
        return msgspec.structs.replace(self.budget, spent=spent)


def purse_of(folder: Path, asked: str | None, declared: str = "") -> Purse | None:
    """Return the purse of runs that go on: as asked now, else as the newest run had it, else as declared, if any."""
    texts = [declared, *(one.limit for lines in _logs(folder) for one in stated(lines))]
    if not (text := asked or texts[-1]):
        return None
    budget = Budget.parse(text)
    if budget.unit == "$" and not budget.dollars_per_hour:
        raise UsageError(f"--budget {text!r} has no price; write '{text} at $20/h', for all devices together")
    return Purse(folder, budget)


def _logs(folder: Path) -> list[list[runlog.Line]]:
    """Return the logs below a folder, the oldest first."""
    found = [lines for path in folder.glob("**/metrics.jsonl") if (lines := [*runlog.read(path)])]
    return sorted(found, key=lambda lines: lines[0].t_utc)
