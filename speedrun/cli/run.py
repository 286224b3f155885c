"""`speedrun run`: one run on a track, and the record of it."""

import importlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from speedrun.board.record_plot import plot
from speedrun.cli.card import card, following
from speedrun.cli.options import (
    Integer,
    example,
    json_option,
    only_with_resume,
    parse_settings,
    settings_option,
)
from speedrun.cli.run_options import (
    PROCESS_ARGUMENTS,
    config_of,
    config_options,
    ghost_option,
    new_folder,
    process_options,
    wandb_option,
)
from speedrun.data import generated, inventory, overview
from speedrun.exchange.relay import relayed
from speedrun.ground import processes, signals
from speedrun.ground import track as tracks
from speedrun.ground.errors import INTERRUPTED, SpeedrunError, UsageError, unknown
from speedrun.launch import local
from speedrun.ledger.assemble import assemble
from speedrun.ledger.validate import validate
from speedrun.study import race
from speedrun.training import meet, watchdog

if TYPE_CHECKING:
    from speedrun.training.prepare import RunConfig


@click.command(
    epilog=example(
        "speedrun run --track smoke-cpu",
        "speedrun run --track smoke-cpu --seed 1 --set optimizer.muon_lr=0.05",
        "speedrun run --track webmini --data DIR --checkpoint-every 50",
        "speedrun run --resume runs/2026-11-21-webmini-1",
        "speedrun run --local-processes 2",
    )
)
@config_options
@settings_option
@click.option(
    "--seed", type=Integer(0, 2**31 - 1), default=0, show_default=True, help="Of the initial weights."
)
@click.option(
    "--replicas",
    type=Integer(1),
    metavar="N",
    help="Copies of the state, each sharded over as many devices. Default: one for each node.",
)
@click.option(
    "--checkpoint-every",
    type=Integer(1),
    metavar="N",
    help="Steps between checkpoints, in DIR.checkpoints; writing them counts as train time. Default: none.",
)
@click.option(
    "--keep-checkpoints",
    type=Integer(0),
    default=2,
    show_default=True,
    metavar="N",
    help="How many of the newest to keep; 0: all.",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Resume the run in DIR from its newest checkpoint, with its settings. Never ranked.",
)
@click.option(
    "--deadline",
    "deadlines",
    multiple=True,
    metavar="PHASE=SECONDS",
    help=f"End a run that stays longer in one phase: {', '.join(watchdog.DEADLINES_S)}; 0: no limit. Repeatable.",
)
@process_options
@ghost_option
@wandb_option
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
    as_json: bool,
    **given: Any,
) -> None:
    """Train once on a track, under the clock; write, draw and validate a record.

    Exits with 0 if the target is reached and every check passes, with 1 if not.
    """
    rules, overrides = tracks.load(track), parse_settings(settings)  # before JAX, whose import is slow
    folder = out or new_folder(track)
    if local_processes is not None:
        if coordinator:
            raise UsageError("--local-processes and --coordinator; the first sets the second; leave one out")
        ctx.exit(local.run(local_processes, _child_words(ctx, resume or folder)))
    ctx.with_resource(signals.stoppable())
    _import_jax()
    from speedrun.training.prepare import RunConfig
    from speedrun.training.resume import resumed

    config = RunConfig(
        **config_of(ctx.params, overrides, folder),
        seed=given["seed"],
        replicas=given["replicas"],
        checkpoint_every=given["checkpoint_every"] or 0,
        keep_checkpoints=given["keep_checkpoints"],
        deadlines_s=_deadlines_s(deadlines),
    )
    if resume is not None:
        only_with_resume(ctx, "ghost", "wandb", *PROCESS_ARGUMENTS)
    is_ours = resume is not None or not os.path.exists(folder)
    group = meet.find_group(
        coordinator, given["processes"], given["process"], given["heartbeat"], given["meet_within"]
    )
    try:
        with meet.joined(group):
            if resume is not None:
                config = resumed(resume)
                rules = tracks.load(config.track)
            if resume is None or config.resume:
                with relayed(config.out, wandb if processes.is_first() else None):
                    _train(config, rules, given["ghost"], to_stderr=as_json)
    except BaseException:
        if is_ours and processes.is_first():
            _assemble_broken(config, rules)
        raise
    if processes.is_first():
        ctx.exit(_finish(config, rules, as_json=as_json))


def _import_jax() -> None:
    """Import JAX; handle signals afterwards, since an exception while C++ libraries start would crash the process."""
    got: list[int] = []
    with signals.handled_by(lambda number, _: os._exit(INTERRUPTED) if got else got.append(number)):
        importlib.import_module("speedrun.training.train")
    if got:
        signals.stop(got[0], None)


def _train(config: "RunConfig", rules: tracks.Track, ghost: str | None, *, to_stderr: bool) -> None:
    """Train; of several processes, only the first one prints."""
    generated.ensure(rules, config.data, partial(click.echo, err=True))
    from speedrun.training.train import train

    if not processes.is_first():
        train(config)
        return
    with race.live(sys.stderr if to_stderr else sys.stdout, race.find(ghost, rules.id)) as reader:
        train(config, reader)


def _default_title(config: "RunConfig", rules: tracks.Track) -> str:
    return f"{config.recipe or rules.recipe} on {rules.id}"


def _assemble_broken(config: "RunConfig", rules: tracks.Track) -> None:
    """Write the record of a run that broke off."""
    if not list(config.out.glob("runs/*/run.json")):
        return
    try:
        assemble(config.out, default_title=_default_title(config, rules), declared_runs=1)
        click.echo(f"record  {config.out} says where the run broke off", err=True)
    except SpeedrunError as error:  # the error that broke the run matters more
        click.echo(f"warning: the record of the broken run is incomplete: {error}", err=True)


def _finish(config: "RunConfig", rules: tracks.Track, *, as_json: bool) -> int:
    """Write, draw, validate and print the record; return the exit code."""
    summary = assemble(config.out, default_title=_default_title(config, rules), declared_runs=1)
    picture = next(path for path in plot(config.out) if path.suffix == ".png")
    report = validate(config.out)
    density = None
    if summary.val_loss_mean is not None:
        shards = inventory.data_folder(rules, config.data)
        density = overview.bits_per_byte(summary.val_loss_mean, shards, rules.data)
    if as_json:
        facts = {
            "record": str(config.out),
            "plot": str(picture),
            "summary": summary,
            "bits_per_byte": density,
        }
        facts["failed_checks"] = {r.check.id: r.messages for r in report.having("failed")}
        click.echo(msgspec.json.encode(facts))
    else:
        click.echo(card(rules, summary, report))
        if density is not None:
            click.echo(f"bytes   {density:.3f} bits per byte of validation text")
        click.echo(f"record  {config.out}\nplot    {picture}")
        click.echo(f"next    {following(config, summary, report)}")
    return 0 if summary.target_reached and report.exit_code == 0 else 1


def _deadlines_s(texts: tuple[str, ...]) -> dict[str, float]:
    """Parse `phase=seconds` texts."""
    found: dict[str, float] = {}
    for text in texts:
        phase, _, seconds = text.partition("=")
        if phase not in watchdog.DEADLINES_S:
            raise unknown("phase", phase, watchdog.DEADLINES_S)
        if not seconds.isdecimal():
            raise UsageError(f"--deadline {text!r}; need whole seconds, for example --deadline step=60")
        found[phase] = float(seconds)
    return found


def _child_words(ctx: click.Context, out: Path) -> list[str]:
    """Return the arguments of this command for a process that shares the run."""
    words = ["--resume", str(out)] if ctx.params["resume"] else ["--out", str(out)]
    for option in ctx.command.params:
        name = option.name or ""
        is_given = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if is_given and name not in ("resume", "out", "local_processes"):
            value = ctx.params[name]
            for one in value if isinstance(value, tuple) else [value]:
                words += [option.opts[0]] if one is True else [option.opts[0], str(one)]
    return words
