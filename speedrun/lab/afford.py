"""Refuses what is planned to exceed its budget. A child prices it: no recipe enters the process that keeps logs."""

from subprocess import PIPE
from typing import Any

import msgspec

from speedrun.base import subprocesses
from speedrun.base.budget import Budget
from speedrun.base.errors import UsageError
from speedrun.lab.sequential import MOST_PAIRS


def planned(asked: Any, kind: str | None) -> tuple[float | None, float, int]:
    """Return seconds of all runs of a request once programs are kept, None if unknown, operations, and GPUs."""
    with subprocesses.started("speedrun.lab.budget", asked, kind or "", stdout=PIPE) as child:
        said = child.communicate()[0].splitlines()[-1:]
    if child.returncode:
        raise SystemExit(subprocesses.shell_code(child.returncode))
    return msgspec.json.decode(b"".join(said), type=tuple[float | None, float, int])


def afford(asked: Any, kind: str | None, dollars: float | None) -> tuple[Budget, float | None]:
    """Return the budget of a request, with its price, and what is planned; raise UsageError if that exceeds it.

    `dollars` are for an hour of a device. What takes an unknown time may start.
    """
    budget, (seconds, flops, num_gpus) = Budget.parse(asked.budget), planned(asked, kind)
    if budget.unit == "$":
        price = budget.dollars_per_hour or (dollars or 0.0) * num_gpus
        if not price:
            raise UsageError(f"--budget {asked.budget!r} has no price; need --dollars, and a track of GPUs")
        budget = msgspec.structs.replace(budget, dollars_per_hour=price)
    if seconds is None and budget.unit != "flop":
        subprocesses.say(f"warning: how long this takes is not known here; {budget} ends it")
        return budget, None
    if (cost := budget.charge(seconds or 0.0, flops)) > budget.limit:
        raise UsageError(f"{budget.told(cost)} are planned, {budget.told(budget.limit)} allowed; plan less")
    return budget, cost


def pairs(asked: Any, kind: str | None, dollars: float | None) -> int:
    """Return how many times a request fits into its budget, with a tenth to spare; raise UsageError below two."""
    budget, cost = afford(asked, kind, dollars)
    if cost is None or (found := int(budget.limit / cost / 1.1)) < 2:
        said = "unknown" if cost is None else f"less than two; one takes {budget.told(cost)}"
        raise UsageError(f"the number of pairs in {budget} is {said}; allow more, or operations (1e15flop)")
    return min(found, MOST_PAIRS)
