"""The commands that study runs: `stats`, `sweep` and `try`."""

import math
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple, TypedDict

import click
import msgspec
from msgspec.structs import replace

from speedrun.base import track as tracks
from speedrun.base.budget import purse_of
from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.base.subprocesses import say
from speedrun.cli import options as cli
from speedrun.cli import requests
from speedrun.lab import afford, experiments
from speedrun.lab.effects import Summary, table
from speedrun.lab.experiments import Kind, Request
from speedrun.lab.sequential import Answer as Tried
from speedrun.lab.sequential import promise
from speedrun.record import statistics
from speedrun.record.batch import batch_status
from speedrun.record.reader import load_result
from speedrun.record.statistics import Interval

Swept = TypedDict("Swept", {"experiment": str, "summary": Summary | Tried})


class Stats(msgspec.Struct, frozen=True):
    """Losses and times of the finished runs of a record, and the test of their mean loss."""

    track: str
    target: float
    num_runs: int
    losses: tuple[float, ...]
    loss: Interval | None  #: 95 %; this and other statistics are None for one run
    sd: float | None
    train_times_s: tuple[float, ...]
    train_time_s: Interval | None
    declared: bool  #: whether the test is that of a declared batch
    rule: str
    p: float | None
    alpha: float
    passed: bool
    runs_needed: int | None  #: for 90 % power at this mean and noise; None: no number suffices
    equivalent: statistics.Equivalence | None  #: to the parent
    budget: str | None  #: what all runs took of it


def proof(folder: Path, parent: Path | None) -> Stats:
    """Test the mean loss of a record against its track's target, and against another record's."""
    record = load_result(folder)
    rules, runs = record.rules, record.finished
    target, sigma = rules.target.loss, rules.target.sigma
    losses = [run.val_loss for run in runs]
    declared = record.declaration
    blown_up = [math.inf for run in record.runs if run.outcome == "non-finite"]
    if declared is None:
        test = statistics.mean_below([*losses, *blown_up], target, known_sigma=sigma)
    elif (test := batch_status(declared, record.runs, target, sigma).test) is None:
        need = declared.looks[0].num_runs
        found = f"{folder}: {len(runs)} of the {need} runs before its first look"
        raise UsageError(f"{found}; 'speedrun batch --resume {folder}'")
    others = [] if parent is None else [run.val_loss for run in load_result(parent).finished]
    if parent is not None and min(len(others), len(losses)) < 2:
        raise UsageError(f"--against compares {len(losses)} runs with {len(others)}; need two on each side")
    is_tested = len(losses) + len(blown_up) > 1
    sd = statistics.sd(losses)
    noise = max(sigma or 0.0, sd or 0.0) if test.rule == "z" else sd
    needed = statistics.batch_needed(target - record.mean_loss, noise, known_sigma=sigma) if noise else None
    times_s, purse = [run.train_time_s for run in runs], purse_of(folder, None)
    return Stats(
        track=rules.id,
        target=target,
        num_runs=len(runs),
        losses=tuple(losses),
        loss=statistics.mean_interval(losses),
        sd=sd,
        train_times_s=tuple(times_s),
        train_time_s=statistics.mean_interval(times_s),
        declared=declared is not None,
        rule=test.rule,
        p=test.p if is_tested else None,
        alpha=test.alpha,
        passed=is_tested and test.passed,
        runs_needed=needed,
        equivalent=None if parent is None else statistics.equivalent(others, losses),
        budget=purse and f"{purse.budget.told(purse.costs()[0])} of {purse.budget} spent",
    )


_RULES = {"t": "Student's t", "z": "z with the track's known noise"}


@cli.command("speedrun stats runs/first", "speedrun stats RECORD --against PARENT --json")
def stats(
    record: Path,
    *,
    against: Annotated[Path | None, "--against RECORD", "Test whether its loss is the same."] = None,
) -> cli.Answer[Stats]:
    """Test the mean loss of the finished runs of RECORD against the target.

    A declared batch is tested at its declared looks. Tests of other runs prove nothing for the board. Exits with 0 if
    the target is proven, else with 1.
    """
    found = proof(record, against)
    return cli.Answer(found, _lines(found, against), 0 if found.passed else 1)


def _lines(found: Stats, against: Path | None) -> list[str]:
    declared = "declared" if found.declared else "not declared: no proof for the board"
    test = "one run has no p; declare several: speedrun batch --runs N"
    if found.p is not None:
        verdict = "proven" if found.passed else "not proven"
        test = f"p = {_number(found.p)}, need less than {found.alpha:g}: {verdict}"
    lines = [
        f"runs    {found.num_runs} finished on {found.track} ({declared})",
        f"loss    {_interval(found.loss, found.losses, 5)} nats | sd {_number(found.sd)}",
        f"time    {_interval(found.train_time_s, found.train_times_s, 2)} s of training",
        f"test    mean below {found.target:g} by {_RULES[found.rule]}: {test}",
    ]
    if found.runs_needed:
        lines.append(f"power   {found.runs_needed} runs with this mean and noise pass 9 times of 10")
    elif found.sd is None and found.rule == "t":
        lines.append("power   noise needs at least two runs")
    elif not found.passed:
        lines.append("power   the mean is too high for a proof: more runs cannot help")
    if same := found.equivalent:
        verdict = "equivalent" if same.passed else "not shown to be equivalent"
        lines.append(
            f"same    {same.difference:+.5f} against {against}; p = {same.p:.2g} that they differ by {same.margin:g} "
            f"or more: {verdict}"
        )
    return [*lines, *([f"budget  {found.budget}"] if found.budget else [])]


def _interval(interval: Interval | None, values: tuple[float, ...], digits: int) -> str:
    if interval is None:
        return f"{values[0]:.{digits}f}"
    return f"{interval.mean:.{digits}f} +- {interval.half_width:.{digits}f}"


def _number(number: float | None) -> str:
    return "none" if number is None else f"{number:.5g}"


class Variants(NamedTuple):
    """The variants of a recipe, and the number of runs.

    Options:
        features: Instead, turn off one feature at a time: 'all', or some of those that its recipe states.
        confirm: Fresh seeds for the best arm and its baseline. Default: as many as --runs.
    """

    features: Annotated[str | None, "--features NAME,..."] = None
    ladder: Annotated[bool, "Instead, compare the recipe and its ancestors, each with its parent."] = False
    runs: Annotated[cli.Count | None, "Runs of each arm, all with the same N seeds."] = None
    confirm: cli.Natural | None = None


@cli.command(
    "speedrun sweep --set optimizer.muon_lr=0.025,0.05,0.1 --set schedule.momentum_end=0.9,0.95 --runs 2",
    "speedrun sweep --features all --runs 4",
    "speedrun sweep --features value-embeddings,cooldown --runs 2 --set stages.0.num_steps=140",
    "speedrun sweep --track docs-cpu --ladder --set config.vocab_size=4096 --set config.padded_vocab_size=4096",
    "speedrun sweep --resume runs/2026-11-21-smoke-cpu-sweep-1",
)
def sweep(
    ctx: click.Context,
    variants: Variants,
    config: requests.RunOptions,
    dry: requests.DryRun,
    *,
    resume: Annotated[Path | None, "--resume DIR", "Run what is missing."] = None,
    on: cli.On = None,
) -> cli.Answer[Swept | requests.Priced]:
    """Run a recipe and its variants with the same seeds, and report which are better.

    A variant has other settings, lacks a feature (--features), or is an ancestor (--ladder). --set takes the values to
    try, separated by commas; a single value applies to every arm.

    Loss and time are compared in pairs of equal seeds, p is adjusted for the number of arms, and the best arm runs
    again with fresh seeds. Nothing of this is ranked.
    """
    from speedrun.lab.sweep import run_sweep  # NumPy comes with it

    asked = partial(_request, variants, config, dry.budget or "")
    if dry.is_asked():
        return dry.answer(ctx, asked())
    trained = cli.on_nodes(ctx, on, say)
    folder = requests.begun(ctx, dry, "speedrun.lab.declare_experiment", asked, "data", "on")
    return _told(folder, run_sweep(folder, config.data, say, trained, dry.budget))


def _told(folder: Path, found: Summary | Tried) -> cli.Answer[Swept]:
    facts = Swept(experiment=str(folder), summary=found)
    if isinstance(found, Summary):
        return cli.Answer(facts, map(clean, table(found)))
    return cli.Answer(facts, [f"verdict {found}"], int(found.verdict != "better"))


@cli.command("speedrun try mine.py --against smoke --budget 20m")
def try_(
    ctx: click.Context,
    config: requests.RunOptions,
    dry: requests.DryRun,
    recipe: Annotated[cli.Recipe | None, "[RECIPE]"] = None,
    *,
    against: Annotated[cli.Recipe | None, "--against PARENT", "Recipe to compare with."] = None,
    resume: Annotated[Path | None, "--resume DIR", "Go on with a try, and the test that it declared."] = None,
) -> cli.Answer[Swept | requests.Priced]:
    """Train RECIPE and PARENT in pairs of one seed, until a test of their final losses says better or worse.

    The test is declared before the first pair, and valid after each: of equal recipes, at most 1 % seem unequal. Which
    difference the budget resolves is printed first. --set changes both recipes; to try a number, write a file, or use
    'speedrun sweep'. Exits with 0 if RECIPE is better, else with 1.
    """
    from speedrun.lab.sweep import run_sweep  # NumPy comes with it

    def asked() -> Request:
        if recipe is None or against is None or dry.budget is None:
            raise UsageError("a try takes RECIPE, --against PARENT and --budget; or --resume DIR")
        run = config.request(config.out or cli.new_folder(f"{config.track}-try"))
        one = Request(run, "try", num_runs=1, num_confirming=0, budget=dry.budget, against=against)
        return replace(one, num_runs=afford.pairs(one, dry.kind, dry.dollars))

    if dry.is_asked():
        rules, answer = tracks.load(config.track), dry.answer(ctx, one := asked())
        return answer._replace(lines=[*answer.lines, f"try    {promise(rules, one.num_runs)}"])
    folder = requests.begun(ctx, dry, "speedrun.lab.declare_experiment", asked, "data")
    return _told(folder, run_sweep(folder, config.data, say, None, dry.budget))


def _request(asked: Variants, config: requests.RunOptions, budget: str) -> Request:
    settings = {key: experiments.values(text) for key, text in config.settings.items()}
    fixed = {key: values[0] for key, values in settings.items() if len(values) == 1}
    free = {key: values for key, values in settings.items() if key not in fixed}
    if (asked.features is not None) + asked.ladder + bool(free) > 1:
        raise UsageError("--features, --ladder and several values in --set exclude each other; keep one")
    if asked.runs is None:
        raise UsageError("no number of runs; the noise takes at least two; pass --runs N")
    kind: Kind = "ladder" if asked.ladder else "features"
    variants: list[dict[str, str]] = []
    if asked.features is None and not asked.ladder:
        if not free:
            raise UsageError("nothing to sweep; pass --features, --ladder or --set optimizer.muon_lr=0.1,0.2")
        kind = "sweep"
        variants = experiments.grid(free)
    return Request(
        config=config._replace(settings=fixed).request(config.out or cli.new_folder(f"{config.track}-sweep")),
        kind=kind,
        num_runs=asked.runs,
        num_confirming=asked.runs if asked.confirm is None else asked.confirm,
        features=tuple(name for name in (asked.features or "").split(",") if name not in ("", "all")),
        variants=tuple(variants),
        budget=budget,
    )
