"""Features of recipes by name, and the settings that switch each one off.

The recipe without a feature is another value of the same recipe, which `--set` could make as well. Each feature is
switched off alone. Further settings compensate where needed for a fair control.

Features that are functions or types have no such setting: U-net skips, embedding shortcut, QK-norm, rotary, squared
ReLU, zero initial projections, the document mask, Muon, the FP8 head. `speedrun sweep --ladder` compares recipes with
and without them. The soft cap of the logits stays as well: the loss uses it in place of a maximum, so it is at most 40.
"""

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

from speedrun.science.models.record21 import NO_TABLE
from speedrun.science.recipe import Recipe, settings


class Feature(NamedTuple):
    """A feature of a recipe.

    `off` has what settings are without it, by pattern of their names: a value, or a function of the old value, the
    recipe and the name. The first pattern is of the feature itself; others compensate.
    """

    name: str
    what: str
    off: dict[str, Any]


def without(recipe: Recipe, feature: Feature) -> dict[str, str]:
    """Return the settings that switch a feature off; empty if the recipe does not have it."""
    changed: dict[str, str] = {}
    for pattern, value in feature.off.items():
        for key, old in settings(recipe).items():
            if fnmatch(key, pattern):
                new = value(old, recipe, key) if callable(value) else value
                changed |= {key: str(new)} if new != old else {}
        if not changed:
            break
    return changed


def _frozen(*groups: str) -> Callable[[float, Recipe, str], float]:
    """Give these groups of Adam a learning rate of zero."""
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
    """Return the final window that covers whole documents from the second step on, at progress 1 / num_steps."""
    longest = max(recipe.eval_seq_len, *(stage.seq_len for stage in recipe.stages))
    return float(-(-longest // recipe.config.block_tokens) * recipe.num_steps)


def _short(number: float) -> float:
    """Round to six digits, for command lines."""
    return float(f"{number:.6g}")


FEATURES = (
    Feature(
        "value-embeddings",
        "embeddings of the tokens, mixed into the values of some layers",
        {"config.value_tables": lambda old, *_: (NO_TABLE,) * len(old)},
    ),
    Feature(
        "shared-values", "one table for several layers, not for each", {"config.value_tables": _unshared}
    ),
    Feature(
        "short-windows", "layers that see half of the window", {"config.mixing": _exchanged("short", "long")}
    ),
    Feature(
        "skipped-attention",
        "layers without attention; else: the shortest window",
        {"config.mixing": _attending},
    ),
    Feature(
        "windows",
        "a window that grows; without: the whole document from the second step on",
        {"schedule.final_window": _whole_window},
    ),
    Feature(
        "attention-gain",
        "attention that is sharper than 1 / sqrt(head_dim)",
        {"config.attention_scale": lambda _, recipe, __: _short(recipe.config.head_dim**-0.5)},
    ),
    Feature(
        # An orthogonal matrix of rank r has the norm sqrt(r), a matrix that is only scaled has 1.
        "orthogonalisation",
        "Muon's; without: momentum scaled to the same norm",
        {
            "optimizer.muon_steps": 0,
            "optimizer.muon_lr": lambda old, recipe, _: _short(old * math.sqrt(recipe.config.model_dim)),
        },
    ),
    Feature(
        "momentum-warm-up",
        "a momentum that rises at first",
        {
            "schedule.momentum_start": lambda old, recipe, _: settings(recipe).get(
                "schedule.momentum_end", old
            )
        },
    ),
    Feature("cooldown", "a learning rate that falls at the end", {"schedule.final_lr_scale": 1.0}),
    Feature("bfloat16-tables", "tables and their moments in 16 bits", {"config.table_dtype": "float32"}),
    Feature("bfloat16-muon", "Muon's iteration in bfloat16", {"optimizer.*_dtype": "float32"}),
    Feature("weight-decay", "weights that decay", {"optimizer.*_decay": 0.0}),
    # Record 89's.
    Feature(
        "other-values",
        "value embeddings but the last layer's, which is mixed in at the end, too",
        {"config.layers.[0-9].extras": _less("value")},
    ),
    Feature(
        "paired-heads",
        "two heads that share a softmax; without: short windows",
        {"config.layers.*.attention": lambda old, *_: "short" if old == "paired" else old},
    ),
    Feature(
        "exclusive-heads",
        "outputs without a part of the own value (XSA)",
        {"config.layers.*.extras": _less("exclusive")},
    ),
    Feature("key-offset", "half of a key from the token before", {"config.layers.*.extras": _less("offset")}),
    Feature(
        "head-gates",
        "a factor for each head and token, at first 1/4; without: 1",
        {"config.layers.*.extras": _less("gate")},
    ),
    Feature(
        "composed-heads",
        "a second attention whose weights mix those of all heads",
        {"config.layers.*.extras": _less("compose")},
    ),
    Feature(
        "bigrams", "a table of pairs of tokens; without: zeros", {"optimizer.adam.*.lr": _frozen("bigram")}
    ),
    Feature(
        "token-gates",
        "gates that each token computes; without: their starts, 0 for XSA, composed heads and x0",
        {"optimizer.adam.*.lr": _frozen("mudd_gate", "mudd_gate_bias", "mudd_gate_scale")},
    ),
    Feature(
        "token-mixing",
        "sums of states whose weights each token computes (MUDD); without: the constants they start from",
        {"optimizer.adam.*.lr": _frozen("mudd", "mudd_bias")},
    ),
    Feature("future-tokens", "early prediction of later tokens", {"schedule.phases.*_weights": (1.0,)}),
    Feature(
        "growing-windows",
        "windows that grow, and wave lengths with them; without: the last validation's, half of it in paired layers",
        {
            "schedule.phases.*_blocks": lambda _, recipe, __: recipe.schedule.final_long_blocks,
            "schedule.attention_scale": lambda _, recipe, __: _short(
                recipe.schedule.rotary(len(recipe.schedule.phases))[1]
            ),
        },
    ),
)
