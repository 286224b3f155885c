"""The sizes and parameters of record 92."""

import math
from dataclasses import dataclass, replace
from functools import partial

from speedrun.base.field_types import Count
from speedrun.recipes.record89 import parameters as record89
from speedrun.recipes.record89.parameters import FROZEN, LAST, LATE, SKIP, Attention, Extra, Layer, Widths
from speedrun.recipes.record92.tokens import STRIDE, ngram_rows
from speedrun.science import params
from speedrun.science.kernels.mlp import Factors
from speedrun.science.params import Member, ParamSpec, Table, zeros

TWIN = 8  #: layer with two MLPs side by side


@dataclass(frozen=True, slots=True)
class Config(record89.Sizes):
    """Sizes and layers."""

    ngram_rows: Count  #: half for pairs, half for triples
    mix_dim: Count  #: neighbouring channels that share a weight of the end mix
    segment_tokens: Count  #: in training, attention does not cross a cut after so many tokens of a document
    qkv_dtype: Factors  #: of the factors of queries', keys' and values' forward products in training
    sweep_starts: Count  #: where the sequences of a step start their first sweeps

    def __post_init__(self) -> None:
        record89.Sizes.__post_init__(self)
        if self.head_dim % 8 or self.model_dim % self.mix_dim:
            need = "need heads of a multiple of 8 dimensions, and groups that fill the model"
            raise ValueError(f"heads of {self.head_dim} dimensions, mix_dim {self.mix_dim}: {need}")
        if self.ngram_rows % 2 or self.ngram_rows < 2 * params.SHARDS:
            raise ValueError(f"ngram_rows is {self.ngram_rows}; need an even number, at least 16")
        if self.vocab_size * STRIDE >= 2**31:
            raise ValueError(f"vocab_size is {self.vocab_size}; need at most {2**31 // STRIDE:,}")
        if not {1, 2, TWIN, LAST} <= {*self.layers_with("value")}:
            raise ValueError("layers 1, 2, 8 and 10 need 'value': the end mix reads their embeddings")

    def gates(self, half: int) -> Widths:
        """Return the gates of layers 0 to 3 for the first half, or of the others."""
        own = range(LATE) if half == 0 else range(LATE, LAST + 1)
        kinds: dict[Extra, int] = {"exclusive": self.num_heads, "gate": self.num_heads, "x0": 1, "ngram": 1}
        widths = {(kind, i): n for kind, n in kinds.items() for i in self.layers_with(kind) if i in own}
        return widths | ({("skip", SKIP): 1} if half == 1 else {})

    def widths(self, attention: Attention) -> tuple[int, int]:
        """Return the widths of queries and keys, half of a head's unless "long", and of values, half if "short"."""
        half = self.head_dim // 2
        return half * (1 + (attention == "long")), half * (1 + (attention != "short"))

    def mlps(self, i: int) -> tuple[str, ...]:
        """Return what the names of the MLPs of layer `i` end with."""
        return {FROZEN: (), TWIN: ("", "_twin")}.get(i, ("",))


def table(cfg: Config) -> Table:
    """Declare the parameters of the model."""
    shape = 14, cfg.model_dim // cfg.mix_dim, cfg.gate_dim
    mix = ParamSpec(shape, ("source", "group", "gate"), zeros, "mudd", cfg.table_dtype, "vector")
    ngrams = record89.rows(cfg, cfg.ngram_rows, zeros, "ngram", "ngram")
    ngrams = {"ngram_embed": replace(ngrams, reads=partial(ngram_rows, rows=cfg.ngram_rows))}
    blocks = [block_table(i, layer, cfg) for i, layer in enumerate(cfg.layers)]
    gated = len(cfg.layers_with("value")) - 1  # the last layer has other gates
    return {**record89.whole_table(cfg, ngrams, blocks, gated), "mudd_w2g": mix}


def block_table(i: int, layer: Layer, cfg: Config) -> Table:
    """Declare the matrices of layer `i`, in groups that are averaged in different ways.

    All heads have the full width; what a narrow one does not read only decays. The MLP of layer 7 is not read and does
    not change: as upstream, it counts in the norm of all MLPs when averages are shipped.
    """
    specs, group = record89.block_table(layer, cfg), {"qk": "qk", "vo": "vo"}
    if i == TWIN:
        specs |= {f"{name}_twin": specs[name] for name in ("up", "down")}
    return {name: replace(spec, group=group.get(name, "mlp"), packing="bank") for name, spec in specs.items()}


def rate_of(matrix: Member) -> float:
    """Return the factor of the learning rate of a matrix."""
    _, layer, name = matrix.name.split(".")
    if int(layer) == FROZEN:
        return 0.0
    return math.sqrt(max(1.0, matrix.rows / matrix.cols)) * (2.0 if name.startswith("down") else 1.0)
