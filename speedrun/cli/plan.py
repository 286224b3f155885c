"""The commands `recipes` and `plan`."""

from pathlib import Path
from typing import Annotated

import click
import msgspec

from speedrun.base import accelerators as kinds
from speedrun.base import track as tracks
from speedrun.base.children import say
from speedrun.base.errors import UsageError
from speedrun.base.output import expected
from speedrun.cli import options as cli


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
    "speedrun plan --track main-8xh100 --runs 4 --dollars 2.50",
    "speedrun plan --check records/webmini/2026-11-26-first-gpu",
)
def plan(
    ctx: click.Context,
    *,
    recipe: Annotated[cli.Recipe | None, "Recipe to train. Default: the track's, or smoke."] = None,
    track: Annotated[str | None, "--track NAME", "Add data, time and cost of a batch on this track."] = None,
    runs: Annotated[cli.Count | None, "Runs of that batch. Default: as many as a rank takes."] = None,
    kind: Annotated[str, "--device-kind KIND", ", ".join(kinds.DEVICES)] = "h100",
    devices: Annotated[cli.Count | None, "Devices of a machine. Default: the track's, or 8."] = None,
    microbatches: Annotated[cli.Count, "Parts of a node's batch."] = 8,
    settings: cli.Settings = (),
    dollars: Annotated[cli.Amount | None, "Price of one device for an hour."] = None,
    check: Annotated[tuple[Path, ...], "--check RECORD"] = (),
) -> cli.Answer:
    """Predict memory, bounds, time and cost of a recipe on devices that need not be here.

    Exits with 1 if it does not fit into memory, with advice.

    Options:
        check: Instead, compare the steps of a record from a GPU with the plan of its recipe.
    """
    if check:
        return _checked(ctx, check)
    kinds.load(kind)
    rules = None if track is None else tracks.load(track)
    on_gpu = rules is None or rules.rules.platform == "gpu"
    if runs is not None and rules is None:
        raise UsageError(f"--runs {runs} needs a track; add --track NAME")
    if not on_gpu and devices:
        raise UsageError(f"--devices: {track} needs no GPU; leave it out, or leave out --track")
    overrides = cli.parse_settings(settings)
    from speedrun import recipes
    from speedrun.lab import budget as budgets
    from speedrun.plan import estimate as planning

    chosen = recipes.load(recipe or (rules.recipe if rules else "smoke")).override(overrides)
    error, facts, lines, planned = None, {}, [], None
    if on_gpu:
        num_devices = devices or (rules.rules.num_devices if rules else 8)
        planned = planning.plan(chosen, kind, num_devices, microbatches, say)
        error = planning.refusal(chosen, planned)
        facts, lines = planned.facts(dollars), planned.lines(dollars)
    if rules is not None:
        num_runs = runs or max(2, rules.rules.min_runs)
        batch = budgets.budget(rules, chosen, num_runs, Path("records"), planned, dollars=dollars)
        said = budgets.lines(batch, planned.error if planned else 0.0)
        facts, lines = facts | {"batch": msgspec.structs.asdict(batch) | {"said": said}}, lines + said
    return cli.Answer({"error": error, **facts}, lines, error=error)


def _checked(ctx: click.Context, paths: tuple[Path, ...]) -> cli.Answer:
    """Compare the model with records."""
    from speedrun.plan import calibration

    if other := [option.opts[0] for option in cli.typed(ctx) if option.name not in ("check", "as_json")]:
        raise UsageError(f"--check measures nothing with {other[0]}; leave it out")
    stages = {str(path): calibration.check(path) for path in paths}
    lines = [line for path, found in stages.items() for line in (f"record {path}", *found)]
    return cli.Answer({"records": stages}, lines)
