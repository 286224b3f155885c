"""`speedrun run`: one run on a track, and the record of it."""

import importlib
import os
from pathlib import Path
from typing import Any

import click

from speedrun.base import children, signals
from speedrun.base import track as tracks
from speedrun.base.errors import INTERRUPTED, UsageError
from speedrun.cli import options as cli
from speedrun.cli import run_options
from speedrun.cli.card import card, following
from speedrun.model.watch_server import PORT
from speedrun.record import reader
from speedrun.train import connect, local_processes


@cli.new_command(
    "speedrun run --track smoke-cpu",
    "speedrun run --track smoke-cpu --seed 1 --set optimizer.muon_lr=0.05",
    "speedrun run --track webmini --data DIR --checkpoint-every 50",
    "speedrun run --resume runs/2026-11-21-webmini-1",
    "speedrun run --local-processes 2",
)
@run_options.config_options
@cli.settings_option
@cli.option("--seed N", cli.SEED, "Of the initial weights.", 0)
@cli.option(
    "--replicas N",
    cli.COUNT,
    "Copies of the state, each sharded over as many devices. Default: one for each node.",
)
@run_options.checkpoint_options
@run_options.process_options
@run_options.ghost_option
@run_options.wandb_option
@run_options.extra_options
@cli.flag("-v/--verbose", "Print the kernel of each operation, and why. The log has both.")
@click.pass_context
def command(
    ctx: click.Context, *, track: str, out: Path | None, resume: Path | None, **given: Any
) -> cli.Answer | None:
    """Train once on a track, under the clock; write, draw and validate a record.

    Exits with 0 if the target is reached and every check passes, with 1 if not.
    """
    tracks.load(track)
    # Before JAX, whose import is slow.
    overrides, limits_s = cli.parse_settings(given["settings"]), run_options.deadlines_s(given["deadlines"])
    folder = resume or out or run_options.new_folder(track)
    if given["local_processes"] is not None:
        if given["coordinator"]:
            raise UsageError("--local-processes and --coordinator; the first sets the second; leave one out")
        if not (code := local_processes.run(given["local_processes"], _child_words(ctx, folder))):
            reader.need_finished(folder)
        ctx.exit(code)
    ctx.with_resource(children.stoppable())
    _import_jax()
    from speedrun.lab import single_run

    config = run_options.request_of(
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
        cli.only_with_resume(ctx, *run_options.EXTRA_ARGUMENTS, "verbose", *run_options.PROCESS_ARGUMENTS)
    group = connect.find_group(*(given[name] for name in run_options.PROCESS_ARGUMENTS[1:]))
    page = given["watch_port"] or (PORT if given["watch"] else None)
    same = {name: given[name] for name in ("ghost", "wandb", "sample_every", "sample_prompts", "init_from")}
    extras, shown = single_run.Extras(**same, watch_port=page), {"verbose": given["verbose"]}
    done = single_run.run(config, connect.joined(group), extras, to_stderr=ctx.params["as_json"], **shown)
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
