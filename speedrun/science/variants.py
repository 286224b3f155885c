"""Rules for variants of recipes that several share: siblings at another size, and ablations without a feature.

Rules give new values by pattern of the names of settings, or functions that return them: of the old value, the recipe
and the size or the name. docs/recipes.md has the reasons.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

Rules = Mapping[str, Any]

LAYERS, WIDTH = 12, 768  #: of a full-size recipe


class Size(NamedTuple):
    """A size of siblings."""

    num_layers: int  #: for `LAYERS`
    model_dim: int  #: for `WIDTH`
    batch: float  #: factor of the tokens per step; 0: ids, batches and number of steps of the recipe `smoke`


SIZES = {
    "smoke": Size(4, 128, 0.0),
    "nano": Size(4, 256, 0.25),
    "micro": Size(8, 512, 0.5),
    "small": Size(LAYERS, WIDTH, 1.0),
    "medium": Size(16, 1024, 2.0),
}


def scaled(*, width: int = 0, head: float = 0, window: int = 0) -> Callable[..., float]:
    """Return a rule that multiplies by powers of the factors of the width of the model, of a head, and of windows."""

    def rule(old: float, recipe: Any, size: Size) -> float:
        narrower = min(1.0, size.model_dim / 4 / recipe.config.head_dim)  # only to keep four heads
        shorter = 1 if size.batch else 1 / 8
        new = old * (size.model_dim / WIDTH) ** width * narrower**head * shorter**window
        return round(new) if isinstance(old, int) else new

    return rule


def at_smoke(value: Any) -> Callable[..., Any]:
    """Return a rule for the smallest size alone; what is none stays none."""
    return lambda old, _, size: old if size.batch or old == () else value


def deeper(old: Any, _: Any, size: Size) -> Any:
    """Scale a number of layers, or resample a tuple with an entry for each: both ends and mirror layers stay."""
    layers = old if isinstance(old, int) else len(old)
    depth = max(2, round(layers * size.num_layers / LAYERS))
    places = [round(i * (layers - 1) / (depth - 1)) for i in range(depth)]
    return depth if isinstance(old, int) else tuple(old[i] for i in places)


def fewer(old: int, recipe: Any, size: Size) -> int:
    """Shrink a number of steps with the run, which has fewer if it packs documents; none stay none."""
    packs = any(stage.document_tokens for stage in recipe.stages)
    shrink = 1 if size.batch else (120 if packs else 280) / recipe.num_steps
    return max(min(old, 1), round(old * shrink))


def _stage(old: Any, recipe: Any, size: Size) -> Any:
    """Scale the tokens of each step: fewer sequences, but one for each of eight devices; then shorter ones."""
    number = max(min(old.num_sequences, 8), round(old.num_sequences * size.batch))
    shape = (number, round(old.batch_tokens * size.batch) // number) if size.batch else (8, 256)
    steps, cut = fewer(old.num_steps, recipe, size), scaled(window=1)(old.document_tokens, recipe, size)
    return replace(old, num_steps=steps, num_sequences=shape[0], seq_len=shape[1], document_tokens=cut)


#: From GPT-2 to record 21.
SIZED: Rules = {
    **dict.fromkeys(("config.model_dim", "config.mlp_dim"), scaled(width=1)),
    "config.num_heads": scaled(width=1, head=-1),
    "config.head_dim": scaled(head=1),
    "config.attention_scale": scaled(head=-0.5),
    "config.block_tokens": scaled(window=1),
    **dict.fromkeys(("config.num_layers", "config.attention_kinds", "config.value_tables"), deeper),
    "config.head_fp8": at_smoke(None),
    "config.document_token": at_smoke(0),
    **dict.fromkeys(("config.vocab_size", "config.padded_vocab_size", "config.max_positions"), at_smoke(256)),
    "*dtype": at_smoke("float32"),
    "optimizer.matrix_lr": scaled(width=-1),
    "schedule.*_steps": fewer,
    "stages": lambda stages, *given: tuple(_stage(stage, *given) for stage in stages),
    "eval_sequences": at_smoke(64),
    "eval_seq_len": at_smoke(256),
}


def _unshared(tables: tuple[int, ...], *_: Any) -> tuple[int, ...]:
    numbers = count()
    return tuple(table if table < 0 else next(numbers) for table in tables)


def _exchanged(kinds: tuple[str, ...], old: str, new: str) -> tuple[str, ...]:
    return tuple(new if kind == old else kind for kind in kinds)


def _whole_window(_: float, recipe: Any, __: str) -> float:
    """Return a final window that covers whole documents from the second step on, at progress 1 / num_steps."""
    longest = max(recipe.eval_seq_len, *(stage.seq_len for stage in recipe.stages))
    return float(-(-longest // recipe.config.block_tokens) * recipe.num_steps)


#: From GPT-2 to record 21, what switches each feature off: its own setting, then those that keep the comparison fair.
#: Functions and types have no such setting; `speedrun sweep --ladder` compares recipes with and without them. The soft
#: cap of the logits stays, too: the loss uses it in place of a maximum.
FEATURES: Mapping[str, Rules] = {
    # Token embeddings, mixed into the values of some layers; layers may share a table.
    "value-embeddings": {"config.value_tables": lambda old, *_: (-1,) * len(old)},
    "shared-values": {"config.value_tables": _unshared},
    "short-windows": {"config.attention_kinds": lambda old, *_: _exchanged(old, "short", "long")},
    # Layers without attention get the shortest window.
    "skipped-attention": {
        "config.attention_kinds": lambda old, *_: _exchanged(
            old, "none", max({*old} - {"none"}, default="none")
        )
    },
    "windows": {"schedule.final_window": _whole_window},
    # Attention is sharper than 1 / sqrt(head_dim).
    "attention-gain": {"config.attention_scale": lambda _, recipe, __: recipe.config.head_dim**-0.5},
    # The rate is scaled, too: an orthogonal matrix of rank r has the norm sqrt(r), a normalised one has 1.
    "orthogonalisation": {
        "optimizer.muon_steps": 0,
        "optimizer.muon_lr": lambda old, recipe, _: old * math.sqrt(recipe.config.model_dim),
    },
    "momentum-warm-up": {
        "schedule.momentum_start": lambda old, recipe, _: recipe.schedule.momentum_end or old
    },
    "cooldown": {"schedule.final_lr_scale": 1.0},
    "bfloat16-tables": {"config.table_dtype": "float32"},
    "bfloat16-muon": {"optimizer.*_dtype": "float32"},
    "weight-decay": {"optimizer.*_decay": 0.0},
}
