"""`speedrun bench`: how far operations are from their bounds on this machine."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from speedrun.base.errors import UsageError
from speedrun.cli import options as cli
from speedrun.machine import bench_rival as rivals

if TYPE_CHECKING:
    from speedrun.train.program import Program


@cli.new_command("speedrun bench head", "speedrun bench attention", cls=cli.Group)
def command() -> None:
    """Time operations side by side, in one run."""


def _answer(found: Any) -> cli.Answer:
    """Answer with timings, one or several, which know their own text."""
    return cli.Answer(found, found if isinstance(found, list) else [found])


# --- operations ------------------------------------------------------------------------------------------------


@cli.new_command("speedrun bench head", "speedrun bench head --tokens 4096 --dim 768", of=command)
@cli.option("--tokens N", cli.COUNT, "Rows of the logits.", 1024, name="num_tokens")
@cli.option("--dim N", cli.COUNT, "Width of the model.", 128, name="model_dim")
@cli.option("--vocab N", cli.COUNT, "Columns of the logits.", 50304, name="vocab_size")
def head(**sizes: int) -> cli.Answer:
    """Loss and gradients of the vocabulary head, against its definition and its three matrix products."""
    from speedrun.machine import bench_kernels

    return _answer(bench_kernels.head(**sizes))


@cli.new_command(
    "speedrun bench attention",
    "speedrun bench attention --tokens 49152 --heads 6 --dim 128 --window 14 --block 128 --document 600",
    of=command,
)
@cli.option("--tokens N", cli.COUNT, "Sequence length.", 2048, name="num_tokens")
@cli.option("--heads N", cli.COUNT, "Number of heads.", 4, name="num_heads")
@cli.option("--dim N", cli.COUNT, "Width of a head.", 32, name="head_dim")
@cli.option("--window N", cli.COUNT, "Blocks that a query sees.", 4, name="window_blocks")
@cli.option("--block N", cli.COUNT, "Tokens of a block.", 64, name="block_tokens")
@cli.option("--document N", cli.COUNT, "Tokens of a document.", 600, name="document_tokens")
def attention(**sizes: int) -> cli.Answer:
    """Attention and its gradients, in every form that runs here, against the definition."""
    from speedrun.machine import bench_kernels

    return _answer(bench_kernels.attention(**sizes))


@cli.new_command("speedrun bench norm", "speedrun bench norm --tokens 49152 --dim 128", of=command)
@cli.option("--tokens N", cli.COUNT, "Sequence length.", 2048, name="num_tokens")
@cli.option("--heads N", cli.COUNT, "Number of heads.", 4, name="num_heads")
@cli.option("--dim N", cli.Integer(4), "Width of a head.", 32, name="head_dim")
def norm(**sizes: int) -> cli.Answer:
    """QK-norm and rotary with their gradients, in every form that runs here, against the definition."""
    from speedrun.machine import bench_kernels

    return _answer(bench_kernels.norm(**sizes))


@cli.new_command("speedrun bench muon", "speedrun bench muon --recipe record21 --devices 8", of=command)
@cli.recipe_option("smoke", "Whose matrices.")
@cli.option("--devices N", click.Choice(["1", "2", "4", "8"]), "Time the share of one of N.", "1")
@cli.settings_option
def muon(*, recipe: str, devices: str, settings: tuple[str, ...]) -> cli.Answer:
    """Newton-Schulz on the matrices of one device, against its products alone and against optax."""
    one = _program(recipe, settings)
    from speedrun.machine import bench_kernels

    return _answer(bench_kernels.muon(one, int(devices)))


@cli.new_command("speedrun bench loader", "speedrun bench loader --data data/fineweb10B", of=command)
@cli.option(
    "--data DIR",
    cli.FOLDER,
    "Folder of shards. Default: two of 100 million tokens, made for this and removed.",
)
def loader(*, data: Path | None) -> cli.Answer:
    """Batches from shards, against what eight H100 consume: tokens per second, waiting, the first batch."""
    from speedrun.machine import bench_loader

    if data is None:
        click.echo("writes two shards of 100 million tokens, and removes them", err=True)
    with nullcontext(bench_loader.folder_shards(data)) if data else bench_loader.synthetic_shards() as shards:
        return _answer(bench_loader.measure(shards))


@cli.new_command("speedrun bench target", of=command)
def target() -> cli.Answer:
    """Print how XLA describes this GPU, to compile for it elsewhere (`speedrun/base/accelerators.py`)."""
    from speedrun.machine.rates import described

    text = described()
    return cli.Answer({"target": text}, [text])


# --- steps of a recipe -----------------------------------------------------------------------------------------

#: The options whose values `asked_program` takes.
program_options = cli.combined(
    cli.recipe_option("smoke", "What to train."),
    cli.option("--devices N", cli.COUNT, "Default: all there are."),
    cli.option("--microbatches N", cli.COUNT, "Parts of a step's batch.", 8),
    cli.attention_option,
    cli.first_step_option,
    cli.settings_option,
)


def asked_program(*, first_step: int, **asked: Any) -> "Program":
    """Return the program that the options ask for.

    Raises:
        UsageError: for a step past the end; what recipe, devices and kernels refuse; too little memory.
    """
    program = _program(**asked)
    from speedrun.train import footprint

    num_steps = program.recipe.num_steps
    if first_step >= num_steps:
        raise UsageError(f"--first-step {first_step}: {asked['recipe']} has {num_steps} steps; need less")
    return footprint.fitted_here(program)


def _program(
    recipe: str,
    settings: tuple[str, ...],
    devices: int | None = 1,
    microbatches: int = 8,
    attention: str = "auto",
) -> "Program":
    overrides = cli.parse_settings(settings)
    import jax

    from speedrun import recipes
    from speedrun.base import mesh
    from speedrun.train.program import Program

    chosen = recipes.load(recipe).override(overrides)
    mesh.prepare("any")
    return Program(chosen, mesh.make_mesh(devices or len(jax.devices())), microbatches, attention)


@cli.new_command("speedrun bench step --recipe smoke", "speedrun bench step --steps 20", of=command)
@program_options
@cli.option("--steps N", cli.COUNT, "Number of timed steps.", 10)
@cli.option("--data DIR", cli.FOLDER, "Shards. Default: synthetic ids with the document lengths of FineWeb.")
@cli.flag("--no-command-buffers", "XLA launches kernels one by one.", "one_by_one")
def step(*, steps: int, data: Path | None, first_step: int, one_by_one: bool, **asked: Any) -> cli.Answer:
    """The training step as in a run, one ahead: milliseconds, tokens per second, MFU, memory."""
    program = asked_program(first_step=first_step, **asked)
    from speedrun.machine import bench_loader
    from speedrun.machine import bench_step as timing

    shards = bench_loader.folder_shards(data, None) if data else ()
    when = {"num_steps": steps, "first_step": first_step}
    return _answer(timing.step(program, **when, shards=shards, command_buffers=not one_by_one))


@cli.new_command("speedrun bench rival ../rival --data DIR --recipe record21 --steps 60", of=command)
@click.argument("folder", type=cli.FOLDER)
@cli.option("--data DIR", cli.FOLDER, "Shards that both read.", required=True)
@cli.recipe_option("record21", "Ours.")
@cli.option("--steps N", cli.COUNT, "Of each run.", 60)
@cli.first_step_option
@cli.option("--devices N", cli.COUNT, "Of each program.", 1)
@cli.option("--microbatches N", cli.COUNT, "Parts of a step's batch.", 1)
@cli.attention_option
@cli.settings_option
def rival(*, folder: Path, steps: int, first_step: int, settings: tuple[str, ...], **same: Any) -> cli.Answer:
    """Time our step and another program's in turns, ABBA, on the same tokens; FOLDER/run is that program.

    It is called with --shards DIR --steps N --first-step I --sequences N --seq-len N, and writes a line of JSON for
    each step: {"step": i, "time_s": seconds since the first began, "loss": nats}.
    """
    from speedrun import recipes

    program = rivals.executable(folder)
    chosen = recipes.load(same["recipe"]).override(cli.parse_settings(settings))
    stage = chosen.stages[chosen.stage_of(first_step)]
    which = ["--steps", str(steps), "--first-step", str(first_step)]
    ours = [sys.executable, "-m", "speedrun", "bench", "step", "--json", *which]
    ours += [word for name, value in same.items() for word in (f"--{name}", str(value))]
    ours += [word for text in settings for word in ("--set", text)]
    shape = ["--sequences", str(stage.num_sequences), "--seq-len", str(stage.seq_len)]
    theirs = [str(program), "--shards", str(same["data"]), *which, *shape]
    return _answer(rivals.compare(ours, theirs, steps, lambda line: click.echo(line, err=True)))
