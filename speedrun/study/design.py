"""Designs an experiment: arms, seeds, everything that can be refused is refused; then `experiment.json` is written.

python -m speedrun.study.design REQUEST.json      what `speedrun ablate` and `sweep` call, so that they hold no device
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from speedrun.ground import lock, signals
from speedrun.ground import track as tracks
from speedrun.ground.clock import now
from speedrun.ground.errors import UsageError, unknown
from speedrun.ground.output import told
from speedrun.ground.wholefile import make_folder
from speedrun.ledger import format, runfile
from speedrun.science import recipes
from speedrun.science.recipe import Recipe
from speedrun.study import features
from speedrun.study import trials as experiments
from speedrun.study.features import FEATURES
from speedrun.study.trials import BASELINE, Arm, Experiment, Kind
from speedrun.training.prepare import Ready, RunConfig, decoded, prepare


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An experiment that was asked for."""

    config: RunConfig  #: of every run; its overrides hold for every arm, its seed does not count
    kind: Kind
    num_runs: int  #: of each arm
    num_confirming: int  #: of the best arm and the one it is compared with
    features: tuple[str, ...] = ()  #: to switch off; empty: all that the recipe has
    variants: tuple[dict[str, str], ...] = ()  #: of a sweep: the settings of each


@dataclass(frozen=True)
class _Draft:
    """An arm before it was checked."""

    name: str
    what: str
    recipe: str
    overrides: dict[str, str]
    against: str | None


def design(request: Request) -> Experiment:
    """Writes `experiment.json` into a new folder.

    Raises:
        SpeedrunError: what `prepare` refuses of any arm; features or parents that the recipe does not have.
    """
    config = request.config
    name = config.recipe or tracks.load(config.track).recipe
    drafts, left_out = _DRAWN[request.kind](request, name)
    first, arms = None, []
    for draft in drafts:
        ready = prepare(
            msgspec.structs.replace(config, recipe=draft.recipe, overrides=config.overrides | draft.overrides)
        )
        first, arm = first or ready, _arm(draft, ready)
        if twin := next((one for one in arms if one.config_sha256 == arm.config_sha256), None):
            left_out.append(f"{arm.name}: the same as {twin.name!r}")
        else:
            arms.append(arm)
    if first is None or len(arms) < 2:
        raise UsageError(f"nothing to compare {name} with: {'; '.join(left_out)}; ask for something else")
    seeds, confirming = experiments.seeds_for(arms, request.num_runs, request.num_confirming)
    found = Experiment(
        standing="research, not ranked",
        kind=request.kind,
        track=format.TrackRef(first.track.id, tracks.sha256(first.track.name)),
        num_devices=first.program.num_devices,
        microbatches=first.program.microbatches,
        attention=first.program.attention,
        arms=tuple(arms),
        left_out=tuple(left_out),
        seeds=seeds,
        confirming=confirming,
        created_utc=now().utc,
    )
    with lock.alone_with(config.out):
        make_folder(config.out, {experiments.EXPERIMENT: experiments.encode(found)})
    return found


def _arm(draft: _Draft, ready: Ready) -> Arm:
    return Arm(
        name=draft.name,
        what=draft.what,
        recipe=draft.recipe,
        overrides=ready.config.overrides,
        against=draft.against,
        config_sha256=runfile.config_sha256(ready.described),
        source_sha256=ready.source_sha256,
    )


def _baseline(recipe: Recipe) -> _Draft:
    return _Draft(BASELINE, recipe.summary, recipe.name, {}, None)


def _features(request: Request, name: str) -> tuple[list[_Draft], list[str]]:
    """The recipe, and the recipe without each feature."""
    known = {feature.name: feature for feature in FEATURES}
    for asked in request.features:
        if asked not in known:
            raise unknown("feature", asked, known)
    recipe = recipes.load(name).override(request.config.overrides)
    drafts, left_out = [_baseline(recipe)], []
    for feature in (known[asked] for asked in request.features or known):
        if off := features.without(recipe, feature):
            drafts.append(_Draft(f"no {feature.name}", feature.what, name, off, BASELINE))
        else:
            left_out.append(f"{feature.name}: {name} does not have it")
    return drafts, left_out


def _ladder(request: Request, name: str) -> tuple[list[_Draft], list[str]]:
    """The recipe and its ancestors, oldest first, each against its parent."""
    drafts: list[_Draft] = []
    rung: str | None = name
    while rung is not None:
        recipe = recipes.load(rung)
        drafts.insert(0, _Draft(rung, recipe.summary, rung, {}, recipe.parent))
        rung = recipe.parent
    return drafts, [] if len(drafts) > 1 else [f"{name} has no parent"]


def _sweep(request: Request, name: str) -> tuple[list[_Draft], list[str]]:
    """The recipe, and the recipe with each choice of settings."""
    recipe = recipes.load(name).override(request.config.overrides)
    keys = {key for variant in request.variants for key in variant}
    drafts = [
        _Draft(_named(variant, keys), "the recipe with these settings", name, variant, BASELINE)
        for variant in request.variants
    ]
    return [_baseline(recipe), *drafts], []


def _named(variant: Mapping[str, str], keys: set[str]) -> str:
    """Settings by the last part of their names, where that is enough to tell them apart."""
    last = [key.rpartition(".")[2] for key in keys]
    shown = {key: short if last.count(short := key.rpartition(".")[2]) == 1 else key for key in variant}
    return " ".join(f"{shown[key]}={value}" for key, value in variant.items())


_DRAWN = {"features": _features, "ladder": _ladder, "sweep": _sweep}


if __name__ == "__main__":
    with told(), signals.handled_by(signals.stop):
        raw = Path(sys.argv[1]).read_bytes()
        design(decoded(raw, Request))
