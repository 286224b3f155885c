"""Says before runs start what they take: time, money, disk, network, and how likely they prove their target.

The time comes from records of the same recipe on the same devices, otherwise from the plan. What is priced is the very
request that would be declared.

python -m speedrun.lab.budget REQUEST.json KIND      started by `lab.afford`; prints what it finds
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, cast

import msgspec

from speedrun import recipes
from speedrun.base import accelerators, subprocesses
from speedrun.base import track as tracks
from speedrun.base.console import duration, quantity
from speedrun.base.output import reported
from speedrun.base.track import Track
from speedrun.data import overview
from speedrun.lab import declare_experiment
from speedrun.lab.experiments import Request
from speedrun.plan import estimate as planning
from speedrun.plan.estimate import Plan
from speedrun.record.batch import looks as looks_of
from speedrun.record.reader import load
from speedrun.record.summary import summarize
from speedrun.science.params import SHARDS
from speedrun.science.recipe import Recipe, describe
from speedrun.train.batch import BatchRequest, Prospect, num_runs, prospect
from speedrun.train.memory import flops_per_token
from speedrun.train.run_config import RunConfig, decoded

#: Start, kept programs, warm-up and plots of a run: a guess, not measured on a GPU.
UNTIMED_S = 120.0
#: For a program that is not kept: the mean of 15, 38 to 144 s, on one H100 (docs/benchmarks/2026-11-26-h100).
COMPILE_S = 86.0


class Row(msgspec.Struct, frozen=True):
    """What a number of runs takes; None means unknown."""

    num_runs: int
    chance: float | None  #: of a proof; None also where nothing is proven
    total_s: float | None  #: wall time of the node
    dollars: float | None  #: of all its devices; simulated ones cost nothing
    flops: float  #: of training
    is_asked: bool  #: else it is shown for comparison


class Budget(msgspec.Struct, frozen=True):
    """What runs on a track take; None means unknown."""

    track: str
    num_devices: int  #: 0: simulated
    devices: str  #: number and name of those that are timed
    run_s: float | None  #: wall time of one run
    train_s: float | None  #: its train time
    first_s: float  #: to compile what is not kept yet; in the time of the node, and in no other
    basis: Literal["records", "plan", "unknown"]  #: the source of `run_s` and `train_s`
    relative_error: float  #: of a plan's train time
    fetch_bytes: int  #: data to download
    disk_bytes: int  #: data, and what the runs write
    dollars_per_hour: float | None  #: of one device
    expected: str  #: mean, sd and source, from which chances follow; empty if unknown
    checkpoints: bool  #: are saved, which is in no time here
    rows: tuple[Row, ...]  #: by number of runs
    limit_s: float | None  #: for a job: twice the time, and what the track grants for a first compilation
    error: str | None  #: why it does not fit

    def lines(self) -> list[str]:
        """Return the budget as text."""
        data = f"{quantity(self.fetch_bytes, 'B')} to fetch" if self.fetch_bytes else "nothing to fetch"
        lines = [f"data   {data} | {quantity(self.disk_bytes, 'B')} of disk, with what runs write"]
        if self.run_s is None or self.train_s is None:
            lines.append("run    its time is unknown: there is no record of this recipe here, and no plan")
        else:
            basis = f"+-{self.relative_error:.0%}; {UNTIMED_S:.0f} s of it are a guess"
            basis = "from records/, perhaps of another machine" if self.basis == "records" else basis
            timed = f"{duration(self.train_s)} of it on the clock, {basis}"
            lines.append(f"run    {duration(self.run_s)} on {self.devices}, {timed}")
        if self.first_s:
            lines.append(f"first  about {duration(self.first_s)} more to compile, in the times below")
        flops = max(row.flops for row in self.rows if row.is_asked)
        lines.append(f"flop   {flops:.3g} of training, all asked runs")
        lines += ["batch  runs  chance of a proof  time of the node   dollars", *map(_line, self.rows)]
        if self.checkpoints:
            lines.append("       without the time to save checkpoints")
        if self.expected:
            lines.append(f"       chances for a mean of {self.expected}")
        if self.num_devices and self.dollars_per_hour is not None:
            lines.append(f"       dollars at ${self.dollars_per_hour:.2f} per GPU and hour, without fetching")
        if self.num_devices and self.limit_s is not None:
            limit = f"limit  {self.limit_s:,.0f} s ({duration(self.limit_s)}) for a job"
            lines.append(f"{limit}: twice the time, and what the track grants for compiling")
        return lines


def _line(row: Row) -> str:
    chance = "-" if row.chance is None else f"{float(f'{100 * row.chance:.2g}'):g} %"
    time = "unknown" if row.total_s is None else duration(row.total_s)
    cost = f"{row.dollars:,.2f}" if row.dollars else ""
    return f"{'>' * row.is_asked:<5}{row.num_runs:>6}  {chance:>17}  {time:>16}  {cost:>8}".rstrip()


def budget(
    asked: BatchRequest | Request,
    kind: str | None = None,
    *,
    dollars: float | None,
    say: Callable[[str], None] = lambda _: None,
    records: Path = Path("records"),
) -> Budget:
    """Return what a request takes on devices of a kind, at dollars per device and hour; `say` hears of progress.

    Without `kind` it is the track's, or an H100.
    """
    rules, config = tracks.load(asked.config.track), asked.config
    if kind and (named := rules.rules.device_kind) not in ("", accelerators.load(kind).name):
        say(f"warning: {rules.id} ranks {named} only")
    parts, mean = _parts(asked, rules)
    times = [_time(rules, recipe, config, kind, records, say) for recipe, _ in parts]
    total = sum(number for _, number in parts)
    # What was never run takes as long for an operation as the others.
    ops = [recipe.total_tokens * flops_per_token(recipe.table(recipe.config)) for recipe, _ in parts]
    known = [(one.run_s, num) for one, num in zip(times, ops, strict=True) if one.run_s]
    s_per_op = sum(s for s, _ in known) / sum(num for _, num in known) if known else math.nan
    counted = [(number, one.run_s, num) for (_, number), one, num in zip(parts, times, ops, strict=True)]
    total_s = sum(number * (run_s or num * s_per_op) for number, run_s, num in counted)
    flops = sum(number * num for number, _, num in counted)
    first_s = sum(COMPILE_S * (x.plan.num_programs or 0) for x in times if x.plan and x.basis == "plan")
    plan, fetch_bytes = times[0].plan, overview.to_fetch_bytes(rules) if config.data is None else 0
    num_devices = plan.num_devices if plan else 0

    def row(number: int, chance: float | None, *, is_asked: bool) -> Row:
        row_s = None if math.isnan(total_s) else total_s * number / total + first_s
        cost = None if row_s is None or dollars is None else row_s * num_devices * dollars / 3600
        return Row(number, chance, row_s, cost, flops * number / total, is_asked)

    then = None if isinstance(asked, Request) else asked.then
    looks = [one.num_runs for one in looks_of(total, then, rules.target.sigma)]
    rows = [row(n, mean and mean.chance(n, len(looks)), is_asked=True) for n in looks]
    asked_s, granted_s = rows[-1].total_s, max(first_s, rules.rules.untimed_cap_s)
    if mean:
        others = {max(n or 0, rules.rules.min_runs, 2) for n in (0, mean.runs_needed())} - {*looks}
        rows += [row(n, mean.chance(n), is_asked=False) for n in others]
    return Budget(
        track=rules.name,
        num_devices=num_devices,
        devices=f"{num_devices} x {plan.device}" if plan else "this machine",
        run_s=times[0].run_s,
        train_s=times[0].train_s,
        first_s=first_s,
        basis=times[0].basis,
        relative_error=plan.relative_error if plan else 0.0,
        fetch_bytes=fetch_bytes,
        disk_bytes=fetch_bytes + overview.WRITTEN_BYTES,
        dollars_per_hour=dollars,
        expected=str(mean or ""),
        checkpoints=config.checkpoint_every > 0,
        rows=tuple(sorted(rows, key=lambda row: row.num_runs)),
        limit_s=None if asked_s is None else 2 * (asked_s - first_s) + granted_s,
        error=next((one.plan.error for one in times if one.plan and one.plan.error), None),
    )


def _parts(asked: BatchRequest | Request, rules: Track) -> tuple[list[tuple[Recipe, int]], Prospect | None]:
    """Return the recipes of a request with their numbers of runs, and what is expected of a batch."""
    if isinstance(asked, BatchRequest):
        recipe = recipes.load(asked.config.recipe or rules.recipe).override(asked.config.overrides)
        mean = prospect(recipe, rules, asked.expected_loss)
        number = num_runs(asked, rules, mean)
        return [(recipe, number)], mean if number > 1 else None  # one run proves nothing
    first, *others = (recipe for _, recipe, _ in declare_experiment.arms(asked)[0])
    # The arm that is confirmed, and its reference, are priced as the first one.
    number = asked.num_runs
    return [(first, number + 2 * asked.num_confirming), *((one, number) for one in others)], None


class _Time(NamedTuple):
    """Of one run; None means unknown."""

    run_s: float | None
    train_s: float | None
    basis: Literal["records", "plan", "unknown"]
    plan: Plan | None


def _time(
    rules: Track,
    recipe: Recipe,
    config: RunConfig,
    kind: str | None,
    records: Path,
    say: Callable[[str], None],
) -> _Time:
    """Return the time of a run from records, else from a plan, which only GPUs have."""
    plan = None
    if rules.rules.platform == "gpu":
        num_devices, named = config.num_devices or rules.rules.num_devices or 8, rules.rules.device_kind
        of_track = (kind for kind, one in accelerators.DEVICES.items() if one.name == named)
        plan = planning.plan(
            recipe,
            kind or next(of_track, "h100"),
            num_devices,
            config.microbatches or max(SHARDS, num_devices),
            say,
            attention=config.attention,
            replicas=config.replicas or 1,
            validates_at=rules.validates_at,
        )
    if found := _of_records(rules, recipe, records, plan):
        return _Time(*found, "records", plan)
    if plan is None:
        return _Time(None, None, "unknown", None)
    num_vals = 1 + sum(rules.validates_at(step) for step in range(recipe.num_steps))
    share = num_vals * rules.data.val_tokens / 3 / recipe.total_tokens  # a forward pass is a third of a step
    return _Time(plan.total_s * (1 + share) + UNTIMED_S, plan.total_s, "plan", plan)


def _of_records(track: Track, recipe: Recipe, records: Path, plan: Plan | None) -> tuple[float, float] | None:
    """Return the mean wall and train time of the records, scaled to the recipe's number of tokens."""
    found, same = [], _model(describe(recipe))
    for path in sorted((records / track.name).glob("*/source.txt")):
        record = load(path.parent)
        if not record.finished or _model(record.reference_run.start.config.get("recipe")) != same:
            continue
        summary, (num_devices, kind) = summarize(record), record.reference_run.hardware
        train_s, wall_s = summary.train_time_s_mean, summary.cold_wall_s_mean
        here = kind == "cpu" if plan is None else (kind, num_devices) == (plan.device, plan.num_devices)
        if here and train_s is not None and wall_s is not None and summary.num_tokens > 0:
            scaled_s = train_s * recipe.total_tokens / summary.num_tokens
            found.append((wall_s - train_s + scaled_s, scaled_s))
    return (fmean(run_s for run_s, _ in found), fmean(train_s for _, train_s in found)) if found else None


def _model(described: Any) -> Any:
    """Return what a described recipe says of its model, without names, which may have changed since."""
    match described:
        case {"name": name, "config": dict() as config, "compute_dtype": dtype}:
            return name, [value for key, value in config.items() if key != "kind"], dtype


if __name__ == "__main__":
    with reported():
        asked: Any = decoded(Path(sys.argv[1]).read_bytes(), cast("type", BatchRequest | Request))
        found = budget(asked, sys.argv[2] or None, dollars=None, say=subprocesses.say)
        last = [row for row in found.rows if row.is_asked][-1]
        run_s = last.total_s and last.total_s - found.first_s
        print(msgspec.json.encode((run_s, last.flops, found.num_devices)).decode())  # noqa: T201
