"""`speedrun run`: one run on a track, and the record of it."""

import importlib
import os
from pathlib import Path
from typing import Any

import click

from speedrun.cli.card import card, following
from speedrun.cli.options import (
    COUNT,
    SEED,
    flag,
    json_option,
    new_command,
    only_with_resume,
    option,
    parse_settings,
    settings_option,
    show,
)
from speedrun.cli.run_options import (
    EXTRA_ARGUMENTS,
    PROCESS_ARGUMENTS,
    checkpoint_options,
    config_options,
    deadlines_s,
    extra_options,
    ghost_option,
    new_folder,
    process_options,
    request_of,
    wandb_option,
)
from speedrun.ground import children, signals
from speedrun.ground import track as tracks
from speedrun.ground.errors import INTERRUPTED, UsageError
from speedrun.launch import local
from speedrun.ledger import record
from speedrun.training import meet
from speedrun.watch import PORT


@new_command(
    "speedrun run --track smoke-cpu",
    "speedrun run --track smoke-cpu --seed 1 --set optimizer.muon_lr=0.05",
    "speedrun run --track webmini --data DIR --checkpoint-every 50",
    "speedrun run --resume runs/2026-11-21-webmini-1",
    "speedrun run --local-processes 2",
)
@config_options
@settings_option
@option("--seed N", SEED, "Of the initial weights.", 0)
@option(
    "--replicas N",
    COUNT,
    "Copies of the state, each sharded over as many devices. Default: one for each node.",
)
@checkpoint_options
@process_options
@ghost_option
@wandb_option
@extra_options
@flag("-v/--verbose", "Print the kernel of each operation, and why. The log has both.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    track: str,
    out: Path | None,
    settings: tuple[str, ...],
    resume: Path | None,
    deadlines: tuple[str, ...],
    local_processes: int | None,
    coordinator: str | None,
    wandb: str | None,
    verbose: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Train once on a track, under the clock; write, draw and validate a record.

    Exits with 0 if the target is reached and every check passes, with 1 if not.
    """
    tracks.load(track)
    overrides, limits_s = parse_settings(settings), deadlines_s(deadlines)  # before JAX, whose import is slow
    folder = out or new_folder(track)
    if local_processes is not None:
        ctx.exit(_in_processes(ctx, local_processes, resume or folder))
    ctx.with_resource(children.stoppable())
    _import_jax()
    from speedrun.study import single

    config = request_of(
        ctx.params,
        overrides,
        resume or folder,
        seed=given["seed"],
        replicas=given["replicas"],
        checkpoint_every=0 if resume else given["checkpoint_every"] or given["sample_every"] or 0,
        keep_checkpoints=given["keep_checkpoints"],
        deadlines_s=limits_s,
        resume=resume is not None,
    )
    if resume is not None:
        only_with_resume(ctx, *EXTRA_ARGUMENTS, "verbose", *PROCESS_ARGUMENTS)
    group = meet.find_group(coordinator, *(given[name] for name in PROCESS_ARGUMENTS[2:]))
    page = given["watch_port"] or (PORT if given["watch"] else None)
    same = {name: given[name] for name in ("ghost", "sample_every", "sample_prompts", "init_from")}
    extras = single.Extras(**same, wandb=wandb, watch_port=page)
    done = single.run(config, meet.joined(group), extras, to_stderr=as_json, verbose=verbose)
    if done is None:
        return
    lines = [card(done.rules, done.summary, done.report)]
    if done.bits_per_byte is not None:
        lines.append(f"bytes   {done.bits_per_byte:.3f} bits per byte of validation text")
    lines += [f"record  {done.config.out}", f"plot    {done.picture}"]
    lines.append(f"next    {following(done.config, done.summary, done.report)}")
    show(done.facts(), lines, as_json=as_json)
    ctx.exit(0 if done.summary.target_reached and done.report.exit_code == 0 else 1)


def _import_jax() -> None:
    """Import JAX; handle signals afterwards, since an exception while C++ libraries start would crash the process."""
    got: list[int] = []
    with signals.handled_by(lambda number, _: os._exit(INTERRUPTED) if got else got.append(number)):
        importlib.import_module("speedrun.training.train")
    if got:
        signals.stop(got[0], None)


def _in_processes(ctx: click.Context, number: int, out: Path) -> int:
    """Run in several processes of this machine; return the exit code."""
    if ctx.params["coordinator"]:
        raise UsageError("--local-processes and --coordinator; the first sets the second; leave one out")
    if not (code := local.run(number, _child_words(ctx, out))):
        record.need_finished(out)
    return code


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
