"""The architecture of speedrun record 21: U-net skips, value embeddings, embedding shortcut, block windows.

Layers are data: `Config` has one entry per layer, and the code never tests a layer's number.
Legend: B batch, T time, N tokens, D model, H heads, K head width, M all heads, F mlp, V vocabulary.
Source: modded-nanogpt, records 8 to 21 (K. Jordan, @Grad62304977, @YouJiacheng, @brendanh0gan, @KoszarskyB and others).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from speedrun.base.field_types import Count, Natural, Positive
from speedrun.science import nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels import cross_entropy
from speedrun.science.kernels.attention import Window, first_key
from speedrun.science.kernels.cross_entropy_gpu import Fp8
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.kernels.linear import linear
from speedrun.science.params import Dtype, Params, ParamSpec, Table, constant, normal, uniform_fan_in, zeros
from speedrun.science.recipe import Batch, Forward, Loss

AttentionKind = Literal["long", "short", "none"]

#: Stands for "no value embedding" in `Config.value_tables`.
NO_TABLE = -1


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes, and tuples with one entry per layer."""

    vocab_size: Count  #: rows of the input tables
    padded_vocab_size: Count  #: columns of the softmax; those beyond vocab_size are never targets
    model_dim: Count
    num_heads: Count
    head_dim: Count
    mlp_dim: Count
    attention_kinds: tuple[AttentionKind, ...]  #: attention window of each layer, or none
    value_tables: tuple[int, ...]  #: value embedding of each layer; NO_TABLE for none
    block_tokens: Count  #: tokens per block of a window
    attention_scale: Positive
    logit_cap: float
    document_token: Natural
    table_dtype: Dtype  #: of stored token and value embeddings and their moments
    head_fp8: Fp8 | None  #: scales of the head's products in training; None: compute dtype

    def __post_init__(self) -> None:
        cap, most, tables = self.logit_cap, cross_entropy.MAX_CAP, self.value_tables
        if not 0 < cap <= most:
            raise ValueError(f"logit_cap is {cap:g}; need more than 0, at most {most:g}")
        if len(tables) != self.num_layers:
            entries = f"{len(tables)} entries, attention_kinds {self.num_layers}"
            raise ValueError(f"value_tables has {entries}; need one per layer")
        if min(tables, default=NO_TABLE) < NO_TABLE:
            raise ValueError(f"value_tables is {tables}; number tables from 0, {NO_TABLE} for none")
        if self.num_layers % 2 or not self.num_layers:
            raise ValueError(f"{self.num_layers} layers: the U-net needs an even number")
        if self.head_dim % 4:
            raise ValueError(f"head_dim is {self.head_dim}: half-truncated rotary needs a multiple of 4")
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size is {self.padded_vocab_size}; need {self.vocab_size} or more")

    @property
    def num_layers(self) -> int:
        """Number of layers, including those without attention."""
        return len(self.attention_kinds)

    @property
    def used_tables(self) -> list[int]:
        """Indices of value embeddings that some layer adds."""
        return sorted(set(self.value_tables) - {NO_TABLE})

    def mlp(self, x_ND: jax.Array, p: Params, block: str, kernels: Kernels) -> jax.Array:
        """Apply the MLP of a layer, such as "block.0", to normalised states. Variants override it."""
        return kernels.mlp(x_ND, p[f"{block}.mlp_up"], p[f"{block}.mlp_down"])


class Context(NamedTuple):
    """Inputs that all layers share, computed once per step."""

    kernels: Kernels
    x0_ND: jax.Array
    windows: dict[AttentionKind, Window]
    first_BT: dict[AttentionKind, jax.Array]  #: the first key that each token sees
    angles: tuple[jax.Array, jax.Array]
    values: dict[int, jax.Array]  #: value embeddings [B, T, H, K] by table


def attend(h_ND: jax.Array, p: Params, i: int, ctx: Context, cfg: Config) -> jax.Array:
    """Apply attention of layer `i` with QK-norm, rotary and value embeddings."""
    if cfg.attention_kinds[i] == "none":
        return jnp.zeros_like(h_ND)
    window, value_table, block = cfg.attention_kinds[i], cfg.value_tables[i], f"block.{i}"
    (own, shared), (q_MD, k_MD, v_MD) = p[f"{block}.value_lambdas"], p[f"{block}.qkv"]
    heads = (*ctx.first_BT[window].shape, cfg.num_heads, cfg.head_dim)
    q_BTHK, k_BTHK, v_BTHK = (x.reshape(heads) for x in nn.project(h_ND, q_MD, k_MD, nn.scaled(v_MD, own)))
    if value_table in ctx.values:
        v_BTHK = nn.weighted_sum((jnp.ones(()), v_BTHK), (shared, ctx.values[value_table]))
    how = {"scale": cfg.attention_scale, "window": ctx.windows[window], "block_tokens": cfg.block_tokens}
    o_BTHK = ctx.kernels.attention(q_BTHK, k_BTHK, v_BTHK, ctx.first_BT[window], angles=ctx.angles, **how)
    return linear(o_BTHK.reshape(len(h_ND), -1), p[f"{block}.attn_out"])


def block_table(kind: AttentionKind, cfg: Config) -> Table:
    """Declare the parameters of a layer. Projections into the residual stream start at zero."""
    inner = cfg.num_heads * cfg.head_dim
    attention = {
        "qkv": ParamSpec((3, inner, cfg.model_dim), ("qkv", "heads", "model"), uniform_fan_in, "matrix"),
        "attn_out": ParamSpec((cfg.model_dim, inner), ("model", "heads"), zeros, "matrix"),
        "value_lambdas": ParamSpec((2,), ("lambda",), constant(0.5, 0.5), "scalar"),
    }
    return (attention if kind != "none" else {}) | {
        "lambdas": ParamSpec((2,), ("lambda",), constant(1.0, 0.0), "scalar"),
        "mlp_up": ParamSpec((cfg.mlp_dim, cfg.model_dim), ("mlp", "model"), uniform_fan_in, "matrix"),
        "mlp_down": ParamSpec((cfg.model_dim, cfg.mlp_dim), ("model", "mlp"), zeros, "matrix"),
    }


def table(cfg: Config) -> Table:
    """Declare the parameters of the model."""
    inner, blocks = cfg.num_heads * cfg.head_dim, {}
    for i, kind in enumerate(cfg.attention_kinds):
        blocks |= {f"block.{i}.{name}": spec for name, spec in block_table(kind, cfg).items()}

    def embedding(axis: str, width: int) -> ParamSpec:
        return ParamSpec((cfg.vocab_size, width), ("vocab", axis), normal, "embed", cfg.table_dtype)

    return {
        "embed": embedding("model", cfg.model_dim),
        **{f"value_embed.{i}": embedding("heads", inner) for i in cfg.used_tables},
        **blocks,
        "skips": ParamSpec((cfg.num_layers // 2,), ("layer",), constant(1.0), "scalar"),
        "head": ParamSpec((cfg.padded_vocab_size, cfg.model_dim), ("vocab", "model"), zeros, "head"),
    }


def logits(p: Params, x_ND: jax.Array, _: Inputs, cfg: Config) -> jax.Array:
    """Return the capped logits of final hidden states: f32 [N, V]."""
    return cross_entropy.logits(x_ND, p["head"], cap=cfg.logit_cap)


def loss(p: Params, batch: Batch, inputs: Inputs, cfg: Config, kernels: Kernels, forward: Forward) -> Loss:
    """Return the mean negative log likelihood of the targets."""
    x_BTD = forward(p, batch.tokens_BT, inputs, cfg, kernels)
    x_ND, targets_N = x_BTD.reshape(-1, cfg.model_dim), batch.targets_BT.reshape(-1)
    nll_sum = kernels.summed_cross_entropy(x_ND, p["head"], targets_N, cap=cfg.logit_cap, fp8=cfg.head_fp8)
    nll = nll_sum / targets_N.size
    return Loss(nll, nll)


def context(p: Params, tokens_BT: jax.Array, long: Window, cfg: Config, kernels: Kernels) -> Context:
    """Compute the shared inputs of the layers."""
    doc_BT = nn.documents(tokens_BT, cfg.document_token)
    windows: dict[AttentionKind, Window] = {"long": long, "short": long.halved()}
    rows_of, heads = kernels.lookup(tokens_BT), (*tokens_BT.shape, cfg.num_heads, cfg.head_dim)
    return Context(
        kernels=kernels,
        # Two dimensions: with three, XLA copies the stream before each product that is added to it.
        x0_ND=nn.rms_norm(rows_of(p["embed"]).reshape(-1, cfg.model_dim)),
        windows=windows,
        first_BT={kind: first_key(doc_BT, one.blocks, cfg.block_tokens) for kind, one in windows.items()},
        angles=nn.rotary_angles(tokens_BT.shape[1], cfg.head_dim),
        values={i: rows_of(p[f"value_embed.{i}"]).reshape(heads) for i in cfg.used_tables},
    )


def block(x_ND: jax.Array, p: Params, i: int, ctx: Context, cfg: Config) -> jax.Array:
    """Apply a layer: embedding shortcut, attention, MLP."""
    keep, shortcut = p[f"block.{i}.lambdas"]
    x_ND = nn.weighted_sum((keep, x_ND), (shortcut, ctx.x0_ND))
    x_ND = x_ND + attend(nn.rms_norm(x_ND), p, i, ctx, cfg)
    return x_ND + cfg.mlp(nn.rms_norm(x_ND), p, f"block.{i}", ctx.kernels)


def forward(p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: Config, kernels: Kernels) -> jax.Array:
    """Return the normalised final hidden states: [B, T, D] in the compute dtype.

    The input `window_blocks` is the window of "long" layers; "short" layers see half of it. Each layer in the second
    half adds the output of its mirror layer in the first (U-net, record 11).
    """
    ctx = context(p, tokens_BT, inputs.window("window_blocks"), cfg, kernels)
    x_ND, half, saved = ctx.x0_ND, cfg.num_layers // 2, []
    for i in range(half):
        x_ND = block(x_ND, p, i, ctx, cfg)
        saved.append(x_ND)
    for i in range(half, cfg.num_layers):
        x_ND = x_ND + nn.weighted_sum((p["skips"][i - half], saved.pop()))
        x_ND = block(x_ND, p, i, ctx, cfg)
    return nn.rms_norm(x_ND).reshape(*tokens_BT.shape, -1)
