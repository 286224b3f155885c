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

#: Settings of a recipe by dotted name that differ from its own; empty if there is nothing to change.
Change = Callable[[Recipe], dict[str, Any]]


class Feature(NamedTuple):
    """A feature of a recipe."""

    name: str
    what: str
    off: Change  #: switches it off
    also: Change = lambda _: {}  #: compensates


def without(recipe: Recipe, feature: Feature) -> dict[str, str]:
    """Return the settings that switch a feature off; empty if the recipe does not have it."""
    off = feature.off(recipe)
    return {key: str(value) for key, value in (off | feature.also(recipe)).items()} if off else {}


def _each(pattern: str, value: Callable[[Any, Recipe], Any]) -> Change:
    """Change all settings of these names; `value` makes the new one of the old one and the recipe."""

    def change(recipe: Recipe) -> dict[str, Any]:
        own = {key: old for key, old in settings(recipe).items() if fnmatch(key, pattern)}
        return {key: new for key, old in own.items() if (new := value(old, recipe)) != old}

    return change


def _frozen(*groups: str) -> Change:
    """Give these groups of Adam a learning rate of zero."""

    def change(recipe: Recipe) -> dict[str, Any]:
        known = settings(recipe)
        own = (
            key for key, value in known.items() if fnmatch(key, "optimizer.adam.*.name") and value in groups
        )
        rates = [key.removesuffix("name") + "lr" for key in own]
        return {key: 0.0 for key in rates if known[key]}

    return change


def _extra(name: str, but: str = "") -> Change:
    """Take an extra from all layers but one."""
    others = _each("config.layers.*.extras", lambda old, _: tuple(extra for extra in old if extra != name))
    return lambda recipe: {key: new for key, new in others(recipe).items() if key != but}


def _exchanged(old: str, new: str) -> Callable[[Sequence[str], Recipe], tuple[str, ...]]:
    return lambda mixing, _: tuple(new if kind == old else kind for kind in mixing)


def _unshared(tables: Sequence[int], _: Recipe) -> tuple[int, ...]:
    numbers = iter(range(len(tables)))
    return tuple(NO_TABLE if table == NO_TABLE else next(numbers) for table in tables)


def _attending(mixing: Sequence[str], recipe: Recipe) -> tuple[str, ...]:
    kinds = {*mixing} - {"none"}
    return _exchanged("none", "short" if "short" in kinds else min(kinds, default="none"))(mixing, recipe)


def _whole_window(_: float, recipe: Recipe) -> float:
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
        _each("config.value_tables", lambda old, _: (NO_TABLE,) * len(old)),
    ),
    Feature(
        "shared-values", "one table for several layers, not for each", _each("config.value_tables", _unshared)
    ),
    Feature(
        "short-windows",
        "layers that see half of the window",
        _each("config.mixing", _exchanged("short", "long")),
    ),
    Feature(
        "skipped-attention",
        "layers without attention; else: the shortest window",
        _each("config.mixing", _attending),
    ),
    Feature(
        "windows",
        "a window that grows; without: the whole document from the second step on",
        _each("schedule.final_window", _whole_window),
    ),
    Feature(
        "attention-gain",
        "attention that is sharper than 1 / sqrt(head_dim)",
        _each("config.attention_scale", lambda _, recipe: _short(recipe.config.head_dim**-0.5)),
    ),
    Feature(
        # An orthogonal matrix of rank r has the norm sqrt(r), a matrix that is only scaled has 1.
        "orthogonalisation",
        "Muon's; without: momentum scaled to the same norm",
        _each("optimizer.muon_steps", lambda *_: 0),
        also=_each("optimizer.muon_lr", lambda old, recipe: _short(old * math.sqrt(recipe.config.model_dim))),
    ),
    Feature(
        "momentum-warm-up",
        "a momentum that rises at first",
        _each("schedule.momentum_start", lambda _, recipe: recipe.schedule.momentum_end),
    ),
    Feature(
        "cooldown", "a learning rate that falls at the end", _each("schedule.final_lr_scale", lambda *_: 1.0)
    ),
    Feature(
        "bfloat16-tables",
        "tables and their moments in 16 bits",
        _each("config.table_dtype", lambda *_: "float32"),
    ),
    Feature(
        "bfloat16-muon", "Muon's iteration in bfloat16", _each("optimizer.*_dtype", lambda *_: "float32")
    ),
    Feature("weight-decay", "weights that decay", _each("optimizer.*_decay", lambda *_: 0.0)),
    # Record 89's.
    Feature(
        "other-values",
        "value embeddings but the last layer's, which is mixed in at the end, too",
        _extra("value", but="config.layers.10.extras"),
    ),
    Feature(
        "paired-heads",
        "two heads that share a softmax; without: short windows",
        _each("config.layers.*.attention", lambda old, _: "short" if old == "paired" else old),
    ),
    Feature("exclusive-heads", "outputs without a part of the own value (XSA)", _extra("exclusive")),
    Feature("key-offset", "half of a key from the token before", _extra("offset")),
    Feature("head-gates", "a factor for each head and token, at first 1/4; without: 1", _extra("gate")),
    Feature("composed-heads", "a second attention whose weights mix those of all heads", _extra("compose")),
    Feature("bigrams", "a table of pairs of tokens; without: zeros", _frozen("bigram")),
    Feature(
        "token-gates",
        "gates that each token computes; without: their starts, 0 for XSA, composed heads and x0",
        _frozen("mudd_gate", "mudd_gate_bias", "mudd_gate_scale"),
    ),
    Feature(
        "token-mixing",
        "sums of states whose weights each token computes (MUDD); without: the constants they start from",
        _frozen("mudd", "mudd_bias"),
    ),
    Feature(
        "future-tokens",
        "early prediction of later tokens",
        _each("schedule.phases.*_weights", lambda *_: (1.0,)),
    ),
    Feature(
        "growing-windows",
        "windows that grow, and wave lengths with them; without: the last validation's, half of it in paired layers",
        _each("schedule.phases.*_blocks", lambda _, recipe: recipe.schedule.final_long_blocks),
        also=_each(
            "schedule.attention_scale", lambda _, of: _short(of.schedule.rotary(len(of.schedule.phases))[1])
        ),
    ),
)
