"""`speedrun sweep`: a recipe with other settings, without its features, or against its ancestors."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from speedrun.base import children
from speedrun.base import track as tracks
from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.cli import options as cli
from speedrun.cli.run_options import config_options, new_folder, request_of
from speedrun.data import generated
from speedrun.lab import search_space
from speedrun.lab.report import table
from speedrun.lab.run_experiment import Runner
from speedrun.lab.trials import Kind, Request


@cli.new_command(
    "speedrun sweep --set optimizer.muon_lr=0.025,0.05,0.1 --set schedule.momentum_end=0.9,0.95 --runs 2",
    "speedrun sweep --set optimizer.muon_lr=0.01..0.2 --trials 8 --runs 2 --confirm 6",
    "speedrun sweep --features all --runs 4",
    "speedrun sweep --features value-embeddings,cooldown --runs 2 --set stages.0.num_steps=140",
    "speedrun sweep --track docs-cpu --ladder --runs 3 --set config.vocab_size=4096 --set config.head_size=4096",
    "speedrun sweep --resume runs/2026-11-21-smoke-cpu-sweep-1",
)
@cli.option(
    "--set KEY=VALUE,...",
    str,
    "Values to try; LOW..HIGH with --trials. A single value holds for every arm.",
    name="settings",
    multiple=True,
)
@cli.option("--trials K", cli.COUNT, "K random combinations instead of the grid.")
@cli.option("--seed N", cli.NATURAL, "Of the random combinations.", 0)
@cli.option(
    "--features NAME,...",
    str,
    "Instead, switch off one feature at a time: 'all', or names of speedrun/lab/features.py.",
)
@cli.flag("--ladder", "Instead, compare the recipe and its ancestors, each with its parent.")
@cli.option("--runs N", cli.COUNT, "Runs of each arm, all with the same N seeds.")
@cli.option(
    "--confirm N",
    cli.NATURAL,
    "Fresh seeds for the best arm and the one it is compared with. Default: as many as --runs.",
)
@config_options
@cli.option("--resume DIR", cli.PATH, "Run what is missing.")
@click.pass_context
def command(ctx: click.Context, *, data: Path | None, resume: Path | None, **given: Any) -> cli.Answer:
    """Run a recipe as it is and in other variants, all with the same seeds; report which are better.

    The variants have other settings (--set), lack a feature (--features), or are ancestors (--ladder). Loss and time
    are compared in pairs of one seed, p is adjusted for the number of arms, and the best arm runs again with fresh
    seeds. This is research: nothing of it is ranked.
    """
    if resume is None:
        request = _request({**given, "data": data})
        generated.ensure(tracks.load(given["track"]), data, partial(click.echo, err=True))
        if code := children.run_module("speedrun.lab.design", request):
            ctx.exit(children.shell_code(code))
        folder = request.config.out
    else:
        cli.only_with_resume(ctx, "data")
        folder = resume
    done = Runner(folder, data, lambda line: click.echo(clean(line), err=True)).run()
    plots = [str(path) for path in done.plots]
    facts = {"experiment": str(folder), "summary": done.summary, "plots": plots}
    return cli.Answer(facts, map(clean, [*table(done.summary), *(f"plot    {path}" for path in plots[-1:])]))


def _request(given: dict[str, Any]) -> Request:
    """Return the experiment that the options say."""
    features, ladder, trials = given["features"], given["ladder"], given["trials"]
    settings = {
        key: search_space.parse(key, text) for key, text in cli.parse_settings(given["settings"]).items()
    }
    fixed = {key: one[0] for key, one in settings.items() if isinstance(one, tuple) and len(one) == 1}
    free = {key: values for key, values in settings.items() if key not in fixed}
    if (features is not None) + ladder + bool(free or trials) > 1:
        raise UsageError("--features, --ladder and several values in --set exclude each other; keep one")
    if given["runs"] is None:
        raise UsageError("number of runs missing; pass --runs N; noise needs at least two runs")
    kind: Kind = "ladder" if ladder else "features"
    variants: list[dict[str, str]] = []
    if features is None and not ladder:
        if not free:
            raise UsageError("nothing to sweep; pass --features, --ladder or --set optimizer.muon_lr=0.1,0.2")
        kind = "sweep"
        variants = (
            search_space.grid(free) if trials is None else search_space.draw(free, trials, given["seed"])
        )
    return Request(
        config=request_of(given, fixed, given["out"] or new_folder(f"{given['track']}-sweep")),
        kind=kind,
        num_runs=given["runs"],
        num_confirming=given["runs"] if given["confirm"] is None else given["confirm"],
        features=tuple(name for name in (features or "").split(",") if name not in ("", "all")),
        variants=tuple(variants),
    )
