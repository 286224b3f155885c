"""What a batch on a track will take before it begins: minutes, money, and gigabytes of disk and network.

Minutes come from records where one was made here of the same recipe on the same kind of device, else from the plan's
arithmetic. What nobody has measured is said to be a guess.
"""

from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from speedrun.data import overview
from speedrun.ground.console import duration, quantity
from speedrun.ground.track import Track
from speedrun.ledger import format, runfile
from speedrun.predict.plan import Plan
from speedrun.science.recipe import Recipe

#: Of a run by arithmetic, beside steps and validations: start, compile, warm-up, plots. A guess: no GPU has run it. On
#: two CPU cores the programs of record 21 take 4 to 14 s each to compile; on GPUs forms of products are tried besides.
UNTIMED_S = 120.0
#: A forward pass by a training step, for the same tokens.
_FORWARD = 1 / 3


Basis = Literal["records", "arithmetic", "unknown"]


class Budget(msgspec.Struct, frozen=True):
    """A batch on a track."""

    track: str
    num_runs: int
    num_devices: int
    run_s: float | None  #: one run, from its start to its card; None where nobody knows
    train_s: float | None  #: of it, what the clock counts
    basis: Basis  #: where both are from
    fetch_bytes: int  #: data that is not here yet
    disk_bytes: int  #: that and what the runs write
    dollars_per_hour: float | None  #: of one device; None: nobody asked

    @property
    def total_s(self) -> float | None:
        """Of all runs, one after the other."""
        return None if self.run_s is None else self.num_runs * self.run_s

    @property
    def dollars(self) -> float | None:
        """For all devices while the runs last; simulated ones cost nothing."""
        if self.total_s is None or self.dollars_per_hour is None:
            return None
        return self.total_s * self.num_devices * self.dollars_per_hour / 3600


def budget(
    track: Track, recipe: Recipe, num_runs: int, records: Path, plan: Plan | None, *, dollars: float | None
) -> Budget:
    """What so many runs of a recipe take.

    Args:
        track: its rules, and the data that may be missing.
        recipe: what is trained.
        num_runs: of the batch.
        records: a folder of records, `<track>/<record>/`.
        plan: the recipe on the device it will run on; None where that is a CPU.
        dollars: of one device and hour; None: not asked.
    """
    took = _of_records(track, recipe, records, plan) or _of_plan(track, plan)
    return Budget(
        track=track.id,
        num_runs=num_runs,
        num_devices=0 if plan is None else plan.num_devices,
        run_s=took.run_s,
        train_s=took.train_s,
        basis=took.basis,
        fetch_bytes=overview.to_fetch_bytes(track),
        disk_bytes=overview.disk_bytes(track),
        dollars_per_hour=dollars,
    )


class _Took(NamedTuple):
    """One run."""

    run_s: float | None
    train_s: float | None
    basis: Basis


def _of_records(track: Track, recipe: Recipe, records: Path, plan: Plan | None) -> _Took | None:
    """The mean of what records of this track and recipe took on these devices; steps count as tokens do."""
    found = []
    for path in sorted((records / track.name).glob("*/summary.json")):
        try:
            summary = format.decode(path.read_bytes(), format.Summary)
            manifest = format.decode((path.parent / "manifest.json").read_bytes(), format.Manifest)
        except (OSError, runfile.FormatError):
            continue  # the validator tells what is wrong with it
        train_s, wall_s = summary.train_time_s_mean, summary.cold_wall_s_mean
        kind, num_devices = manifest.hardware.device_kind, manifest.hardware.num_devices
        here = kind == "cpu" if plan is None else (kind, num_devices) == (plan.device, plan.num_devices)
        same = here and manifest.recipe.name == recipe.name
        if same and train_s is not None and wall_s is not None and summary.num_tokens > 0:
            ours_s = train_s * recipe.total_tokens / summary.num_tokens
            found.append((wall_s - train_s + ours_s, ours_s))
    if not found:
        return None
    return _Took(fmean(run_s for run_s, _ in found), fmean(train_s for _, train_s in found), "records")


def _of_plan(track: Track, plan: Plan | None) -> _Took:
    """Steps by the plan; a validated token passes forward only."""
    if plan is None:
        return _Took(None, None, "unknown")
    num_steps = sum(stage.num_steps for stage in plan.stages)
    num_tokens = sum(stage.num_steps * stage.batch_tokens for stage in plan.stages)
    num_vals = 1 + sum(track.validates_at(step) for step in range(num_steps))
    share = _FORWARD * num_vals * track.data.val_tokens / num_tokens
    return _Took(plan.total_s * (1 + share) + UNTIMED_S, plan.total_s, "arithmetic")


def said(budget: Budget, error: float) -> list[str]:
    """For people.

    Args:
        budget: to be told.
        error: of the arithmetic, relative.
    """
    data = f"{quantity(budget.fetch_bytes, 'B')} to fetch" if budget.fetch_bytes else "nothing to fetch"
    disk = f"data   {data} | {quantity(budget.disk_bytes, 'B')} of disk"
    if budget.run_s is None or budget.total_s is None or budget.train_s is None:
        return [disk, f"batch  {budget.num_runs} runs | nobody knows yet how long one takes here"]
    clock = f"{duration(budget.train_s)} of them on the clock"
    how = {
        "records": "as the records here took",
        "arithmetic": f"+-{error:.0%} by arithmetic, {UNTIMED_S:.0f} s of each run a guess",
    }[budget.basis]
    cost = (
        f" | ${budget.dollars:,.2f} at ${budget.dollars_per_hour:.2f} an hour and GPU, without fetching"
        if budget.num_devices and budget.dollars is not None
        else ""
    )
    runs = f"{budget.num_runs} runs of {duration(budget.run_s)}, {clock}"
    return [disk, f"batch  {runs} | about {duration(budget.total_s)} in all, {how}{cost}"]
