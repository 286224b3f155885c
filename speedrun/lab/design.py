"""Designs an experiment: checks every arm, draws the seeds, and writes `experiment.json`. Nothing is run.

python -m speedrun.lab.design REQUEST.json      called by `speedrun sweep`, which holds no device
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from speedrun import recipes
from speedrun.base import signals
from speedrun.base import track as tracks
from speedrun.base.clock import now
from speedrun.base.errors import UsageError, unknown
from speedrun.base.output import reported
from speedrun.base.wholefile import lock_record, make_folder
from speedrun.lab import features, trials
from speedrun.lab.features import FEATURES
from speedrun.lab.trials import BASELINE, Arm, Experiment, Request
from speedrun.record import layout
from speedrun.train.preflight import prepare
from speedrun.train.request import decoded


def design(request: Request) -> Experiment:
    """Write `experiment.json` into a new folder; raise SpeedrunError if there are no two arms that `prepare` takes."""
    config = request.config
    name = config.recipe or tracks.load(config.track).recipe
    drafts, left_out = _DRAFTS[request.kind](request, name)
    first, arms = None, []
    for draft in drafts:
        overrides = config.overrides | draft.overrides
        ready = prepare(msgspec.structs.replace(config, recipe=draft.recipe, overrides=overrides))
        first = first or ready
        arm = msgspec.structs.replace(
            draft,
            overrides=overrides,
            config_sha256=layout.config_sha256(ready.described),
            source_sha256=ready.source_sha256,
        )
        if same := next((one for one in arms if one.config_sha256 == arm.config_sha256), None):
            left_out.append(f"{arm.name}: the same as {same.name!r}")
        else:
            arms.append(arm)
    if first is None or len(arms) < 2:
        raise UsageError(f"nothing to compare {name} with: {'; '.join(left_out)}; choose other variants")
    seeds, confirming = trials.seeds_for(arms, request.num_runs, request.num_confirming)
    found = Experiment(
        standing="research, not ranked",
        kind=request.kind,
        track=layout.TrackRef(first.track.id, tracks.sha256(first.track.name)),
        num_devices=first.program.num_devices,
        microbatches=first.program.microbatches,
        attention=first.program.attention,
        arms=tuple(arms),
        left_out=tuple(left_out),
        seeds=seeds,
        confirming=confirming,
        created_utc=now().utc,
    )
    with lock_record(config.out):
        make_folder(config.out, {trials.EXPERIMENT: layout.encode(found)})
    return found


#: Makes an arm that is not checked yet, without digests.
_draft = partial(Arm, config_sha256="", source_sha256="")


def _features(request: Request, name: str) -> tuple[list[Arm], list[str]]:
    """Return the recipe, and the recipe without each feature."""
    for chosen in request.features:
        if chosen not in FEATURES:
            raise unknown("feature", chosen, FEATURES)
    recipe = recipes.load(name).override(request.config.overrides)
    drafts, left_out = [_draft(BASELINE, name, {}, None)], []
    for feature in request.features or FEATURES:
        if off := features.without(recipe, FEATURES[feature]):
            drafts.append(_draft(f"no {feature}", name, off, BASELINE))
        else:
            left_out.append(f"{feature}: {name} does not have it")
    return drafts, left_out


def _ladder(_request: Request, name: str) -> tuple[list[Arm], list[str]]:
    """Return the recipe and its ancestors, oldest first, each compared with its parent."""
    drafts: list[Arm] = []
    rung: str | None = name
    while rung is not None:
        parent = recipes.load(rung).parent
        drafts.insert(0, _draft(rung, rung, {}, parent))
        rung = parent
    return drafts, [] if len(drafts) > 1 else [f"{name} has no parent"]


def _sweep(request: Request, name: str) -> tuple[list[Arm], list[str]]:
    """Return the recipe, and the recipe with each combination of settings."""
    keys = {key for variant in request.variants for key in variant}
    drafts = [_draft(_name(variant, keys), name, variant, BASELINE) for variant in request.variants]
    return [_draft(BASELINE, name, {}, None), *drafts], []


def _name(variant: Mapping[str, str], keys: set[str]) -> str:
    """Return the settings as text, by the last part of each key where that is unique."""
    last = [key.rpartition(".")[2] for key in keys]
    shown = {key: short if last.count(short := key.rpartition(".")[2]) == 1 else key for key in variant}
    return " ".join(f"{shown[key]}={value}" for key, value in variant.items())


_DRAFTS = {"features": _features, "ladder": _ladder, "sweep": _sweep}


if __name__ == "__main__":
    with reported(), signals.handled_by(signals.stop):
        raw = Path(sys.argv[1]).read_bytes()
        design(decoded(raw, Request))
