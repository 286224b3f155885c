"""Commands that time steps of a recipe without a track: their options, their program, and `speedrun bench step`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from speedrun.cli.options import (
    Decorator,
    Integer,
    attention_option,
    example,
    json_option,
    parse_settings,
    recipe_option,
    settings_option,
)
from speedrun.ground.errors import UsageError

if TYPE_CHECKING:
    from speedrun.training.program import Program

_OPTIONS: tuple[Decorator, ...] = (
    recipe_option("smoke", "What to train."),
    click.option("--devices", type=Integer(1), metavar="N", help="Default: all there are."),
    click.option(
        "--microbatches", type=Integer(1), default=8, show_default=True, help="Parts of a step's batch."
    ),
    attention_option,
    click.option("--first-step", type=Integer(0), default=0, show_default=True, help="Of the schedule."),
    settings_option,
)


def program_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add the options whose values `asked_program` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def asked_program(
    *,
    recipe: str,
    devices: int | None,
    microbatches: int,
    attention: str,
    first_step: int,
    settings: tuple[str, ...],
) -> "Program":
    """Return the program that the options ask for.

    Raises:
        UsageError: for a step past the end; what recipe, devices and kernels refuse; too little memory.
    """
    overrides = parse_settings(settings)
    import jax

    from speedrun.ground import mesh
    from speedrun.science import recipes
    from speedrun.training import footprint
    from speedrun.training.program import Program

    chosen = recipes.load(recipe).override(overrides)
    if first_step >= chosen.num_steps:
        raise UsageError(f"--first-step {first_step}: {recipe} has {chosen.num_steps} steps; need one below")
    mesh.prepare("any")
    program = Program(chosen, mesh.make_mesh(devices or len(jax.devices())), microbatches, attention)
    return footprint.fitted_here(program)


def show(found: Any, *, as_json: bool) -> None:
    """Print a result, or each of several, as JSON or as its own text."""
    text = "\n".join(map(str, found)) if isinstance(found, list) else str(found)
    click.echo(msgspec.json.encode(found) if as_json else text)


@click.command(
    epilog=example("speedrun bench step --recipe smoke", "speedrun bench step --recipe record21 --steps 20")
)
@program_options
@click.option("--steps", type=Integer(1), default=10, show_default=True, help="Number of timed steps.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of shards. Default: synthetic ids with the document lengths of FineWeb.",
)
@click.option("--no-command-buffers", is_flag=True, help="XLA launches kernels one by one.")
@json_option
def step(
    *, steps: int, data: Path | None, first_step: int, no_command_buffers: bool, as_json: bool, **asked: Any
) -> None:
    """The training step as in a run, one ahead: milliseconds, tokens per second, MFU, memory."""
    program = asked_program(first_step=first_step, **asked)
    from speedrun.bench import loading
    from speedrun.bench import steps as timing

    found = timing.step(
        program,
        num_steps=steps,
        first_step=first_step,
        shards=loading.folder_shards(data, None) if data else (),
        command_buffers=not no_command_buffers,
    )
    show(found, as_json=as_json)
