"""The command `plan`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from speedrun.base import accelerators as kinds
from speedrun.base import track as tracks
from speedrun.base.errors import UsageError
from speedrun.base.subprocesses import say
from speedrun.cli import options as cli
from speedrun.cli import requests
from speedrun.commands import added

if TYPE_CHECKING:
    from speedrun.plan.estimate import Plan


@cli.command(
    "speedrun plan --recipe record21 --device-kind h100 --devices 8",
    "speedrun plan --track main-8xh100 --dollars 2.50",
    silent=True,
)
def plan(
    size: requests.Size,
    *,
    recipe: Annotated[cli.Recipe | None, "Recipe to train. Default: the track's, or smoke."] = None,
    track: Annotated[
        str | None, "--track NAME", "Add data, time and cost of a batch, and its chance."
    ] = None,
    kind: Annotated[str, "--device-kind KIND", ", ".join(kinds.DEVICES)] = "h100",
    devices: Annotated[cli.Count | None, "Devices of a machine. Default: the track's, or 8."] = None,
    microbatches: Annotated[cli.Count, "Parts of a node's batch."] = 8,
    settings: cli.Settings = cli.UNCHANGED,
    dollars: Annotated[cli.Amount | None, "Price of one device for an hour."] = None,
) -> "cli.Answer[Plan | requests.Priced]":
    """Predict memory, bounds, time and cost of a recipe on devices that need not be here.

    Exits with 1 if it does not fit into memory, with advice. With --track, it prices what `speedrun batch` would do.
    """
    kinds.load(kind)
    if track is None and any(number is not None for number in (*size, dollars)):
        raise UsageError("a price or a number of runs is that of a batch on a track; add --track NAME")
    if track is not None and tracks.load(track).rules.platform != "gpu" and devices:
        raise UsageError(f"--devices: {track} needs no GPU; leave it out, or leave out --track")
    if track is not None:
        from speedrun.train.batch import BatchRequest

        same = {"recipe": recipe, "num_devices": devices, "microbatches": microbatches}
        config = requests.RunOptions(track, settings=settings, **same).request(Path())
        found = added("budget")(BatchRequest(config, *size), kind, dollars=dollars, say=say)
        return cli.Answer(found, found.lines(), error=found.error)
    from speedrun import recipes
    from speedrun.plan import estimate as planning

    chosen = recipes.load(recipe or "smoke").override(settings)
    planned = planning.plan(chosen, kind, devices or 8, microbatches, say)
    return cli.Answer(planned, planned.lines(), error=planned.error)
