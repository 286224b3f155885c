"""Features of recipes by name, and the settings that switch each one off.

The recipe without a feature is another value of the same recipe, which `--set` could make as well. Each feature is
switched off alone. A second setting compensates where needed for a fair control.

Features that are functions or types have no such setting: U-net skips, embedding shortcut, QK-norm, rotary, squared
ReLU, zero initial projections, the document mask, Muon, the FP8 head. `speedrun sweep --ladder` compares recipes with
and without them. The soft cap of the logits stays as well: the loss uses it in place of a maximum, so it is at most 40.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

from speedrun.science.models.record21 import NO_TABLE
from speedrun.science.recipe import Recipe


class Feature(NamedTuple):
    """A feature of a recipe."""

    name: str
    what: str
    off: dict[str, Callable[[Recipe], Any]]  #: settings of the recipe without the feature


FEATURES = (
    Feature(
        "value-embeddings",
        "embeddings of the tokens, mixed into the values of some layers",
        {"config.value_tables": lambda recipe: (NO_TABLE,) * len(recipe.config.value_tables)},
    ),
    Feature(
        "shared-values",
        "one value embedding for several layers; without: a table for each",
        {"config.value_tables": lambda recipe: _unshared(recipe.config.value_tables)},
    ),
    Feature(
        "short-windows",
        "layers that see half of the window",
        {"config.mixing": lambda recipe: _exchanged(recipe.config.mixing, "short", "long")},
    ),
    Feature(
        "skipped-attention",
        "layers without attention; without: they see the shortest window",
        {"config.mixing": lambda recipe: _attending(recipe.config.mixing)},
    ),
    Feature(
        "windows",
        "attention that sees a window, which grows; without: the whole document from the second step on",
        {"schedule.final_window": lambda recipe: _whole_window(recipe)},
    ),
    Feature(
        "attention-gain",
        "attention that is sharper than 1 / sqrt(head_dim)",
        {"config.attention_scale": lambda recipe: _short(recipe.config.head_dim**-0.5)},
    ),
    Feature(
        # An orthogonal matrix of rank r has the norm sqrt(r), a matrix that is only scaled has 1.
        "orthogonalisation",
        "Muon's; without: momentum scaled to the same norm",
        {
            "optimizer.muon_steps": lambda _: 0,
            "optimizer.muon_lr": lambda recipe: _short(
                recipe.optimizer.muon_lr * math.sqrt(recipe.config.model_dim)
            ),
        },
    ),
    Feature(
        "momentum-warm-up",
        "a momentum that rises at first",
        {"schedule.momentum_start": lambda recipe: recipe.schedule.momentum_end},
    ),
    Feature(
        "cooldown",
        "a learning rate that falls at the end",
        {"schedule.final_lr_scale": lambda _: 1.0},
    ),
    Feature(
        "bfloat16-tables",
        "embeddings and their moments stored in two bytes a number",
        {"config.table_dtype": lambda _: "float32"},
    ),
    Feature(
        "bfloat16-muon",
        "Muon's iteration in bfloat16",
        {"optimizer.muon_dtype": lambda _: "float32"},
    ),
)


def without(recipe: Recipe, feature: Feature) -> dict[str, str]:
    """Return the settings that switch a feature off; empty if the recipe does not have it."""
    if any(_setting(recipe, key) is None for key in feature.off):
        return {}
    values = {key: value(recipe) for key, value in feature.off.items()}
    # The first setting is the feature, others compensate.
    key = next(iter(values))
    return {} if values[key] == _setting(recipe, key) else {key: str(value) for key, value in values.items()}


def _setting(recipe: Recipe, key: str) -> Any:
    """Return the value of a setting; None if this kind of recipe does not have it."""
    return reduce(lambda node, name: getattr(node, name, None), key.split("."), recipe)


def _unshared(tables: Sequence[int]) -> tuple[int, ...]:
    numbers = iter(range(len(tables)))
    return tuple(NO_TABLE if table == NO_TABLE else next(numbers) for table in tables)


def _exchanged(mixing: Sequence[str], old: str, new: str) -> tuple[str, ...]:
    return tuple(new if kind == old else kind for kind in mixing)


def _attending(mixing: Sequence[str]) -> tuple[str, ...]:
    kinds = {*mixing} - {"none"}
    return _exchanged(mixing, "none", "short" if "short" in kinds else min(kinds, default="none"))


def _whole_window(recipe: Recipe) -> float:
    """Return the final window that covers whole documents from the second step on, at progress 1 / num_steps."""
    longest = max(recipe.eval_seq_len, *(stage.seq_len for stage in recipe.stages))
    return float(-(-longest // recipe.config.block_tokens) * recipe.num_steps)


def _short(number: float) -> float:
    """Round to six digits, for command lines."""
    return float(f"{number:.6g}")
