"""Estimates the time, money, disk and network of a batch.

The time comes from records of the same recipe on the same devices, otherwise from the plan.
"""

from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec

from speedrun.base.console import duration, quantity
from speedrun.base.track import Track
from speedrun.data import overview
from speedrun.plan.estimate import Plan
from speedrun.record.about import summarize
from speedrun.record.reader import load
from speedrun.science.recipe import Recipe

#: Start, compilation, warm-up and plots of a run: a guess, not measured on a GPU. On two CPU cores, each program of
#: record 21 compiles in 4 to 14 s; on GPUs, XLA also tries several forms of each product.
UNTIMED_S = 120.0
#: Cost of a forward pass relative to a training step of the same tokens.
_FORWARD = 1 / 3

Basis = Literal["records", "plan", "unknown"]


class Budget(msgspec.Struct, frozen=True):
    """The cost of a batch on a track; None means unknown."""

    track: str
    num_runs: int
    num_devices: int
    run_s: float | None  #: wall time of one run
    train_s: float | None  #: train time of one run
    basis: Basis  #: the source of both
    total_s: float | None  #: wall time of all runs
    fetch_bytes: int  #: data to download
    disk_bytes: int  #: data, and what the runs write
    dollars_per_hour: float | None  #: of one device
    dollars: float | None  #: of all devices; simulated ones cost nothing


def budget(
    track: Track, recipe: Recipe, num_runs: int, records: Path, plan: Plan | None, *, dollars: float | None
) -> Budget:
    """Return the budget of a batch, from the plan for its devices (None for CPUs) and dollars per device and hour."""
    run_s, train_s, basis = _of_records(track, recipe, records, plan) or (None, None, "unknown")
    if run_s is None and plan is not None:
        num_vals = 1 + sum(track.validates_at(step) for step in range(recipe.num_steps))
        share = _FORWARD * num_vals * track.data.val_tokens / recipe.total_tokens
        run_s, train_s, basis = plan.total_s * (1 + share) + UNTIMED_S, plan.total_s, "plan"
    num_devices = 0 if plan is None else plan.num_devices
    total_s = None if run_s is None else num_runs * run_s
    return Budget(
        track=track.id,
        num_runs=num_runs,
        num_devices=num_devices,
        run_s=run_s,
        train_s=train_s,
        basis=basis,
        total_s=total_s,
        fetch_bytes=overview.to_fetch_bytes(track),
        disk_bytes=overview.disk_bytes(track),
        dollars_per_hour=dollars,
        dollars=None if total_s is None or dollars is None else total_s * num_devices * dollars / 3600,
    )


def _of_records(
    track: Track, recipe: Recipe, records: Path, plan: Plan | None
) -> tuple[float, float, Basis] | None:
    """Return the mean wall and train time of the records, scaled to the recipe's number of tokens."""
    found = []
    for path in sorted((records / track.name).glob("*/source.txt")):
        record = load(path.parent)
        if not record.finished or record.track is None or record.lead.start.recipe != recipe.name:
            continue
        summary, (num_devices, kind) = summarize(record), record.lead.hardware
        train_s, wall_s = summary.train_time_s_mean, summary.cold_wall_s_mean
        here = kind == "cpu" if plan is None else (kind, num_devices) == (plan.device, plan.num_devices)
        if here and train_s is not None and wall_s is not None and summary.num_tokens > 0:
            scaled_s = train_s * recipe.total_tokens / summary.num_tokens
            found.append((wall_s - train_s + scaled_s, scaled_s))
    if not found:
        return None
    return fmean(run_s for run_s, _ in found), fmean(train_s for _, train_s in found), "records"


def lines(budget: Budget, error: float) -> list[str]:
    """Return the budget as text, with the relative error of the plan."""
    data = f"{quantity(budget.fetch_bytes, 'B')} to fetch" if budget.fetch_bytes else "nothing to fetch"
    disk = f"data   {data} | {quantity(budget.disk_bytes, 'B')} of disk"
    runs = f"batch  {budget.num_runs} runs"
    if budget.run_s is None or budget.total_s is None or budget.train_s is None:
        return [disk, f"{runs} | their time is unknown: there is no record of this recipe here, and no plan"]
    basis = {
        "records": "from the records here",
        "plan": f"+-{error:.0%}; {UNTIMED_S:.0f} s of each run are a guess",
    }[budget.basis]
    runs += f" of {duration(budget.run_s)}, {duration(budget.train_s)} on the clock"
    runs += f" | about {duration(budget.total_s)} in all, {basis}"
    if budget.num_devices and budget.dollars is not None:
        price = f"${budget.dollars_per_hour:.2f} per GPU and hour"
        runs += f" | ${budget.dollars:,.2f} at {price}, without fetching"
    return [disk, runs]
