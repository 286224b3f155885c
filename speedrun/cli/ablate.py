"""`speedrun ablate`: what each feature of a recipe is worth."""

import click

from speedrun.cli import experiment
from speedrun.cli.options import example, parse_settings, settings_option
from speedrun.ground.errors import UsageError


@click.command(
    epilog=example(
        "speedrun ablate --track smoke-cpu --features all --runs 4",
        "speedrun ablate --features value-embeddings,cooldown --runs 2 --set stages.0.num_steps=140",
        "speedrun ablate --track docs-cpu --ladder --runs 3 --set config.vocab_size=4096 --set config.head_size=4096",
        "speedrun ablate --resume runs/2026-11-21-smoke-cpu-ablate-1",
    )
)
@click.option(
    "--features",
    metavar="NAME,...",
    default="all",
    show_default=True,
    help="What to switch off, one at a time: names of speedrun/study/features.py.",
)
@click.option(
    "--ladder", is_flag=True, help="Instead: the recipe and its ancestors, each against its parent."
)
@settings_option
@experiment.options
@click.pass_context
def command(
    ctx: click.Context, *, features: str, ladder: bool, settings: tuple[str, ...], **_: object
) -> None:
    """Run a recipe as it is and with one feature off at a time, all with the same seeds; say what each is worth.

    Loss and time are compared inside pairs of one seed, p is adjusted for the number of arms, and the best arm runs
    again with fresh seeds. --set holds for every arm. This is research: nothing of it is ranked.
    """
    if ladder and features != "all":
        raise UsageError("got --ladder and --features; a ladder compares whole recipes: leave one out")
    asked = () if features == "all" else tuple(name for name in features.split(",") if name)
    kind = "ladder" if ladder else "features"
    experiment.perform(ctx, kind, parse_settings(settings), features=asked)
