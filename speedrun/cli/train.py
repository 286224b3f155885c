"""The commands that train on a track, `run` and `batch`, and what there is to train: `recipes`."""

import os
import shlex
import signal
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypedDict

import click

from speedrun.base import signals, subprocesses
from speedrun.base import track as tracks
from speedrun.base.budget import Budget, purse_of
from speedrun.base.errors import UsageError, unknown
from speedrun.base.output import expected
from speedrun.cli import options as cli
from speedrun.cli import requests
from speedrun.commands import added
from speedrun.record.summary import Summary
from speedrun.record.validate import Report, validate
from speedrun.train import connect, keeper, resume_settings
from speedrun.train.run_config import RunConfig

if TYPE_CHECKING:
    from speedrun.train import single_run
    from speedrun.train.batch import Outcome
    from speedrun.train.first_steps import FirstSteps


def deadlines_s(texts: tuple[str, ...]) -> dict[str, float]:
    """Parse the `phase=seconds` texts of `--deadline`."""
    found: dict[str, float] = {}
    for text in texts:
        phase, _, seconds = text.partition("=")
        if phase not in keeper.DEADLINES_S:
            raise unknown("phase", phase, keeper.DEADLINES_S)
        if not seconds.isdecimal():
            raise UsageError(f"--deadline {text!r}; need whole seconds, for example --deadline step=60")
        found[phase] = float(seconds)
    return found


class Single(NamedTuple):
    """Options of a single run: its start, checkpoints and deadlines.

    Options:
        replicas: Copies of the state, each sharded over as many devices. Default: one for each node.
        init_from: Start from the weights of an exported folder or a GPT-2, as in 'speedrun eval'. Never ranked.
        checkpoint_every: Steps between checkpoints in DIR.checkpoints; saving counts as train time. Default: none.
        resume: Resume the run in DIR from its newest checkpoint, with its settings. Never ranked.
        check: Only a few steps: does it run, and does the loss fall? Writes no record, and keeps compiled programs.
    """

    seed: Annotated[cli.Natural, "Seed of the initial weights."] = 0
    replicas: cli.Count | None = None
    init_from: Annotated[Path | None, "--init-from SOURCE"] = None
    checkpoint_every: cli.Count | None = None
    keep_checkpoints: Annotated[cli.Natural, "Number of checkpoints to keep, the newest ones; 0: all."] = 2
    resume: Annotated[Path | None, "--resume DIR"] = None
    unranked: cli.Unranked = False
    check: bool = False
    deadlines: Annotated[
        tuple[str, ...],
        "--deadline PHASE=SECONDS",
        f"Longest time in one phase: {', '.join(keeper.DEADLINES_S)}; 0: no limit.",
    ] = ()


class Processes(NamedTuple):
    """Options of a run in several processes, as `connect.find_group` takes them.

    Options:
        coordinator: Address of process 0. SLURM and Open MPI set this themselves.
        heartbeat: End the run if a process is silent for this long.
        meet_within: Time for all processes to connect.
    """

    coordinator: Annotated[str | None, "--coordinator HOST:PORT"] = None
    processes: Annotated[cli.Count | None, "Number of processes."] = None
    process: Annotated[cli.Natural | None, "--process I", "Index of this process."] = None
    heartbeat: Annotated[int, cli.Integer(5), "--heartbeat SECONDS"] = connect.HEARTBEAT_S
    meet_within: Annotated[cli.Count, "--meet-within SECONDS"] = connect.MEET_S


class Extras(NamedTuple):
    """Options of a single run that leave its training alone; a resumed run takes them, too.

    Options:
        sample_every: Sample a text every N steps, in a child process, from a checkpoint. Sets --checkpoint-every.
        sample_prompts: Start of these texts. Default: the start of a document.
    """

    ghost: cli.Ghost = None
    wandb: cli.Wandb = None
    watch: Annotated[bool, "Serve a page of the run from a child process. It cannot stop the run."] = False
    watch_port: Annotated[
        int | None, cli.Integer(1, 65_535), f"Port of that page. Default: {cli.WATCH_PORT}."
    ] = None
    sample_every: cli.Count | None = None
    sample_prompts: Annotated[tuple[str, ...], "--sample-prompt TEXT"] = ()


RecipeFacts = TypedDict(
    "RecipeFacts",
    {"summary": str, "parent": str | None, "num_params": int, "num_steps": int, "total_tokens": int},
)
Recipes = dict[str, RecipeFacts] | dict[str, int | float | str | tuple[int | float | str, ...]]
#: A new record, and what each failed check says.
Judged = TypedDict("Judged", {"record": str, "summary": Summary, "failed_checks": dict[str, tuple[str, ...]]})


class Trained(Judged):
    """The record of a run."""

    plot: str | None
    bits_per_byte: float | None  #: of validation text; None if its bytes are not known


@cli.command(
    "speedrun run --track smoke-cpu",
    "speedrun run --track smoke-cpu --seed 1 --set optimizer.muon_lr=0.04",
    "speedrun run --track webmini --data DIR --checkpoint-every 50",
    "speedrun run --track smoke-cpu --recipe mine.py --check",
    "speedrun run --resume runs/2026-11-21-webmini-1",
)
def run(
    ctx: click.Context,
    options: requests.RunOptions,
    single: Single,
    processes: Processes,
    extras: Extras,
    dry: requests.DryRun,
) -> "cli.Answer[Trained | FirstSteps | requests.Priced] | None":
    """Train once on a track, under the clock; write, draw and validate a record.

    Exits with 0 if the target is reached and every check passes, else with 1; with --check, if the loss falls.
    """
    tracks.load(options.track)
    limits_s = deadlines_s(single.deadlines)
    resume = single.resume
    folder = resume or options.out or cli.new_folder(options.track)
    ctx.with_resource(subprocesses.stoppable())
    if single.check:
        return _checked(ctx, options.request(Path(gettempdir(), f"check-{os.getpid()}"), seed=single.seed))
    config = options.request(
        folder,
        seed=single.seed,
        replicas=single.replicas,
        checkpoint_every=0 if resume else single.checkpoint_every or extras.sample_every or 0,
        keep_checkpoints=single.keep_checkpoints,
        deadlines_s=limits_s,
        resume=resume is not None,
        purpose="unranked" if single.unranked else "",
    )
    budget = None
    if dry.is_asked() or (dry.budget and resume is None):
        from speedrun.train.batch import BatchRequest

        asked = BatchRequest(config, num_runs=1, budget=dry.budget or "")
        if dry.dry_run:
            return dry.answer(ctx, asked)
        budget = Budget.parse(dry.limited(asked).budget)
    from speedrun.train import single_run

    if resume is not None:
        cli.only_with_resume(ctx, "unranked", "budget", *Extras._fields, *Processes._fields)
        if (purse := purse_of(resume, dry.budget)) and not resume_settings.finished(resume):
            budget = purse.left(UsageError.exit_code)
    group = connect.find_group(processes.coordinator, processes.processes, processes.process)
    job = keeper.Job(config, group, processes.heartbeat, processes.meet_within, single.init_from, budget)
    same = {name: value for name, value in extras._asdict().items() if name != "watch"}
    same["watch_port"] = extras.watch_port or (cli.WATCH_PORT if extras.watch else None)
    stream = sys.stderr if ctx.params["as_json"] else None
    done = single_run.run(job, single_run.Extras(**same, stream=stream))
    return None if done is None else told(done)


def _checked(ctx: click.Context, config: RunConfig) -> "cli.Answer[FirstSteps]":
    """Train the first steps."""
    for param in cli.typed(ctx):
        if param.name not in ("check", "seed", "as_json", *set(requests.RunOptions._fields) - {"out"}):
            got = f"--check writes no record, so it takes no {param.opts[-1]}"
            raise UsageError(f"{got}; leave one of them out")
    os.environ |= keeper.with_kept_programs()
    with signals.handled_by(signal.SIG_DFL):  # an exception in JAX's C++ start would crash
        from speedrun.train import first_steps
    found = first_steps.check(config, partial(click.echo, err=True))
    return cli.Answer(found, [found], int(not found.fell))


def told(done: "single_run.Single", *more: str) -> cli.Answer[Trained]:
    """Return the answer about a finished run, with more lines after its card."""
    lines = [card(done.rules, done.summary, done.report), *more]
    if done.bits_per_byte is not None:
        lines.append(f"bytes   {done.bits_per_byte:.3f} bits per byte of validation text")
    lines += [f"record  {done.config.out}", *([f"plot    {done.picture}"] if done.picture else [])]
    lines.append(f"next    {following(done.config, done.summary, done.report)}")
    is_good = done.summary.target_reached and done.report.exit_code == 0
    plot, judged = done.picture and str(done.picture), _judged(done.config.out, done.summary, done.report)
    facts = Trained(**judged, plot=plot, bits_per_byte=done.bits_per_byte)
    return cli.Answer(facts, lines, 0 if is_good else 1)


def _judged(folder: Path, summary: Summary, report: Report) -> Judged:
    failed = {one.check.id: one.messages for one in report.having("failed")}
    return Judged(record=str(folder), summary=summary, failed_checks=failed)


@cli.command(
    "speedrun batch --track smoke-cpu --runs 6",
    "speedrun batch --track main-8xh100 --expect 3.278 --title 'record 21 in JAX'",
    "speedrun batch --resume runs/2026-11-21-smoke-cpu-1",
    "speedrun batch --track main-8xh100 --on 10.0.0.1:6380",
)
def batch(
    ctx: click.Context,
    options: requests.RunOptions,
    size: requests.Size,
    dry: requests.DryRun,
    *,
    title: Annotated[str | None, "Title of the record."] = None,
    resume: Annotated[Path | None, "--resume DIR", "Resume a declared batch."] = None,
    ghost: cli.Ghost = None,
    wandb: cli.Wandb = None,
    on: cli.On = None,
    unranked: cli.Unranked = False,
) -> cli.Answer[Judged | requests.Priced]:
    """Declare a batch, run it, and test its mean loss. The record holds all runs, including failed ones.

    Exits with 0 if the batch proves its target and every check passes, else with 1.
    """
    from speedrun.train.batch import BatchRequest, run_batch  # NumPy comes with it

    def asked() -> BatchRequest:
        folder = options.out or cli.new_folder(tracks.load(options.track).name)
        config = options.request(folder, purpose="unranked" if unranked else "")
        return BatchRequest(config, *size, budget=dry.budget or "")

    if dry.is_asked():
        return dry.answer(ctx, asked())
    ctx.with_resource(subprocesses.stoppable())
    as_json, allowed = ctx.params["as_json"], ("data", "title", "ghost", "wandb", "on")
    say = partial(click.echo, err=as_json)
    if on and ghost:
        raise UsageError("--ghost shows one run beside another, and --on trains several at once; keep one")
    trained = cli.on_nodes(ctx, on, say)
    folder = requests.begun(ctx, dry, "speedrun.train.declare", asked, *allowed)
    with added("wandb")(folder, wandb) if wandb else nullcontext():
        chosen = {"data": options.data, "title": title, "ghost": ghost, "trained": trained}
        done = run_batch(folder, **chosen, say=say, to_stderr=as_json, budget=dry.budget)
        return _answer(folder, done)


def _answer(folder: Path, done: "Outcome") -> cli.Answer[Judged]:
    """Validate the record."""
    report = validate(folder)
    lines = [card(done.rules, done.summary, report), f"record  {folder}"]
    for picture in done.plots:
        lines += [f"plot    {picture}", f"next    {shlex.join(['speedrun', 'stats', str(folder)])}"]
    facts = _judged(folder, done.summary, report)
    return cli.Answer(facts, lines, 0 if done.status.passed and report.exit_code == 0 else 1)


def card(rules: tracks.Track, summary: Summary, report: Report) -> str:
    """Return the result in three lines, then a line for each check that failed or warned."""
    reached = "reached" if summary.target_reached else "NOT reached"
    problems = [*report.having("failed"), *report.having("warning")]
    told = [f"\n        {one.check.id} {one.status}: {'; '.join(one.messages)}" for one in problems]
    head = f"card    {rules.id}: target {rules.target.loss:g} {reached}"
    if summary.num_finished:
        head += (
            f", val {summary.val_loss_mean:.4f} in {summary.train_time_s_mean:.2f} s of training\n"
            f"        {summary.num_steps:,} steps, {summary.num_tokens:,} tokens, "
            f"total wall {summary.cold_wall_s_mean:.1f} s | {_status(rules.rules, summary)}"
        )
    else:
        head += ", no run finished"
    return f"{head}\nchecks  {report.verdict}{''.join(told)}"


def _status(rules: tracks.Rules, summary: Summary) -> str:
    if not rules.ranked:
        return "shown; this track does not rank"
    if summary.test is None or summary.num_finished < rules.min_runs:
        return f"{summary.num_finished} run{'s' * (summary.num_finished > 1)}; a rank takes a batch of {rules.min_runs}"
    return "qualified" if summary.test.passed else "not proven"


def following(config: RunConfig, summary: Summary, report: Report) -> str:
    """Return the most useful next command: explain a failed check, repeat a success, or look at the steps."""
    data = ["--data", str(config.data)] if config.data else []
    if failed := report.having("failed"):
        words = ["validate", "--explain", failed[0].check.id]
    elif summary.target_reached:
        words = ["reproduce", str(config.out), "--same-seeds", *data]
    else:
        words = ["plot", str(config.out), "--kind", "all"]
    return shlex.join(["speedrun", *words])


@cli.command("speedrun recipes", "speedrun recipes smoke")
def recipes(name: Annotated[cli.Recipe | None, "[NAME]"] = None) -> cli.Answer[Recipes]:
    """List the recipes, or the settings of the recipe NAME, in the form of --set."""
    from speedrun import recipes
    from speedrun.science import params
    from speedrun.science.recipe import IDENTITY, settings

    if name is not None:
        own = {key: value for key, value in settings(recipes.load(name)).items() if key not in IDENTITY}
        return cli.Answer(own, [f"{key}={value}" for key, value in own.items()])
    found: dict[str, RecipeFacts] = {}
    lines = []
    for each in recipes.names():
        try:
            one = recipes.load(each)
        except BaseException as error:
            if (known := expected(error)) is None:
                raise
            subprocesses.say(f"warning: recipe {each} cannot be loaded: {known}")
            continue
        num_params = params.count(one.table(one.config))
        found[each] = {
            "summary": one.summary,
            "parent": one.parent,
            "num_params": num_params,
            "num_steps": one.num_steps,
            "total_tokens": one.total_tokens,
        }
        counts = f"{num_params:>12,} parameters  {one.total_tokens:>12,} tokens"
        lines.append(f"{each:<{max(map(len, recipes.names()))}}  {counts}  {one.summary}")
    return cli.Answer(found, lines)
