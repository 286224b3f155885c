"""Refuses what is planned to exceed its budget. A child prices it: no recipe enters the process that keeps logs."""

from subprocess import PIPE
from typing import Any

import msgspec

from speedrun.base import subprocesses
from speedrun.base.budget import Budget
from speedrun.base.errors import UsageError


class Planned(msgspec.Struct, frozen=True):
    """What all runs of a request take."""

    seconds: float | None  #: wall time; None: unknown
    flops: float  #: of training
    num_devices: int  #: 0: simulated


def planned(asked: Any, kind: str | None) -> Planned:
    """Price a request as `--dry-run` does."""
    with subprocesses.started("speedrun.lab.budget", asked, kind or "", stdout=PIPE) as child:
        said = child.communicate()[0]
    if child.returncode:
        raise SystemExit(subprocesses.shell_code(child.returncode))
    return msgspec.json.decode(said, type=Planned)


def afford(asked: Any, kind: str | None, dollars: float | None) -> Budget:
    """Return the budget of a request, with its price; raise UsageError if the plan exceeds it.

    `dollars` are for an hour of a device. What takes an unknown time may start.
    """
    budget, found = Budget.parse(asked.budget), planned(asked, kind)
    if budget.unit == "$" and not budget.dollars_per_hour:
        if not dollars or not found.num_devices:
            got = f"--budget {asked.budget!r} on {asked.config.track}, {found.num_devices} GPUs at ${dollars or 0:g}"
            raise UsageError(f"{got}; need --dollars, for a GPU and hour, or a budget of time or operations")
        budget = msgspec.structs.replace(budget, dollars_per_hour=dollars * found.num_devices)
    if found.seconds is None and budget.unit != "flop":
        subprocesses.say(f"warning: how long this takes is not known here; {budget} ends it")
    elif (cost := budget.charge(found.seconds or 0.0, found.flops)) > budget.limit:
        hint = "ask for fewer or shorter runs, or allow more; --dry-run shows what they take"
        raise UsageError(f"{budget.told(cost)} are planned, {budget} is allowed; {hint}")
    return budget
