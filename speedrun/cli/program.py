"""Steps of a recipe without a track: which recipe, on which devices, with which kernels, from which step on."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from speedrun.cli.options import (
    Decorator,
    Integer,
    attention_option,
    parse_settings,
    settings_option,
)
from speedrun.ground.errors import UsageError

if TYPE_CHECKING:
    from speedrun.training.program import Program

_OPTIONS: tuple[Decorator, ...] = (
    click.option("--recipe", metavar="NAME", default="smoke", show_default=True, help="What to train."),
    click.option("--devices", type=Integer(1), metavar="N", help="Default: all there are."),
    click.option(
        "--microbatches", type=Integer(1), default=8, show_default=True, help="Parts of a step's batch."
    ),
    attention_option,
    click.option("--first-step", type=Integer(0), default=0, show_default=True, help="Of the schedule."),
    settings_option,
)


def program_options(command: Callable[..., object]) -> Callable[..., object]:
    """The options whose values `asked_program` takes."""
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
    """The program that the options ask for.

    Raises:
        UsageError: for a step that the recipe has not; what recipe, devices and kernels refuse; too little memory.
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
    footprint.require(program, footprint.most_bytes(program))
    return program
