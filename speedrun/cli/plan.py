"""The commands `recipes` and `plan`."""

from pathlib import Path
from typing import Annotated

from speedrun.base import accelerators as kinds
from speedrun.base import track as tracks
from speedrun.base.children import say
from speedrun.base.errors import UsageError
from speedrun.base.output import expected
from speedrun.cli import options as cli
from speedrun.cli import requests


@cli.command("speedrun recipes", "speedrun recipes smoke")
def recipes(name: Annotated[cli.Recipe | None, "[NAME]"] = None) -> cli.Answer:
    """List the recipes, or the settings of the recipe NAME, in the form of --set."""
    from speedrun import recipes
    from speedrun.science import params
    from speedrun.science.recipe import IDENTITY, settings

    found: dict[str, object] = {}
    lines = []
    if name is not None:
        found = {key: value for key, value in settings(recipes.load(name)).items() if key not in IDENTITY}
        lines = [f"{key}={value}" for key, value in found.items()]
    for each in recipes.names() if name is None else []:
        try:
            one = recipes.load(each)
        except BaseException as error:
            if (known := expected(error)) is None:
                raise
            say(f"warning: recipe {each} cannot be loaded: {known}")
            continue
        num_params = params.count(one.table(one.config))
        found[each] = {
            "summary": one.summary,
            "parent": one.parent,
            "num_params": num_params,
            "num_steps": one.num_steps,
            "total_tokens": one.total_tokens,
        }
        counts = f"{num_params:>12,} parameters  {one.total_tokens:>12,} tokens"
        lines.append(f"{each:<{max(map(len, recipes.names()))}}  {counts}  {one.summary}")
    return cli.Answer(found, lines)


@cli.command(
    "speedrun plan --recipe record21 --device-kind h100 --devices 8",
    "speedrun plan --recipe webmini --device-kind a100",
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
    settings: cli.Settings = (),
    dollars: Annotated[cli.Amount | None, "Price of one device for an hour."] = None,
) -> cli.Answer:
    """Predict memory, bounds, time and cost of a recipe on devices that need not be here.

    Exits with 1 if it does not fit into memory, with advice.
    """
    kinds.load(kind)
    if track is None and any(number is not None for number in (*size, dollars)):
        raise UsageError("a price or a number of runs is that of a batch on a track; add --track NAME")
    if track is not None and tracks.load(track).rules.platform != "gpu" and devices:
        raise UsageError(f"--devices: {track} needs no GPU; leave it out, or leave out --track")
    overrides = cli.parse_settings(settings)
    if track is None:
        from speedrun import recipes
        from speedrun.plan import estimate as planning

        chosen = recipes.load(recipe or "smoke").override(overrides)
        planned = planning.plan(chosen, kind, devices or 8, microbatches, say)
        error = planning.refusal(chosen, planned)
        return cli.Answer({"error": error, **planned.facts()}, planned.lines(), error=error)
    from speedrun.lab.budget import budget

    same = {"recipe": recipe, "num_devices": devices, "microbatches": microbatches}
    options = requests.RunOptions(track, **same)
    found = budget(size.promise(options.request(Path(), overrides)), kind, dollars=dollars, say=say)
    lines = [*(found.plan.lines() if found.plan else []), *found.budget.lines()]
    facts = {} if found.plan is None else found.plan.facts()
    return cli.Answer({"error": found.error, **facts, "batch": found.budget}, lines, error=found.error)
