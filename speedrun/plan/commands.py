"""The command `plan`."""

from typing import Annotated

from speedrun.base import accelerators as kinds
from speedrun.base.children import say
from speedrun.cli import options as cli


@cli.command(
    "speedrun plan --recipe record21 --device-kind h100 --devices 8",
    "speedrun plan --recipe webmini --device-kind a100",
    "speedrun batch --track main-8xh100 --dry-run --dollars 2.50",
    silent=True,
)
def plan(
    *,
    recipe: Annotated[cli.Recipe, "Recipe to train."] = "smoke",
    kind: Annotated[str, "--device-kind KIND", ", ".join(kinds.DEVICES)] = "h100",
    devices: Annotated[cli.Count, "Devices of a machine."] = 8,
    microbatches: Annotated[cli.Count, "Parts of a node's batch."] = 8,
    settings: cli.Settings = cli.UNCHANGED,
) -> cli.Answer:
    """Predict memory, bounds and time of a recipe on devices that need not be here.

    Exits with 1 if it does not fit into memory, with advice. `speedrun batch --dry-run` prices the runs of a track.
    """
    kinds.load(kind)
    from speedrun import recipes
    from speedrun.plan import estimate as planning

    chosen = recipes.load(recipe).override(settings)
    planned = planning.plan(chosen, kind, devices, microbatches, say)
    error = planning.refusal(chosen, planned)
    return cli.Answer({"error": error, **planned.facts()}, planned.lines(), error=error)
