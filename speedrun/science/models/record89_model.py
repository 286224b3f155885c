"""The architecture of speedrun record 89 (2026), which docs/record89.md explains. Layers count from 0.

Legend: B batch, T time, D model, H heads, K head width, F mlp, V vocabulary, G hidden width of a gate, N tokens.
Source: modded-nanogpt, records 22 to 89; each function names its own.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from speedrun.base.errors import UsageError
from speedrun.science import nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels import cross_entropy
from speedrun.science.kernels.attention import sight
from speedrun.science.kernels.choose import Kernels
from speedrun.science.kernels.cross_entropy import Cap
from speedrun.science.kernels.mlp import Factors
from speedrun.science.models import record89_attention as attention
from speedrun.science.models.record89_attention import Heads, View
from speedrun.science.models.record89_table import FROZEN, GATE_INPUTS, LAST, LATE, MUDD_SCALE, SKIP, Config
from speedrun.science.models.record89_tokens import bigrams, previous, targets_of
from speedrun.science.params import Params
from speedrun.science.recipe import Batch, Forward, Loss


def smeared(e_BTD: jax.Array, p: Params) -> jax.Array:
    """Add a gated part of the previous embedding, even of another document. Record 34, @classiclarryd."""
    strength = p["scalars"][-2]
    gate_BT1 = jax.nn.sigmoid(e_BTD[..., : 2 * GATE_INPUTS] @ p["smear_gate"].T.astype(e_BTD.dtype))
    return nn.blend((jnp.ones(()), e_BTD), (strength * gate_BT1, previous(e_BTD)))


def network(u_BTD: jax.Array, p: Params, name: str, i: int, scale: Any) -> jax.Array:
    """Return (W2 gelu(W1 u) + b) * scale in f32, the mixing weights of each token.

    Record 81 (MUDD), after Xiao et al. 2025, MUDDFormer.
    """
    w1_GD, w2, bias = (p[f"{name}_{part}"][i].astype(jnp.float32) for part in ("w1", "w2", "b2"))
    hidden_BTG = u_BTD @ w1_GD.T.astype(u_BTD.dtype)
    return (nn.gelu(hidden_BTG.astype(jnp.float32)) @ w2.T + bias[None, None]) * scale


#: Gates by kind and layer: f32 [B, T, width].
Gates = Mapping[tuple[str, int], jax.Array]


def gates(u_BTD: jax.Array, p: Params, half: int, cfg: Config) -> Gates:
    """Return the gates of one half of the layers. Record 85."""
    all_BTN = network(u_BTD, p, "mudd_gate", half, p["mudd_gate_scale"])
    values, start = {}, 0
    for key, width in cfg.gates(half).items():
        values[key], start = all_BTN[..., start : start + width], start + width
    return values


class Context(NamedTuple):
    """Inputs that all layers share, computed once per step."""

    kernels: Kernels
    views: dict[str, View]  #: by the kind of attention
    compose_first_BT: jax.Array  #: first key of composed heads
    x0_BTD: jax.Array
    bigram_BTD: jax.Array
    values: dict[int, jax.Array]  #: value embeddings [B, T, D] by layer
    mlp_dtype: Factors


def context(p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: Config, kernels: Kernels) -> Context:
    """Compute the shared inputs; raise UsageError if the frequencies do not fit the heads."""
    if (pairs := len(inputs["rotary"])) * 4 != cfg.head_dim:
        found = f"schedule.rotary_pairs is {pairs} for heads of {cfg.head_dim} dimensions"
        raise UsageError(f"{found}; need a quarter: --set schedule.rotary_pairs={cfg.head_dim // 4}")
    doc_BT, num_tokens = nn.documents(tokens_BT, cfg.document_token), tokens_BT.shape[1]
    at = partial(attention.angles, rotary_K=inputs["rotary"], scale=inputs["attention_scale"])
    by_token, by_half = at(jnp.arange(num_tokens)), at(jnp.arange(2 * num_tokens))
    # In paired layers, head h of token t turns as at 2 t + h mod 2, so heads of one half of a token differ.
    shape, num_turns = (2 * num_tokens, -1), (1, cfg.num_heads // 2)
    cos_TJ, sin_TJ = (jnp.tile(a.reshape(num_tokens, -1), num_turns).reshape(shape) for a in by_half)
    paired = cos_TJ[:, : cfg.head_dim], sin_TJ[:, : cfg.head_dim]
    short, long = inputs.window("short_keys"), inputs.window("long_keys")
    return Context(
        kernels=kernels,
        views={
            "short": View(sight(doc_BT, short.blocks, 1), short, by_token),
            "long": View(sight(doc_BT, long.blocks, 1), long, by_token),
            "paired": View(sight(jnp.repeat(doc_BT, 2, axis=1), short.blocks, 1), short, paired),
        },
        compose_first_BT=sight(doc_BT, cfg.compose_keys, 1),
        x0_BTD=nn.rms_norm(smeared(nn.lookup(p["embed"], tokens_BT), p)),
        bigram_BTD=bigrams(p, tokens_BT, inputs["bigram_signs"]),
        values={i: nn.lookup(p[f"value_embed.{i}"], tokens_BT) for i in cfg.layers_with("value")},
        mlp_dtype=inputs.values.get("mlp_dtype", "float32"),
    )


def gated_value(h_BTD: jax.Array, value_BTD: jax.Array, gate_HN: jax.Array) -> jax.Array:
    """Return 2 sigmoid(g_h [h; value]) value for each head; gates read six entries of each. Records 55 and 70."""
    seen_BTN = jnp.concatenate([h_BTD[..., :GATE_INPUTS], value_BTD[..., :GATE_INPUTS]], axis=-1)
    gate_BTH1 = 2 * jax.nn.sigmoid(seen_BTN @ gate_HN.T.astype(h_BTD.dtype))[..., None]
    return gate_BTH1 * by_head(value_BTD, len(gate_HN))


def by_head(x_BTD: jax.Array, num_heads: int) -> jax.Array:
    """Split the model dimensions into heads: [B, T, H, K]."""
    return x_BTD.reshape(*x_BTD.shape[:2], num_heads, -1)


def mix_positions(
    h_BTD: jax.Array,
    p: Params,
    i: int,
    gates: Gates,
    ctx: Context,
    cfg: Config,
    post: jax.Array,
    value_BTHK: jax.Array | None = None,
) -> jax.Array:
    """Return post times the attention of layer `i` over normalised states, with `value_BTHK` added to the values."""
    layer, (scale_in, scale_out) = cfg.layers[i], p["scalars"][2 * i : 2 * i + 2]
    view, (value_ND, out_ND) = ctx.views[layer.attention], p[f"block.{i}.vo"]
    qk_HND, value_ND = (nn.scaled(w, scale_in) for w in (p[f"block.{i}.qk"], value_ND))
    heads = attention.project(h_BTD, qk_HND, value_ND, cfg.num_heads)
    if {"offset", "compose"} & {*layer.extras}:
        heads, view = attention.rotated(heads, view, ctx.kernels)
    if "offset" in layer.extras:
        heads = attention.with_key_offset(heads)
    if value_BTHK is not None:
        heads = heads._replace(v=heads.v + value_BTHK.astype(heads.v.dtype))
    o_BTHK = correct(attention.attend(heads, view, ctx.kernels), heads, i, gates, ctx, cfg)
    return o_BTHK.reshape(h_BTD.shape) @ nn.scaled(out_ND, scale_out * post).T


def correct(o_BTHK: jax.Array, heads: Heads, i: int, gates: Gates, ctx: Context, cfg: Config) -> jax.Array:
    """Compose heads, remove their part along the own value, and gate them, if layer `i` does so."""
    if (w1_BTH := gates.get(("compose_in", i))) is not None:
        first_BT, w2_BTH = ctx.compose_first_BT, gates["compose_out", i]
        o_BTHK += attention.composed(heads, first_BT, w1_BTH, w2_BTH, cfg.compose_keys)
    if (alpha_BTH := gates.get(("exclusive", i))) is not None:
        o_BTHK = attention.exclusive(o_BTHK, heads.v, alpha_BTH)
    if (gate_BTH := gates.get(("gate", i))) is not None:
        o_BTHK = nn.blend((gate_BTH[..., None], o_BTHK))
    return o_BTHK


def mix_channels(x_BTD: jax.Array, p: Params, i: int, ctx: Context, post: jax.Array) -> jax.Array:
    """Return post times the MLP of layer `i`."""
    up_FD, down_FD = p[f"block.{i}.up"], nn.scaled(p[f"block.{i}.down"], post)
    return ctx.kernels.mlp(nn.rms_norm(x_BTD), up_FD, down_FD.T, factors=ctx.mlp_dtype)


def add_attention(
    x_BTD: jax.Array, h_BTD: jax.Array, p: Params, i: int, gates: Gates, ctx: Context, cfg: Config
) -> jax.Array:
    """Return resid x + post y + gate x0 + gate bigram, where y is the attention of `h_BTD`."""
    value_BTHK = None
    if i in ctx.values:
        gate_HN = p["value_gates"][cfg.layers_with("value").index(i)]
        value_BTHK = gated_value(h_BTD, ctx.values[i], gate_HN)
    terms = [(p["resid_lambdas"][i, 0], x_BTD), (gates["x0", i], ctx.x0_BTD)]
    terms += [(gates["bigram", i], ctx.bigram_BTD)] if i else []  # the input of the first layer has it
    return nn.blend(*terms) + mix_positions(h_BTD, p, i, gates, ctx, cfg, p["post_lambdas"][i, 0], value_BTHK)


def add_mlp(x_BTD: jax.Array, p: Params, i: int, ctx: Context) -> jax.Array:
    """Return resid x + post z, where z is the MLP of x."""
    z_BTD = mix_channels(x_BTD, p, i, ctx, p["post_lambdas"][i, 1])
    return nn.blend((p["resid_lambdas"][i, 1], x_BTD)) + z_BTD


def block(x_BTD: jax.Array, p: Params, i: int, gates: Gates, ctx: Context, cfg: Config) -> jax.Array:
    """Apply a layer to the stream."""
    return add_mlp(add_attention(x_BTD, nn.rms_norm(x_BTD), p, i, gates, ctx, cfg), p, i, ctx)


class Stream(NamedTuple):
    """Saved states of the stream, which later layers read."""

    start_BTD: jax.Array
    early_BTD: jax.Array  #: after layer 3
    frozen_BTD: jax.Array  #: after layer 7
    late_BTD: jax.Array  #: before layer 10


def last_block(stream: Stream, p: Params, gates: Gates, ctx: Context, cfg: Config) -> jax.Array:
    """Apply layer 10, which mixes values and the stream with 14 weights per token. Record 81, MUDD."""
    x_BTD, c0_BTD, c7_BTD, half = stream.late_BTD, stream.start_BTD, stream.frozen_BTD, cfg.num_heads // 2
    mu = jnp.split(network(x_BTD, p, "mudd", 0, MUDD_SCALE), 14, axis=-1)
    extra_BTD = nn.blend((mu[0], c0_BTD), (mu[1], c7_BTD), (mu[2], x_BTD))
    gate_BTH = jnp.concatenate([mu[6]] * half + [mu[7]] * half, axis=-1)
    value_BTHK = nn.blend((gate_BTH[..., None], by_head(ctx.values[LAST], cfg.num_heads)))
    value_BTHK += by_head(extra_BTD, cfg.num_heads)
    y_BTD = mix_positions(nn.rms_norm(c7_BTD), p, LAST, gates, ctx, cfg, jnp.ones(()), value_BTHK)
    x_BTD = nn.blend((1 + mu[5], x_BTD), (mu[3], c0_BTD), (mu[4], c7_BTD))
    x_BTD = nn.blend((mu[8], x_BTD), (mu[9], y_BTD), (mu[10], c0_BTD), (mu[11], ctx.bigram_BTD))
    return nn.blend((mu[12], x_BTD), (mu[13], mix_channels(x_BTD, p, LAST, ctx, jnp.ones(()))))


def mixed_end(x_BTD: jax.Array, stream: Stream, p: Params, ctx: Context) -> jax.Array:
    """Add earlier states and the first value embedding, with five weights per token. Record 81."""
    f = jnp.split(network(x_BTD, p, "mudd", 1, MUDD_SCALE)[..., :5], 5, axis=-1)
    first_BTD = ctx.values[min(ctx.values)]
    earlier = stream.start_BTD, stream.frozen_BTD, stream.late_BTD, first_BTD, stream.early_BTD
    return nn.blend((jnp.ones(()), x_BTD), *zip(f, earlier, strict=True))


def forward(p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: Config, kernels: Kernels) -> jax.Array:
    """Return the normalised final hidden states: [B, T, D] in the compute dtype.

    The inputs are windows in tokens (`short_keys`, `long_keys`), frequencies f32 [K/4] (`rotary`), `attention_scale`,
    `bigram_signs` +-1 [S, D], and in training the dtype of the MLPs' factors (`mlp_dtype`).
    """
    ctx = context(p, tokens_BT, inputs, cfg, kernels)
    now = gates(ctx.x0_BTD, p, 0, cfg)
    x_BTD = start_BTD = nn.blend((jnp.ones(()), ctx.x0_BTD), (now["bigram", 0], ctx.bigram_BTD))
    for i in range(LATE):
        x_BTD = block(x_BTD, p, i, now, ctx, cfg)
    early_BTD = x_BTD
    now = gates(x_BTD, p, 1, cfg)
    for i in range(LATE, SKIP):
        x_BTD = block(x_BTD, p, i, now, ctx, cfg)
    gate_BT1 = jax.nn.sigmoid(p["scalars"][-1]) * now["skip", SKIP]
    x_BTD = add_mlp(nn.blend((jnp.ones(()), x_BTD), (gate_BT1, early_BTD)), p, SKIP, ctx)
    x_BTD = frozen_BTD = block(x_BTD, p, FROZEN, now, ctx, cfg)
    for i in range(FROZEN + 1, LAST):
        x_BTD = add_mlp(add_attention(x_BTD, nn.rms_norm(frozen_BTD), p, i, now, ctx, cfg), p, i, ctx)
    stream = Stream(start_BTD, early_BTD, frozen_BTD, x_BTD)
    return nn.rms_norm(mixed_end(last_block(stream, p, now, ctx, cfg), stream, p, ctx))


#: 23 sigmoid((z + 5) / 7.5), except for a constant that softmax ignores. Record 54.
CAP = Cap(11.5, 15.0, 5.0)


def logits(p: Params, x_ND: jax.Array, _: Inputs, __: Config) -> jax.Array:
    """Return the capped logits of final hidden states: f32 [N, V]."""
    return cross_entropy.logits(x_ND, p["head"], cap=CAP)


def loss(p: Params, batch: Batch, inputs: Inputs, cfg: Config, kernels: Kernels, forward: Forward) -> Loss:
    """Return the weighted negative log likelihood of the targets, summed over the tokens of a sequence."""
    in_training = replace(inputs, values={**inputs.values, "mlp_dtype": cfg.mlp_dtype})
    x_BTD = forward(p, batch.tokens_BT, in_training, cfg, kernels)
    x_ND, targets = x_BTD.reshape(-1, cfg.model_dim), targets_of(batch.targets_BT, inputs)
    losses = kernels.weighted_cross_entropy(x_ND, p["head"], targets, cap=CAP, fp8=cfg.head_fp8)
    return Loss(losses.weighted / len(x_BTD), losses.first / len(x_ND))
