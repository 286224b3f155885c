"""Declares an experiment: checks every arm, draws the seeds, and writes `experiment.json`.

python -m speedrun.lab.design REQUEST.json      started by `speedrun sweep`, which holds no device
"""

import math
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from speedrun import recipes
from speedrun.base import signals
from speedrun.base import track as tracks
from speedrun.base.clock import now
from speedrun.base.errors import UsageError, unknown
from speedrun.base.output import reported
from speedrun.base.wholefile import lock_record, make_folder
from speedrun.lab import trials
from speedrun.lab.trials import BASELINE, Arm, Experiment, Request
from speedrun.record import layout
from speedrun.record.batch import TrackRef
from speedrun.record.reader import encode
from speedrun.science.models.record21_model import NO_TABLE
from speedrun.science.recipe import Recipe, describe, settings
from speedrun.train.preflight import prepare
from speedrun.train.request import decoded


def arms(request: Request) -> tuple[list[tuple[Arm, Recipe]], list[str]]:
    """Return the distinct arms of an experiment, without digests, with their recipes; and what was left out."""
    name = request.config.recipe or tracks.load(request.config.track).recipe
    drafts, left_out = _DRAFTS[request.kind](request, name)
    found: dict[str, tuple[Arm, Recipe]] = {}
    for draft in drafts:
        arm = msgspec.structs.replace(draft, overrides=request.config.overrides | draft.overrides)
        recipe = recipes.load(arm.recipe).override(arm.overrides)
        same = found.setdefault(layout.config_sha256(describe(recipe)), (arm, recipe))[0]
        if same is not arm:
            left_out.append(f"{arm.name}: the same as {same.name!r}")
    if len(found) < 2:
        raise UsageError(f"nothing to compare {name} with: {'; '.join(left_out)}; choose other variants")
    return [*found.values()], left_out


def design(request: Request) -> Experiment:
    """Write `experiment.json` into a new folder."""
    config = request.config
    drafts, left_out = arms(request)
    ready = [
        prepare(msgspec.structs.replace(config, recipe=draft.recipe, overrides=draft.overrides))
        for draft, _ in drafts
    ]
    checked = [
        msgspec.structs.replace(
            draft, config_sha256=layout.config_sha256(one.described), source_sha256=one.source_sha256
        )
        for (draft, _), one in zip(drafts, ready, strict=True)
    ]
    seeds, confirming = trials.seeds_for(checked, request.num_runs, request.num_confirming)
    first = ready[0]
    found = Experiment(
        standing="research, not ranked",
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
    )
    with lock_record(config.out):
        make_folder(config.out, {trials.EXPERIMENT: encode(found)})
    return found


#: Makes an unchecked arm, without digests.
_draft = partial(Arm, config_sha256="", source_sha256="")


def _features(request: Request, name: str) -> tuple[list[Arm], list[str]]:
    """Return the arms of `--features`, and the features that the recipe does not have."""
    for chosen in request.features:
        if chosen not in FEATURES:
            raise unknown("feature", chosen, FEATURES)
    recipe = recipes.load(name).override(request.config.overrides)
    drafts, left_out = [_draft(BASELINE, name, {}, None)], []
    for feature in request.features or FEATURES:
        off = without(recipe, FEATURES[feature])
        try:
            recipe.override(off)
        except UsageError as error:
            if request.features:
                raise
            left_out.append(f"{feature}: {error}")
            continue
        if off:
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
    """Return the recipe and its variants, named by the last part of each key where that is unique."""
    drafts = [_draft(BASELINE, name, {}, None)]
    for variant in request.variants:
        last = [key.rpartition(".")[2] for key in variant]
        shown = (part if last.count(part) == 1 else key for key, part in zip(variant, last, strict=True))
        title = " ".join(map("=".join, zip(shown, variant.values(), strict=True)))
        drafts.append(_draft(title, name, variant, BASELINE))
    return drafts, []


_DRAFTS = {"features": _features, "ladder": _ladder, "sweep": _sweep}


#: Settings without a feature, by pattern of their names: a value, or a function of the old value, the recipe and the
#: name. The first pattern is that of the feature; others compensate, so that the comparison is fair.
Off = dict[str, Any]


def without(recipe: Recipe, off: Off) -> dict[str, str]:
    """Return the settings that switch a feature off, or none if the recipe does not have it."""
    changed: dict[str, str] = {}
    for pattern, value in off.items():
        for key, old in settings(recipe).items():
            if fnmatch(key, pattern):
                new = value(old, recipe, key) if callable(value) else value
                changed |= {key: str(new)} if new != old else {}
        if not changed:
            break
    return changed


def _frozen(*groups: str) -> Callable[[float, Recipe, str], float]:
    return lambda lr, recipe, key: 0.0 if settings(recipe)[key.removesuffix("lr") + "name"] in groups else lr


def _less(extra: str) -> Callable[..., tuple[str, ...]]:
    return lambda extras, *_: tuple(one for one in extras if one != extra)


def _exchanged(old: str, new: str) -> Callable[..., tuple[str, ...]]:
    return lambda mixing, *_: tuple(new if kind == old else kind for kind in mixing)


def _unshared(tables: Sequence[int], *_: Any) -> tuple[int, ...]:
    numbers = iter(range(len(tables)))
    return tuple(NO_TABLE if table == NO_TABLE else next(numbers) for table in tables)


def _attending(mixing: Sequence[str], *_: Any) -> tuple[str, ...]:
    kinds = {*mixing} - {"none"}
    return _exchanged("none", "short" if "short" in kinds else min(kinds, default="none"))(mixing)


def _whole_window(_: float, recipe: Recipe, __: str) -> float:
    """Return a final window that covers whole documents from the second step on, at progress 1 / num_steps."""
    longest = max(recipe.eval_seq_len, *(stage.seq_len for stage in recipe.stages))
    return float(-(-longest // recipe.config.block_tokens) * recipe.num_steps)


def _last(_: float, recipe: Recipe, key: str) -> float:
    """Return an input of the last validation, where windows have grown."""
    return _short(float(recipe.inputs_at(recipe.num_steps)[key.removeprefix("schedule.")]))


def _short(number: float) -> float:
    """Round to six digits, to fit on a command line."""
    return float(f"{number:.6g}")


#: Functions and types have no setting that switches them off; `speedrun sweep --ladder` compares recipes with and
#: without them. The soft cap of the logits stays, too: the loss uses it in place of a maximum.
FEATURES: dict[str, Off] = {
    # Token embeddings, mixed into the values of some layers; layers may share a table.
    "value-embeddings": {"config.value_tables": lambda old, *_: (NO_TABLE,) * len(old)},
    "shared-values": {"config.value_tables": _unshared},
    "short-windows": {"config.mixing": _exchanged("short", "long")},
    # Layers without attention get the shortest window.
    "skipped-attention": {"config.mixing": _attending},
    "windows": {"schedule.final_window": _whole_window},
    # Attention is sharper than 1 / sqrt(head_dim).
    "attention-gain": {"config.attention_scale": lambda _, recipe, __: _short(recipe.config.head_dim**-0.5)},
    # The rate is scaled, too: an orthogonal matrix of rank r has the norm sqrt(r), a normalised one has 1.
    "orthogonalisation": {
        "optimizer.muon_steps": 0,
        "optimizer.muon_lr": lambda old, recipe, _: _short(old * math.sqrt(recipe.config.model_dim)),
    },
    "momentum-warm-up": {
        "schedule.momentum_start": lambda old, recipe, _: settings(recipe).get("schedule.momentum_end", old)
    },
    "cooldown": {"schedule.final_lr_scale": 1.0},
    "bfloat16-tables": {"config.table_dtype": "float32"},
    "bfloat16-muon": {"optimizer.*_dtype": "float32"},
    "weight-decay": {"optimizer.*_decay": 0.0},
    # From here on, record 89's. The last layer's value embedding is also mixed in at the end, so it stays.
    "other-values": {"config.layers.[0-9].extras": _less("value")},
    # Two heads share a softmax. Without it, their windows are the short ones, and so is record 92's width of values.
    "paired-heads": {"config.layers.*.attention": lambda old, *_: "short" if old == "paired" else old},
    "exclusive-heads": {"config.layers.*.extras": _less("exclusive")},
    "key-offset": {"config.layers.*.extras": _less("offset")},
    # A factor for each head and token, initially 1/4. Without it, 1.
    "head-gates": {"config.layers.*.extras": _less("gate")},
    "composed-heads": {"config.layers.*.extras": _less("compose")},
    # With a learning rate of zero, these keep their initial values: a table of zeros, constant gates and weights.
    "bigrams": {"optimizer.adam.*.lr": _frozen("bigram")},
    "token-gates": {"optimizer.adam.*.lr": _frozen("mudd_gate", "mudd_gate_bias", "mudd_gate_scale")},
    "token-mixing": {"optimizer.adam.*.lr": _frozen("mudd", "mudd_bias")},
    "future-tokens": {"schedule.phases.*.target_weights": (1.0,), "schedule.phases.*.end_weights": (1.0,)},
    # Wavelengths and scale grow with windows. Without this, windows and scale are the last, wavelengths the first ones.
    "growing-windows": {
        "schedule.phases.*.long_blocks": lambda _, recipe, __: recipe.schedule.final_long_blocks,
        "schedule.phases.*.short_blocks": lambda _, recipe, __: recipe.schedule.phases[-1].short_blocks,
        **dict.fromkeys(("schedule.attention_scale", "schedule.short_scale", "schedule.long_scale"), _last),
    },
    # From here on, record 92's: a table of zeros, one mean in the direction, every second step, all columns.
    "n-grams": {"optimizer.rows.*.lr": 0.0},
    "slow-mean": {"schedule.one_mean_steps": lambda _, recipe, __: recipe.num_steps},
    "rare-updates": {
        "schedule.frequent_steps": lambda _, recipe, __: recipe.num_steps,
        "optimizer.rows.0.batches": 4,  # room where batches become smaller
    },
    "sampled-softmax": {"schedule.phases.*.columns": ()},
    "averages": {"optimizer.averages.*.share": 0.0},
}


if __name__ == "__main__":
    with reported(), signals.handled_by(signals.stop):
        design(decoded(Path(sys.argv[1]).read_bytes(), Request))
