"""The sizes and parameters of record 89. Legend: D model, H heads, V vocabulary."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from speedrun.base import field_types
from speedrun.base.field_types import Count, Natural, Rate
from speedrun.recipes.record89.tokens import bigram_rows, prefixes
from speedrun.science import params
from speedrun.science.kernels.cross_entropy_gpu import Fp8
from speedrun.science.kernels.mlp import Factors
from speedrun.science.params import Dtype, Init, Member, ParamSpec, Table, constant, gaussian, zeros
from speedrun.science.recipe import Constants, Vocabulary

Attention = Literal["short", "long", "paired", "none"]
Extra = Literal["value", "offset", "exclusive", "gate", "compose", "x0", "ngram"]

LATE = 4  #: first layer of the second half of the gates
SKIP = 6  #: adds the stream after layer 3 instead of attention (record 49)
FROZEN = 7  #: later attention reads the stream after this layer (record 77)
LAST = 10
GATE_INPUTS = 6  #: entries of a state that its gates read
MUDD_SCALE = 0.1  #: of the mixing weights; biases are stored divided by it


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer without its MLP."""

    attention: Attention  #: "paired" layers have the short window
    extras: tuple[Extra, ...] = ()


#: Widths of gates by kind and layer, in order.
Widths = dict[tuple[str, int], int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of eleven layers, also those of record 92."""

    vocab_size: Count  #: rows of all tables, and columns of the softmax
    model_dim: Count
    num_heads: Count
    mlp_dim: Count
    gate_dim: Count  #: hidden width of the networks that make gates
    sign_rows: Count
    document_token: Natural
    table_dtype: Dtype  #: of stored tables and gates
    layers: tuple[Layer, ...]
    head_fp8: Fp8 | None  #: scales of the head's products in training; None: compute dtype
    mlp_dtype: Factors  #: of the factors of the MLPs' products in training; of the forward ones alone if the next is 0
    mlp_gradient_scale: Rate  #: of gradients in 8 bits, where factors have 8; 0: gradients in 16 bits

    def __post_init__(self) -> None:
        field_types.check(self)
        if len(self.layers) != LAST + 1:
            raise ValueError(f"layers has {len(self.layers)} entries; this architecture has 11")
        if self.model_dim % self.num_heads or self.head_dim % 4 or self.num_heads % 2:
            need = "need an even number of heads, each of a multiple of 4 dimensions"
            raise ValueError(f"model_dim {self.model_dim} and num_heads {self.num_heads}: {need}")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.model_dim // self.num_heads

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def layers_with(self, extra: Extra) -> list[int]:
        """Return the layers with an extra."""
        return [i for i, layer in enumerate(self.layers) if extra in layer.extras]

    def gates(self, half: int) -> Widths:
        """Return the gates of layers 0 to 3 for the first half, or of the others."""
        raise NotImplementedError

    def widths(self, attention: Attention) -> tuple[int, int]:
        """Return the widths of a head's queries and keys, and of its values, for a kind of attention."""
        del attention
        return self.head_dim, self.head_dim

    def mlps(self, i: int) -> tuple[str, ...]:
        """Return what the names of the MLPs of layer `i` end with."""
        del i
        return ("",)


@dataclass(frozen=True, slots=True)
class Config(Sizes):
    """Sizes and layers."""

    bigram_rows: Count
    compose_keys: Count  #: keys that composed heads see

    def __post_init__(self) -> None:
        Sizes.__post_init__(self)
        if self.bigram_rows < params.SHARDS:
            raise ValueError(f"bigram_rows is {self.bigram_rows}; need at least {params.SHARDS}")
        if "value" not in self.layers[LAST].extras:
            raise ValueError("layers.10.extras lacks 'value'; the last layer needs its embedding")
        for i, layer in enumerate(self.layers):
            if (layer.attention == "none") != (i == SKIP):
                kind = layer.attention
                raise ValueError(f"layers.{i}.attention is {kind!r}; layer 6, and no other, needs 'none'")
        if self.layers[SKIP].extras or min(self.layers_with("compose"), default=LATE) < LATE:
            wrong = "layer 6 has extras, or one before layer 4 has 'compose'"
            raise ValueError(f"{wrong}; their gates do not exist")
        if self.layers_with("x0") or self.layers_with("ngram"):
            raise ValueError("a layer's extras have 'x0' or 'ngram'; leave them out: all that mix get both")

    def gates(self, half: int) -> Widths:
        """Return the gates of layers 0 to 3 for the first half, or of the others."""
        own = range(LATE) if half == 0 else range(LATE, LAST + 1)
        mixing = [i for i in own if i not in (SKIP, LAST)]  # with gates of the stream
        widths: Widths = {}
        for kind in ("exclusive", "gate"):
            widths |= {(kind, i): self.num_heads for i in self.layers_with(kind) if i in own}
        widths |= {(kind, i): 1 for i in mixing for kind in ("x0", "ngram")}
        if half == 1:
            widths |= {("skip", SKIP): 1}
            composing = self.layers_with("compose")
            widths |= {(k, i): self.num_heads for k in ("compose_in", "compose_out") for i in composing}
        return widths


def table(cfg: Config) -> Table:
    """Declare the parameters of the model."""
    blocks = [block_table(layer, cfg) for layer in cfg.layers]
    bigrams = rows(cfg, cfg.bigram_rows, zeros, "bigram", "bigram")
    bigrams = {"bigram_embed": replace(bigrams, reads=partial(bigram_rows, rows=cfg.bigram_rows))}
    return whole_table(cfg, bigrams, blocks, len(cfg.layers_with("value")))


def rows(cfg: Sizes, count: int, init: Init, group: str, axis: str = "vocab") -> ParamSpec:
    """Declare a table with a row for each id."""
    return ParamSpec((count, cfg.model_dim), (axis, "model"), init, group, cfg.table_dtype)


def whole_table(cfg: Sizes, hashed: Table, blocks: Sequence[Table], num_value_gates: int) -> Table:
    """Declare all parameters, given the table of hashed tokens and those of each layer."""
    head = rows(cfg, cfg.vocab_size, gaussian(0.005), "head")
    value = rows(cfg, cfg.vocab_size, gaussian(0.01), "value")
    return {
        "embed": replace(head, group="embed", like="head"),
        **hashed,
        **{f"value_embed.{i}": value for i in cfg.layers_with("value")},
        **{f"block.{i}.{name}": spec for i, block in enumerate(blocks) for name, spec in block.items()},
        **gate_table(cfg, num_value_gates),
        "head": head,
    }


def block_table(layer: Layer, cfg: Sizes) -> Table:
    """Declare the matrices of a layer. Muon orthogonalises queries and keys in pairs of heads (record 80)."""
    d, pair, fan_in = cfg.model_dim, 2 * cfg.head_dim, params.uniform_fan_in
    mixing = {
        "qk": ParamSpec((cfg.num_heads, pair, d), ("pair", "heads", "model"), fan_in, "matrix"),
        "vo": ParamSpec((2, d, d), ("vo", "heads", "model"), fan_in, "matrix"),
    }
    return (mixing if layer.attention != "none" else {}) | {
        "up": ParamSpec((cfg.mlp_dim, d), ("mlp", "model"), fan_in, "matrix"),
        "down": ParamSpec((cfg.mlp_dim, d), ("mlp", "model"), zeros, "matrix"),
    }


def rate_of(matrix: Member) -> float:
    """Return the factor of the learning rate of a matrix."""
    return {"up": 2.0, "down": 4.0}.get(matrix.name.rpartition(".")[2], 1.0)


def gate_table(cfg: Sizes, num_value_gates: int) -> Table:
    """Declare the replicated vectors."""
    d, g, h, kind = cfg.model_dim, cfg.gate_dim, cfg.num_heads, cfg.table_dtype
    mixes, gates = mixing_starts(), gate_starts(cfg)
    width = gates.shape[1]

    def vector(shape: tuple[int, ...], init: Init, group: str, dtype: Dtype = kind) -> ParamSpec:
        return ParamSpec(shape, ("row", "column", "entry")[: len(shape)], init, group, dtype, "vector")

    return {
        "value_gates": vector((num_value_gates, h, 2 * GATE_INPUTS), zeros, "value_gate"),
        "smear_gate": vector((1, 2 * GATE_INPUTS), zeros, "smear_gate"),
        # The scales of attention's input and output in each layer; then the strengths of smear and skip.
        "scalars": vector((24,), fixed(np.array([0.5, 1.0] * 11 + [0.0, -1.5])), "scalar", "float32"),
        "resid_lambdas": vector((11, 2), constant(math.sqrt(1.1)), "resid", "float32"),
        "post_lambdas": vector((11, 2), constant(1.0), "post", "float32"),
        "mudd_w1": vector((2, g, d), params.uniform_within_fan_in, "mudd"),
        "mudd_w2": vector((2, 14, g), zeros, "mudd"),
        "mudd_b2": vector((2, 14), fixed(mixes), "mudd_bias"),
        "mudd_gate_w1": vector((2, g, d), params.uniform_within_fan_in, "mudd_gate"),
        "mudd_gate_w2": vector((2, width, g), zeros, "mudd_gate"),
        "mudd_gate_b2": vector((2, width), fixed(gates), "mudd_gate_bias"),
        "mudd_gate_scale": vector((), fixed(np.array(MUDD_SCALE)), "mudd_gate_scale", "float32"),
    }


def constants(cfg: Sizes, vocabulary: Vocabulary) -> Constants:
    """Return `bigram_signs`, i8 [S, D], the same in all runs; and `prefixes`, i32 [V], if ids have bytes."""

    def signs_SD() -> jax.Array:
        return jax.random.rademacher(jax.random.key(89), (cfg.sign_rows, cfg.model_dim), jnp.int8)

    if not vocabulary:
        return {"bigram_signs": signs_SD}
    rest = np.full(cfg.vocab_size - len(vocabulary), -1, np.int32)
    return {"bigram_signs": signs_SD, "prefixes": np.concatenate([prefixes(vocabulary), rest])}


def fixed(values: np.ndarray) -> Init:
    """Return an initialiser with these values."""
    return lambda _, shape: jnp.asarray(values, jnp.float32).reshape(shape)


def mixing_starts() -> np.ndarray:
    """Return the biases of the mixing weights of the last layer and the end, divided by their scale: [2, 14]."""
    starts = np.zeros((2, 14))
    starts[0, 6:] = [2, 2, math.sqrt(1.1), 1, 0, 0.05, math.sqrt(1.1), 1]
    starts[1, 1] = -0.5
    return starts / MUDD_SCALE


def gate_starts(cfg: Sizes) -> np.ndarray:
    """Return the biases of all gates, divided by their scale: [2, most gates of a half]."""
    effective = {"gate": 0.25, "ngram": 0.05, "skip": 0.5, "compose_in": 1.0}
    rows: list[list[float]] = [[], []]
    for half, row in enumerate(rows):
        for (kind, _), width in cfg.gates(half).items():
            row += [effective.get(kind, 0.0)] * width
    longest = max(map(len, rows))
    return np.array([row + [0.0] * (longest - len(row)) for row in rows]) / MUDD_SCALE
