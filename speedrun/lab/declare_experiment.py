"""Declares an experiment: checks every arm, draws the seeds, and writes `experiment.json`.

python -m speedrun.lab.declare_experiment REQUEST.json      started by `speedrun sweep`, which holds no device
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from speedrun import recipes
from speedrun.base import signals
from speedrun.base import track as tracks
from speedrun.base.atomic_files import make_record
from speedrun.base.clock import now
from speedrun.base.errors import UsageError, unknown
from speedrun.base.output import reported
from speedrun.lab import experiments
from speedrun.lab.experiments import BASELINE, Arm, Experiment, Request
from speedrun.lab.sequential import levels
from speedrun.record import layout
from speedrun.record.batch import TrackRef
from speedrun.record.reader import encode
from speedrun.science.recipe import Recipe, describe
from speedrun.train.preflight import prepare
from speedrun.train.run_config import decoded

#: An arm before its source is known: its name, its recipe, and the name of its reference arm.
Draft = tuple[str, Recipe, str | None]


def arms(request: Request) -> tuple[list[Draft], list[str]]:
    """Return the distinct arms of an experiment, and what was left out."""
    name = request.config.recipe or tracks.load(request.config.track).recipe
    left_out: list[str] = []
    found: dict[str, Draft] = {}
    for draft in _DRAFTS[request.kind](request, name, left_out):
        same = found.setdefault(layout.config_sha256(describe(draft[1])), draft)
        if same is not draft:
            left_out.append(f"{draft[0]}: the same as {same[0]!r}")
    if len(found) < 2:
        raise UsageError(f"nothing to compare {name} with: {'; '.join(left_out)}; choose other variants")
    return [*found.values()], left_out


def design(request: Request) -> Experiment:
    """Write `experiment.json` into a new folder."""
    drafts, left_out = arms(request)
    ready, checked = [], []
    for name, recipe, against in drafts:
        config = msgspec.structs.replace(request.config, recipe=recipe.name, overrides=dict(recipe.overrides))
        ready.append(one := prepare(config))
        digests = layout.config_sha256(one.described), one.source_sha256
        checked.append(Arm(name, recipe.name, config.overrides, against, *digests))
    seeds, confirming = experiments.seeds_for(checked, request.num_runs, request.num_confirming)
    first = ready[0]
    found = Experiment(
        status="research, not ranked",
        kind=request.kind,
        track=TrackRef(first.track.id, tracks.sha256(first.track.name)),
        num_devices=first.program.num_devices,
        microbatches=first.program.microbatches,
        attention=first.program.attention,
        arms=tuple(checked),
        left_out=tuple(left_out),
        seeds=seeds,
        confirming=confirming,
        created_utc=now().utc,
        budget=request.budget,
        levels=levels(len(seeds)) if request.kind == "try" else (),
    )
    make_record(request.config.out, {experiments.EXPERIMENT: encode(found)})
    return found


def _changed(request: Request, name: str, changes: Mapping[str, Any]) -> Recipe:
    return recipes.load(name).override({**request.config.overrides, **changes})


def _features(request: Request, name: str, left_out: list[str]) -> Iterator[Draft]:
    """Yield the recipe, and the recipe less one feature each."""
    recipe = _changed(request, name, {})
    yield BASELINE, recipe, None
    for feature in request.features or recipe.features:
        if feature not in recipe.features:
            raise unknown("feature", feature, recipe.features)
        try:
            less = _changed(request, name, recipe.without(feature))
        except UsageError as error:
            if request.features:
                raise
            left_out.append(f"{feature}: {error}")
            continue
        if less != recipe:
            yield f"no {feature}", less, BASELINE
        else:
            left_out.append(f"{feature}: {name} does not have it")


def _ladder(request: Request, name: str, left_out: list[str]) -> Iterator[Draft]:
    """Yield the recipe and its ancestors, oldest first, each compared with its parent."""
    recipe = _changed(request, name, {})
    if recipe.parent is not None:
        yield from _ladder(request, recipe.parent, [])
    else:
        left_out.append(f"{name} has no parent")
    yield name, recipe, recipe.parent


def _sweep(request: Request, name: str, _: list[str]) -> Iterator[Draft]:
    """Yield the recipe and its variants, named by the last part of each key where that is unique."""
    yield BASELINE, _changed(request, name, {}), None
    for variant in request.variants:
        last = [key.rpartition(".")[2] for key in variant]
        shown = (part if last.count(part) == 1 else key for key, part in zip(variant, last, strict=True))
        title = " ".join(map("=".join, zip(shown, variant.values(), strict=True)))
        yield title, _changed(request, name, variant), BASELINE


def _try(request: Request, name: str, _: list[str]) -> Iterator[Draft]:
    """Yield the parent and the recipe, with the same settings."""
    yield request.against, _changed(request, request.against, {}), None
    yield name, _changed(request, name, {}), request.against


_DRAFTS = {"features": _features, "ladder": _ladder, "sweep": _sweep, "try": _try}


if __name__ == "__main__":
    with reported(), signals.handled_by(signals.stop):
        design(decoded(Path(sys.argv[1]).read_bytes(), Request))
