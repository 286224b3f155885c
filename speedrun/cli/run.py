"""`speedrun run`: one run on a track, and the record of it."""

import importlib
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from speedrun.board.record_plot import plot
from speedrun.cli import together
from speedrun.cli.card import card, following
from speedrun.cli.options import (
    Integer,
    attention_option,
    data_option,
    devices_option,
    example,
    json_option,
    microbatches_option,
    only_with_resume,
    parse_settings,
    recipe_option,
    settings_option,
    track_option,
)
from speedrun.cli.race import find, ghost_option, live
from speedrun.cli.relay import relayed, wandb_option
from speedrun.data import generated, inventory, overview
from speedrun.ground import clock, signals
from speedrun.ground import processes as group
from speedrun.ground import track as tracks
from speedrun.ground.errors import INTERRUPTED, CheckpointError, SpeedrunError, UsageError, unknown
from speedrun.ledger import format, runfile
from speedrun.ledger.assemble import assemble
from speedrun.ledger.salvage import ended, salvage
from speedrun.ledger.validate import Report, validate
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
@track_option()
@recipe_option
@click.option(
    "--seed", type=Integer(0, 2**31 - 1), default=0, show_default=True, help="Initialises the weights."
)
@settings_option
@devices_option
@click.option(
    "--replicas",
    type=Integer(1),
    metavar="N",
    help="Copies of the state, each divided over as many devices. Default: one for each node.",
)
@attention_option
@microbatches_option
@data_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A new folder. Default: runs/<date>-<track>-<n>.",
)
@click.option(
    "--checkpoint-every",
    type=Integer(1),
    metavar="N",
    help="Steps from one checkpoint to the next, in DIR.checkpoints; writing them counts as train time. "
    "Default: none.",
)
@click.option(
    "--keep-checkpoints",
    type=Integer(0),
    default=2,
    show_default=True,
    metavar="N",
    help="The newest ones; 0: all.",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Go on with the run in DIR from its newest checkpoint, with its settings. Never ranked.",
)
@click.option(
    "--deadline",
    "deadlines",
    multiple=True,
    metavar="PHASE=SECONDS",
    help=f"End a run that stays longer in one {', '.join(watchdog.DEADLINES_S)}; 0: let it. Repeatable.",
)
@together.options
@ghost_option
@wandb_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    track: str,
    recipe: str | None,
    seed: int,
    settings: tuple[str, ...],
    devices: int | None,
    replicas: int | None,
    microbatches: int | None,
    attention: str,
    data: Path | None,
    out: Path | None,
    checkpoint_every: int | None,
    keep_checkpoints: int,
    resume: Path | None,
    deadlines: tuple[str, ...],
    local_processes: int | None,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    heartbeat: int,
    meet_within: int,
    ghost: str | None,
    wandb: str | None,
    as_json: bool,
) -> None:
    """Train once on a track, under the clock; write, draw and validate a record.

    Exits with 0 if the target is reached and every check passes, with 1 if not.
    """
    # A track or a setting that does not exist is told before JAX is imported, which takes a while.
    rules, overrides = tracks.load(track), parse_settings(settings)
    if local_processes is not None:
        if coordinator:
            raise UsageError(
                "--local-processes and --coordinator; the first chooses the second; leave one out"
            )
        ctx.exit(together.ended(local_processes, _words(ctx, resume or out or new_folder(track))))
    ctx.with_resource(signals.heeded())
    _load_jax()
    from speedrun.training.prepare import RunConfig

    config = RunConfig(
        track=track,
        out=out or new_folder(track),
        recipe=recipe,
        seed=seed,
        overrides=overrides,
        data=data,
        num_devices=devices,
        replicas=replicas,
        microbatches=microbatches,
        attention=attention,
        checkpoint_every=checkpoint_every or 0,
        keep_checkpoints=keep_checkpoints,
        deadlines_s=_deadlines_s(deadlines),
    )
    if resume is not None:
        only_with_resume(ctx, "ghost", "wandb", *together.ARGUMENTS)
    fresh = resume is not None or not os.path.exists(config.out)
    finished = None if resume is None else _finished(resume)
    try:
        with meet.joined(meet.asked(coordinator, processes, process, heartbeat, meet_within)):
            if resume is not None:
                config = finished or _begun(resume)
                rules = tracks.load(config.track)
            if finished is None:
                with relayed(config.out, wandb if group.is_first() else None):
                    _train(config, rules, ghost, to_stderr=as_json)
    except BaseException:
        if fresh and group.is_first():
            _keep(config.out, _title(config, rules))
        raise
    if not group.is_first():
        return
    summary = assemble(config.out, title=_title(config, rules), declared_runs=1)
    picture = next(path for path in plot(config.out) if path.suffix == ".png")
    report = validate(config.out)
    density = _bits_per_byte(rules, config.data, summary)
    if as_json:
        click.echo(_encoded(config.out, picture, summary, report, density))
    else:
        click.echo(card(rules, summary, report))
        if density is not None:
            click.echo(f"bytes   {density:.3f} bits per byte of validation text")
        click.echo(f"record  {config.out}\nplot    {picture}")
        click.echo(f"next    {following(config, summary, report)}")
    ctx.exit(0 if summary.target_reached and report.exit_code == 0 else 1)


def _load_jax() -> None:
    """A signal meanwhile waits: an exception inside the start of a library in C++ would crash the process."""
    got: list[int] = []
    with signals.handled_by(lambda number, _: os._exit(INTERRUPTED) if got else got.append(number)):
        importlib.import_module("speedrun.training.train")
    if got:
        signals.stop(got[0], None)


def _title(config: "RunConfig", rules: tracks.Track) -> str:
    return f"{config.recipe or rules.recipe} on {rules.id}"


def _deadlines_s(texts: tuple[str, ...]) -> dict[str, float]:
    """`phase=seconds` texts as a dictionary."""
    found: dict[str, float] = {}
    for text in texts:
        phase, _, seconds = text.partition("=")
        if phase not in watchdog.DEADLINES_S:
            raise unknown("phase", phase, watchdog.DEADLINES_S)
        if not seconds.isdecimal():
            raise UsageError(f"--deadline {text!r}; need whole seconds, for example --deadline step=60")
        found[phase] = float(seconds)
    return found


def _train(config: "RunConfig", rules: tracks.Track, ghost: str | None, *, to_stderr: bool) -> None:
    """Trains; of several processes, only the first one has something to show."""
    generated.ensure(rules, config.data, partial(click.echo, err=True))
    from speedrun.training.train import train

    if not group.is_first():
        train(config)
        return
    with live(sys.stderr if to_stderr else sys.stdout, find(ghost, rules.id)) as reader:
        train(config, reader)


def _words(ctx: click.Context, out: Path) -> list[str]:
    """What this command was told, for a process that shares the run."""
    words = ["--resume", str(out)] if ctx.params["resume"] else ["--out", str(out)]
    left_out = {"resume", "out", "local_processes"}
    for option in ctx.command.params:
        name, value = option.name, ctx.params.get(option.name or "")
        if (
            name in left_out
            or ctx.get_parameter_source(name or "") is not click.core.ParameterSource.COMMANDLINE
        ):
            continue
        for one in value if isinstance(value, tuple) else [value]:
            words += [option.opts[0]] if one is True else [option.opts[0], str(one)]
    return words


def _begun(out: Path) -> "RunConfig":
    """What the run in a folder was asked to do; if it was killed, what is left of it becomes a run that broke off."""
    from speedrun.training import checkpoint
    from speedrun.training.prepare import Begun, decoded

    path = checkpoint.folder_of(out) / checkpoint.RUN
    if not path.exists():
        raise UsageError(
            f"{out} has no checkpoints to go on from: {path} is missing; run anew with another --out, and "
            "--checkpoint-every where it should be possible to go on"
        )
    try:
        begun = decoded(checkpoint.unsealed(msgspec.json.decode(path.read_bytes())), Begun)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: {getattr(error, 'strerror', None) or error}; run anew with another --out"
        ) from None
    if group.is_first():
        salvage(out, begun.recipe, begun.num_devices)
    return msgspec.structs.replace(begun.config, out=out, resume=True)


def _finished(out: Path) -> "RunConfig | None":
    """What the run in a folder was, if it came to its end: then only its record is still to be written."""
    from speedrun.training.prepare import RunConfig

    if (out / runfile.BATCH).exists():
        raise UsageError(f"{out} is a batch; type: speedrun batch --resume {shlex.quote(str(out))}")
    for path in out.glob("runs/*/run.json"):
        try:
            run = format.decode(path.read_bytes(), runfile.RunFile)
        except runfile.FormatError:
            continue  # it will be written again from its log
        if run.outcome == "finished" and ended(path.parent):
            track = run.track.rpartition("@")[0]
            recipe = None if run.recipe == tracks.load(track).recipe else run.recipe
            return RunConfig(track, out, recipe, run.seed, run.overrides)
    return None


def _keep(out: Path, title: str) -> None:
    """A run that broke off is a record, too: of a failure."""
    if not list(out.glob("runs/*/run.json")):
        return
    try:
        assemble(out, title=title, declared_runs=1)
        click.echo(f"record  {out} tells where the run broke off", err=True)
    except SpeedrunError as error:  # the error on its way out matters more
        click.echo(f"warning: the record of the broken run is incomplete: {error}", err=True)


def new_folder(track: str) -> Path:
    """The first name of today that is free."""
    taken = (Path("runs") / f"{clock.today()}-{track}-{i}" for i in range(1, 10_000))
    return next(path for path in taken if not path.exists())


def _bits_per_byte(rules: tracks.Track, data: Path | None, summary: format.Summary) -> float | None:
    """Of the run's validation, where the data's manifest knows the bytes."""
    if summary.val_loss_mean is None:
        return None
    return overview.bits_per_byte(summary.val_loss_mean, inventory.data_folder(rules, data), rules.data)


def _encoded(
    out: Path, picture: Path, summary: format.Summary, report: Report, density: float | None
) -> bytes:
    return msgspec.json.encode(
        {
            "record": str(out),
            "plot": str(picture),
            "summary": summary,
            "bits_per_byte": density,
            "failed_checks": {r.check.id: r.messages for r in report.having("failed")},
        }
    )
