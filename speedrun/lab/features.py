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
from typing import Any

from speedrun.science.models.record21 import NO_TABLE
from speedrun.science.recipe import Recipe, settings

#: What settings are without a feature, by pattern of their names: a value, or a function of the old value, the recipe
#: and the name. The first pattern is of the feature itself; others compensate.
Off = dict[str, Any]


def without(recipe: Recipe, off: Off) -> dict[str, str]:
    """Return the settings that switch a feature off; empty if the recipe does not have it."""
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


FEATURES: dict[str, Off] = {
    # Embeddings of the tokens, mixed into the values of some layers; a table may serve several.
    "value-embeddings": {"config.value_tables": lambda old, *_: (NO_TABLE,) * len(old)},
    "shared-values": {"config.value_tables": _unshared},
    "short-windows": {"config.mixing": _exchanged("short", "long")},
    # Layers without attention get the shortest window.
    "skipped-attention": {"config.mixing": _attending},
    "windows": {"schedule.final_window": _whole_window},
    # Attention is sharper than 1 / sqrt(head_dim).
    "attention-gain": {"config.attention_scale": lambda _, recipe, __: _short(recipe.config.head_dim**-0.5)},
    # Momentum is scaled to the same norm: an orthogonal matrix of rank r has sqrt(r), one that is only scaled has 1.
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
    # Record 89's. The last layer's value embedding is mixed in at the end, too.
    "other-values": {"config.layers.[0-9].extras": _less("value")},
    # Two heads share a softmax; without, their windows are the short ones.
    "paired-heads": {"config.layers.*.attention": lambda old, *_: "short" if old == "paired" else old},
    "exclusive-heads": {"config.layers.*.extras": _less("exclusive")},
    "key-offset": {"config.layers.*.extras": _less("offset")},
    # A factor for each head and token, at first 1/4; without: 1.
    "head-gates": {"config.layers.*.extras": _less("gate")},
    "composed-heads": {"config.layers.*.extras": _less("compose")},
    # Without learning, these stay as they start: the table zero, gates and mixing weights constant.
    "bigrams": {"optimizer.adam.*.lr": _frozen("bigram")},
    "token-gates": {"optimizer.adam.*.lr": _frozen("mudd_gate", "mudd_gate_bias", "mudd_gate_scale")},
    "token-mixing": {"optimizer.adam.*.lr": _frozen("mudd", "mudd_bias")},
    "future-tokens": {"schedule.phases.*_weights": (1.0,)},
    # Wave lengths grow with windows; without, both are the last validation's, half of it in paired layers.
    "growing-windows": {
        "schedule.phases.*_blocks": lambda _, recipe, __: recipe.schedule.final_long_blocks,
        "schedule.attention_scale": lambda _, recipe, __: _short(
            recipe.schedule.rotary(len(recipe.schedule.phases))[1]
        ),
    },
}
