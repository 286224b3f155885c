"""Training on a track: `run`, one run and its record, and `batch`, several that are declared before the first one."""

import importlib
import os
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from speedrun.base import children, signals
from speedrun.base import track as tracks
from speedrun.base.errors import INTERRUPTED, UsageError, unknown
from speedrun.base.recipe_files import own_file
from speedrun.board.exports import relayed
from speedrun.cli import options as cli
from speedrun.record import reader
from speedrun.record.about import Summary
from speedrun.record.validate import Report, Status, validate
from speedrun.train import connect, local_processes, watchdog
from speedrun.train.request import RunConfig

if TYPE_CHECKING:
    from speedrun.lab.several_runs import Outcome
    from speedrun.lab.trials import Promise


def deadlines_s(texts: tuple[str, ...]) -> dict[str, float]:
    """Parse `phase=seconds` texts, as `--deadline` takes them."""
    found: dict[str, float] = {}
    for text in texts:
        phase, _, seconds = text.partition("=")
        if phase not in watchdog.DEADLINES_S:
            raise unknown("phase", phase, watchdog.DEADLINES_S)
        if not seconds.isdecimal():
            raise UsageError(f"--deadline {text!r}; need whole seconds, for example --deadline step=60")
        found[phase] = float(seconds)
    return found


#: The options of a run that keeps checkpoints, resumes, or must not hang.
checkpoint_options = cli.combined(
    cli.option(
        "--checkpoint-every N",
        cli.COUNT,
        "Steps between checkpoints, in DIR.checkpoints; writing them counts as train time. Default: none.",
    ),
    cli.option("--keep-checkpoints N", cli.NATURAL, "How many of the newest to keep; 0: all.", 2),
    cli.option(
        "--resume DIR",
        cli.PATH,
        "Resume the run in DIR from its newest checkpoint, with its settings. Never ranked.",
    ),
    cli.option(
        "--deadline PHASE=SECONDS",
        str,
        f"End a run that stays longer in one phase: {', '.join(watchdog.DEADLINES_S)}; 0: no limit.",
        name="deadlines",
        multiple=True,
    ),
)
#: The options of a run in several processes.
process_options = cli.combined(
    cli.option(
        "--local-processes N",
        cli.COUNT,
        "Start N processes on this machine that share its devices, to try out what a cluster does.",
    ),
    cli.option(
        "--coordinator HOST:PORT",
        str,
        "Of process 0, if several share the run. SLURM and Open MPI need no such options.",
    ),
    cli.option("--processes N", cli.COUNT, "How many share the run."),
    cli.option("--process I", cli.NATURAL, "The number of this process."),
    cli.option(
        "--heartbeat SECONDS",
        cli.Integer(5),
        "A process that is silent for so long is lost, and the run ends.",
        connect.HEARTBEAT_S,
    ),
    cli.option("--meet-within SECONDS", cli.COUNT, "Time for all processes to connect.", connect.MEET_S),
)
#: The arguments of `process_options`.
PROCESS_ARGUMENTS = ("local_processes", "coordinator", "processes", "process", "heartbeat", "meet_within")

#: The options of what a single run does beside training, or starts from.
extra_options = cli.combined(
    cli.flag("--watch", "Serve a page of the run from a child process. It cannot stop the run."),
    cli.option(
        "--watch-port N", cli.Integer(1, 65_535), f"Serve it at this port. Default: {cli.WATCH_PORT}."
    ),
    cli.option(
        "--sample-every N",
        cli.COUNT,
        "Let the checkpoints of each N steps write a text, beside the record; a child process does it. Without "
        "--checkpoint-every, it makes them.",
    ),
    cli.option(
        "--sample-prompt TEXT",
        str,
        "What these texts begin with. Default: the start of a document.",
        name="sample_prompts",
        multiple=True,
    ),
    cli.option(
        "--init-from SOURCE",
        cli.PATH,
        "Start from the weights of an exported folder or a GPT-2, as 'speedrun eval' takes them. Never ranked.",
    ),
)
#: Those that a resumed run takes, too.
EXTRA_ARGUMENTS = ("ghost", "wandb", "watch", "watch_port", "sample_every", "sample_prompts")


@cli.new_command(
    "speedrun run --track smoke-cpu",
    "speedrun run --track smoke-cpu --seed 1 --set optimizer.muon_lr=0.05",
    "speedrun run --track webmini --data DIR --checkpoint-every 50",
    "speedrun run --resume runs/2026-11-21-webmini-1",
    "speedrun run --local-processes 2",
)
@cli.config_options
@cli.settings_option
@cli.option("--seed N", cli.SEED, "Of the initial weights.", 0)
@cli.option(
    "--replicas N",
    cli.COUNT,
    "Copies of the state, each sharded over as many devices. Default: one for each node.",
)
@checkpoint_options
@process_options
@cli.ghost_option
@cli.wandb_option
@extra_options
@cli.flag("-v/--verbose", "Print the kernel of each operation, and why. The log has both.")
@click.pass_context
def run(
    ctx: click.Context, *, track: str, out: Path | None, resume: Path | None, **given: Any
) -> cli.Answer | None:
    """Train once on a track, under the clock; write, draw and validate a record.

    Exits with 0 if the target is reached and every check passes, with 1 if not.
    """
    tracks.load(track)
    # Before JAX, whose import is slow.
    overrides, limits_s = cli.parse_settings(given["settings"]), deadlines_s(given["deadlines"])
    folder = resume or out or cli.new_folder(track)
    if given["local_processes"] is not None:
        if given["coordinator"]:
            raise UsageError("--local-processes and --coordinator; the first sets the second; leave one out")
        if not (code := local_processes.run(given["local_processes"], _child_words(ctx, folder))):
            reader.need_finished(folder)
        ctx.exit(code)
    ctx.with_resource(children.stoppable())
    _import_jax()
    from speedrun.lab import single_run

    config = cli.request_of(
        ctx.params,
        overrides,
        folder,
        seed=given["seed"],
        replicas=given["replicas"],
        checkpoint_every=0 if resume else given["checkpoint_every"] or given["sample_every"] or 0,
        keep_checkpoints=given["keep_checkpoints"],
        deadlines_s=limits_s,
        resume=resume is not None,
    )
    if resume is not None:
        cli.only_with_resume(ctx, *EXTRA_ARGUMENTS, "verbose", *PROCESS_ARGUMENTS)
    group = connect.find_group(given["coordinator"], given["processes"], given["process"])
    joined = connect.joined(group, given["heartbeat"], given["meet_within"])
    page = given["watch_port"] or (cli.WATCH_PORT if given["watch"] else None)
    same = ("ghost", "wandb", "sample_every", "sample_prompts", "init_from", "verbose")
    extras = {name: given[name] for name in same} | {"watch_port": page, "to_stderr": ctx.params["as_json"]}
    done = single_run.run(config, joined, single_run.Extras(**extras))
    if done is None:
        return None
    lines = [card(done.rules, done.summary, done.report)]
    if done.bits_per_byte is not None:
        lines.append(f"bytes   {done.bits_per_byte:.3f} bits per byte of validation text")
    lines += [f"record  {done.config.out}", f"plot    {done.picture}"]
    lines.append(f"next    {following(done.config, done.summary, done.report)}")
    is_good = done.summary.target_reached and done.report.exit_code == 0
    return cli.Answer(done.facts(), lines, 0 if is_good else 1)


def _import_jax() -> None:
    """Import JAX; handle signals afterwards, since an exception while C++ libraries start would crash the process."""
    got: list[int] = []
    with signals.handled_by(lambda number, _: os._exit(INTERRUPTED) if got else got.append(number)):
        importlib.import_module("speedrun.train.run")
    if got:
        signals.stop(got[0], None)


def _child_words(ctx: click.Context, out: Path) -> list[str]:
    """Return the arguments of this command for a process that shares the run. All but paths are as they were typed."""
    words = ["--resume", str(out)] if ctx.params["resume"] else ["--out", str(out)]
    for param in ctx.command.params:
        name = param.name or ""
        is_given = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if is_given and name not in ("resume", "out", "local_processes"):
            value = ctx.params[name]
            for one in value if isinstance(value, tuple) else [value]:
                words += [param.opts[0]] if one is True else [param.opts[0], str(one)]
    return words


@cli.new_command(
    "speedrun batch --track smoke-cpu --runs 6",
    "speedrun batch --track main-8xh100 --expect 3.278 --title 'record 21 in JAX'",
    "speedrun batch --resume runs/2026-11-21-smoke-cpu-1",
)
@cli.config_options
@cli.settings_option
@cli.option("--runs N", cli.Integer(2), "How many.")
@cli.option("--then N", cli.Integer(3), "Total, if the first look proves nothing.")
@cli.option("--expect LOSS", cli.Number(0), "Expected mean loss, for as many runs as prove it 9 of 10 times.")
@cli.option("--seeds N,N,...", str, "Choose them. Default: derived from source and config.")
@cli.option("--title TEXT", str, "What the record is, in a few words.")
@cli.option("--resume DIR", cli.PATH, "Resume a declared batch.")
@cli.ghost_option
@cli.wandb_option
@click.pass_context
def batch(ctx: click.Context, **given: Any) -> cli.Answer:
    """Declare a batch, run it, and test its mean loss. The record holds all runs, also failed ones.

    Exits with 0 if the batch proves its target and every check passes, with 1 if not.
    """
    from speedrun.lab.several_runs import run_batch  # NumPy comes with it

    ctx.with_resource(children.stoppable())
    allowed = ("data", "title", "ghost", "wandb")
    folder = cli.begun(ctx, "speedrun.lab.design", partial(_promise, given), *allowed)
    with relayed(folder, given["wandb"]):
        as_json, chosen = ctx.params["as_json"], {name: given[name] for name in ("data", "title", "ghost")}
        done = run_batch(folder, **chosen, say=partial(click.echo, err=as_json), to_stderr=as_json)
        return _answer(folder, done)


def _promise(given: dict[str, Any]) -> "Promise":
    """Return the batch that the options say."""
    from speedrun.lab.several_runs import num_runs
    from speedrun.lab.trials import Promise

    rules, then, expect = tracks.load(given["track"]), given["then"], given["expect"]
    folder = given["out"] or cli.new_folder(rules.name)
    return Promise(
        config=cli.request_of(given, cli.parse_settings(given["settings"]), folder),
        num_runs=given["runs"] or num_runs(rules, expect, num_looks=1 if then is None else 2),
        then=then,
        seeds=tuple(cli.numbers("--seeds", given["seeds"] or "")),
        expected_loss=expect,
    )


def _answer(folder: Path, done: "Outcome") -> cli.Answer:
    """Validate the record."""
    report = validate(folder)
    facts = {"record": str(folder), "summary": done.summary}
    facts["failed_checks"] = {r.check.id: r.messages for r in report.having("failed")}
    lines = [card(done.rules, done.summary, report), f"record  {folder}"]
    for picture in done.plots[-1:]:  # the PNG
        lines += [f"plot    {picture}", f"next    {shlex.join(['speedrun', 'stats', str(folder)])}"]
    return cli.Answer(facts, lines, 0 if done.standing.passed and report.exit_code == 0 else 1)


def card(rules: tracks.Track, summary: Summary, report: Report) -> str:
    """Return the result in three lines, and a line for each check that failed or warned."""
    reached = "reached" if summary.target_reached else "NOT reached"
    words: dict[Status, str] = {"failed": "failed", "warning": "warned", "skipped": "not asked"}
    others = [(word, report.having(status)) for status, word in words.items() if report.having(status)]
    checks = [f"{len(report.having('ok'))} checks passed"]
    checks += [f", {len(results)} {word}" for word, results in others]
    checks += [
        f"\n        {r.check.id} {word}: {'; '.join(r.messages)}"
        for word, rs in others
        for r in rs
        if r.status != "skipped"
    ]
    head = f"card    {rules.id}: target {rules.target.loss:g} {reached}"
    if summary.num_finished:
        head += (
            f", val {summary.val_loss_mean:.4f} in {summary.train_time_s_mean:.2f} s of training\n"
            f"        {summary.num_steps:,} steps, {summary.num_tokens:,} tokens, "
            f"cold wall {summary.cold_wall_s_mean:.1f} s | {_standing(rules.rules, summary)}"
        )
    else:
        head += ", no run finished"
    return f"{head}\nchecks  {''.join(checks)}"


def _standing(rules: tracks.Rules, summary: Summary) -> str:
    """Return what the result is worth on the track."""
    if not rules.ranked:
        return "shown, not ranked"
    if summary.test is None or summary.num_finished < rules.min_runs:
        return f"{summary.num_finished} run{'s' * (summary.num_finished > 1)}; a rank takes a batch of {rules.min_runs}"
    return "qualified" if summary.test.passed else "not proven"


def following(config: RunConfig, summary: Summary, report: Report) -> str:
    """Return the most useful next command: explain a failed check, reproduce a success, or try another seed."""
    data = ["--data", str(config.data)] if config.data else []
    if failed := report.having("failed"):
        words = ["validate", "--explain", failed[0].check.id]
    elif summary.target_reached:
        words = ["reproduce", str(config.out), "--same-seeds", *data]
    else:
        words = ["run", "--track", config.track, *_chosen(config), *data, "--seed", str(config.seed + 1)]
    return shlex.join(["speedrun", *words])


def _chosen(config: RunConfig) -> list[str]:
    """Return the options of a run besides track, data and seed."""
    options = {
        "--recipe": own_file(config.recipe) or config.recipe,
        "--devices": config.num_devices,
        "--replicas": config.replicas,
        "--microbatches": config.microbatches,
        "--attention": None if config.attention == "auto" else config.attention,
    }
    words = [word for name, value in options.items() if value for word in (name, str(value))]
    return words + [word for setting in config.overrides.items() for word in ("--set", "=".join(setting))]
