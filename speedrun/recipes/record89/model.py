"""The architecture of speedrun record 89 (2026), which README.md explains. Layers count from 0.

Legend: B batch, T time, D model, H heads, K head width, F mlp, V vocabulary, G hidden width of a gate, N tokens.
Source: modded-nanogpt, records 22 to 89; each function names its own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from speedrun.base.errors import UsageError
from speedrun.recipes.record89 import attention
from speedrun.recipes.record89.attention import Heads, Turns, View
from speedrun.recipes.record89.parameters import FROZEN, LAST, LATE, MUDD_SCALE, SKIP, Config, Sizes
from speedrun.recipes.record89.tokens import bigrams, previous, targets_of
from speedrun.science import nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels import cross_entropy
from speedrun.science.kernels.attention import first_key
from speedrun.science.kernels.cross_entropy import Cap
from speedrun.science.kernels.dispatch import Kernels, Lookup
from speedrun.science.params import Params
from speedrun.science.recipe import Batch, Forward, Loss


def smeared(e_BTD: jax.Array, p: Params) -> jax.Array:
    """Add a gated part of the previous embedding, even of another document. Record 34, @classiclarryd."""
    strength = p["scalars"][-2]
    gate_BT1 = jax.nn.sigmoid(e_BTD[..., : p["smear_gate"].shape[1]] @ p["smear_gate"].T.astype(e_BTD.dtype))
    return nn.weighted_sum((jnp.ones(()), e_BTD), (strength * gate_BT1, previous(e_BTD)))


def network(u_BTD: jax.Array, p: Params, name: str, i: int, scale: Any) -> jax.Array:
    """Return (W2 gelu(W1 u) + b) * scale in f32, the mixing weights of each token.

    Record 81 (MUDD), after Xiao et al. 2025, MUDDFormer.
    """
    w1_GD, w2, bias = (p[f"{name}_{part}"][i].astype(jnp.float32) for part in ("w1", "w2", "b2"))
    return (hidden(u_BTD, w1_GD) @ w2.T + spread(bias, *u_BTD.shape[:2])) * scale


def spread(x_N: jax.Array, *shape: int) -> jax.Array:
    """Return a vector for each token: [*shape, N]. In its gradient, the rows of 32 tokens are one.

    XLA's sum over rows has few threads for few columns: 0.4 ms for 49,152 x 41 on an H100 (docs/benchmarks).
    """
    rows = 32 if shape[-1] % 32 == 0 else 1
    wide_BRC = jnp.broadcast_to(jnp.tile(x_N, rows), (*shape[:-1], shape[-1] // rows, rows * len(x_N)))
    return jax.lax.optimization_barrier(wide_BRC).reshape(*shape, -1)  # else each thread finds its column


def hidden(u_BTD: jax.Array, w1_GD: jax.Array) -> jax.Array:
    """Return gelu(W1 u): f32 [B, T, G]."""
    return nn.gelu((u_BTD @ w1_GD.T.astype(u_BTD.dtype)).astype(jnp.float32))


#: Gates by kind and layer: f32 [B, T, width].
Gates = Mapping[tuple[str, int], jax.Array]


def gates(u_BTD: jax.Array, p: Params, half: int, cfg: Sizes) -> Gates:
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
    x0_BTD: jax.Array
    values: dict[int, jax.Array]  #: value embeddings [B, T, D] by layer
    ngram_BTD: jax.Array
    products: Mapping[str, Any]  #: how `Kernels.mlp` ("mlp") and `attention.project` ("qkv") multiply
    compose: tuple[jax.Array, int] | None = None  #: first key of composed heads [B, T], and most keys


def context(p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: Config, kernels: Kernels) -> Context:
    """Compute the shared inputs."""
    doc_BT = nn.documents(tokens_BT, cfg.document_token)
    turns = inputs["rotary"], inputs["attention_scale"]
    return Context(
        kernels,
        views(doc_BT, inputs, turns, turns, cfg),
        *embeddings(p, kernels.lookup(tokens_BT), cfg),
        bigrams(p, tokens_BT, inputs["bigram_signs"]),
        inputs.values.get("products", {}),
        (first_key(doc_BT, cfg.compose_keys, 1), cfg.compose_keys),
    )


def embeddings(p: Params, rows_of: Lookup, cfg: Sizes) -> tuple[jax.Array, dict[int, jax.Array]]:
    """Return x0 and the value embeddings [B, T, D] by layer."""
    values = {i: rows_of(p[f"value_embed.{i}"]) for i in cfg.layers_with("value")}
    return nn.rms_norm(smeared(rows_of(p["embed"]), p)), values


def views(doc_BT: jax.Array, inputs: Inputs, short: Turns, long: Turns, cfg: Sizes) -> dict[str, View]:
    """Return views by the kind of attention; raise UsageError if the frequencies do not fit the heads."""
    if (pairs := len(long[0])) * 4 != cfg.head_dim:
        found = f"schedule.rotary_pairs is {pairs} for heads of {cfg.head_dim} dimensions"
        raise UsageError(f"{found}; need a quarter: --set schedule.rotary_pairs={cfg.head_dim // 4}")
    t_T, doubled_BT = jnp.arange(doc_BT.shape[1]), jnp.repeat(doc_BT, 2, axis=1)
    near, far = inputs.window("short_keys"), inputs.window("long_keys")
    by_half = attention.angles(jnp.arange(2 * len(t_T)), *short, cfg.widths("paired")[0])
    paired = attention.paired(*by_half, cfg.num_heads)
    near_angles = attention.angles(t_T, *short, cfg.widths("short")[0])
    far_angles = attention.angles(t_T, *long, cfg.widths("long")[0])
    return {
        "short": View(first_key(doc_BT, near.blocks, 1), near, near_angles),
        "long": View(first_key(doc_BT, far.blocks, 1), far, far_angles),
        "paired": View(first_key(doubled_BT, near.blocks, 1), near, paired),
    }


def gated_value(h_BTD: jax.Array, value_BTD: jax.Array, gate_HN: jax.Array) -> jax.Array:
    """Return 2 sigmoid(g_h [h; value]) value for each head; gates read six entries of each. Records 55 and 70."""
    half = gate_HN.shape[1] // 2
    seen_BTN = jnp.concatenate([h_BTD[..., :half], value_BTD[..., :half]], axis=-1)
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
    cfg: Sizes,
    post: jax.Array,
    value_BTHK: jax.Array | None = None,
) -> jax.Array:
    """Return post times the attention of layer `i` over normalised states, with `value_BTHK` added to the values."""
    layer, (scale_in, scale_out) = cfg.layers[i], p["scalars"][2 * i : 2 * i + 2]
    (qk_width, value_width), narrowed = cfg.widths(layer.attention), attention.narrowed
    view, (value_ND, out_ND) = ctx.views[layer.attention], p[f"block.{i}.vo"]
    qk_ND = narrowed(p[f"block.{i}.qk"].reshape(-1, cfg.model_dim), 2 * cfg.num_heads, qk_width)
    value_ND, in_ND = (narrowed(w, cfg.num_heads, value_width) for w in (value_ND, out_ND.T))
    qk_ND, value_ND = (nn.scaled(w, scale_in) for w in (qk_ND, value_ND))
    qkv = *jnp.split(qk_ND, 2), value_ND
    heads, value_scale = attention.project(h_BTD, qkv, cfg.num_heads, ctx.products.get("qkv", "float32"))
    if {"offset", "compose"} & {*layer.extras}:
        heads, view = attention.rotated(heads, view, ctx.kernels)
    if "offset" in layer.extras:
        heads = attention.with_key_offset(heads)
    if value_BTHK is not None:
        other_BTHK = nn.weighted_sum((1 / value_scale, value_BTHK[..., :value_width]))
        heads = heads._replace(v=heads.v + other_BTHK.astype(heads.v.dtype))
    o_BTHK = correct(attention.attend(heads, view, ctx.kernels), heads, i, gates, ctx)
    return o_BTHK.reshape(*h_BTD.shape[:2], -1) @ nn.scaled(in_ND.T, scale_out * post * value_scale).T


def correct(o_BTHK: jax.Array, heads: Heads, i: int, gates: Gates, ctx: Context) -> jax.Array:
    """Compose heads, remove their part along the own value, and gate them, if layer `i` does so."""
    if (w1_BTH := gates.get(("compose_in", i))) is not None and ctx.compose is not None:
        (first_BT, max_keys), w2_BTH = ctx.compose, gates["compose_out", i]
        o_BTHK += attention.composed(heads, first_BT, w1_BTH, w2_BTH, max_keys)
    if (alpha_BTH := gates.get(("exclusive", i))) is not None:
        o_BTHK = attention.exclusive(o_BTHK, heads.v, alpha_BTH)
    if (gate_BTH := gates.get(("gate", i))) is not None:
        o_BTHK = nn.weighted_sum((gate_BTH[..., None], o_BTHK))
    return o_BTHK


def mix_channels(
    x_BTD: jax.Array, p: Params, i: int, ctx: Context, cfg: Sizes, post: jax.Array
) -> list[jax.Array]:
    """Return post times each MLP of layer `i`."""
    z_BTD, how = nn.rms_norm(x_BTD), ctx.products.get("mlp", {})
    weights = [(p[f"block.{i}.up{end}"], nn.scaled(p[f"block.{i}.down{end}"], post)) for end in cfg.mlps(i)]
    return [ctx.kernels.mlp(z_BTD, up_FD, down_FD.T, **how) for up_FD, down_FD in weights]


def add_attention(
    x_BTD: jax.Array, h_BTD: jax.Array, p: Params, i: int, gates: Gates, ctx: Context, cfg: Sizes
) -> jax.Array:
    """Return resid x + gate x0 + gate ngram + post y, where y is the attention of `h_BTD`, of those layer `i` has."""
    terms = [(p["resid_lambdas"][i, 0], x_BTD)]
    if ("x0", i) in gates:
        terms.append((gates["x0", i], ctx.x0_BTD))
    if ("ngram", i) in gates and i:  # the input of the first layer has it
        terms.append((gates["ngram", i], ctx.ngram_BTD))
    if cfg.layers[i].attention == "none":
        return nn.weighted_sum(*terms)
    value_BTHK = None
    if i in ctx.values:
        gate_HN = p["value_gates"][cfg.layers_with("value").index(i)]
        value_BTHK = gated_value(h_BTD, ctx.values[i], gate_HN)
    mixed_BTD = mix_positions(h_BTD, p, i, gates, ctx, cfg, p["post_lambdas"][i, 0], value_BTHK)
    return nn.weighted_sum(*terms) + mixed_BTD


def add_mlp(x_BTD: jax.Array, p: Params, i: int, ctx: Context, cfg: Sizes) -> jax.Array:
    """Return resid x + post z for each z, an MLP of x."""
    mixed = mix_channels(x_BTD, p, i, ctx, cfg, p["post_lambdas"][i, 1])
    return sum(mixed, nn.weighted_sum((p["resid_lambdas"][i, 1], x_BTD)))


class Stream(NamedTuple):
    """Saved states of the stream, which later layers read."""

    start_BTD: jax.Array
    early_BTD: jax.Array  #: after layer 3
    frozen_BTD: jax.Array  #: after layer 7
    late_BTD: jax.Array  #: before layer 10


def last_block(
    stream: Stream, p: Params, gates: Gates, ctx: Context, cfg: Sizes
) -> tuple[jax.Array, jax.Array]:
    """Apply layer 10, which mixes values and the stream with 14 weights per token; return its middle and its end.

    Record 81, MUDD.
    """
    x_BTD, c0_BTD, c7_BTD, half = stream.late_BTD, stream.start_BTD, stream.frozen_BTD, cfg.num_heads // 2
    mu = jnp.split(network(x_BTD, p, "mudd", 0, MUDD_SCALE), 14, axis=-1)
    extra_BTD = nn.weighted_sum((mu[0], c0_BTD), (mu[1], c7_BTD), (mu[2], x_BTD))
    gate_BTH = jnp.concatenate([mu[6]] * half + [mu[7]] * half, axis=-1)
    value_BTHK = nn.weighted_sum((gate_BTH[..., None], by_head(ctx.values[LAST], cfg.num_heads)))
    value_BTHK += by_head(extra_BTD, cfg.num_heads)
    y_BTD = mix_positions(nn.rms_norm(c7_BTD), p, LAST, gates, ctx, cfg, jnp.ones(()), value_BTHK)
    x_BTD = nn.weighted_sum((1 + mu[5], x_BTD), (mu[3], c0_BTD), (mu[4], c7_BTD))
    x_BTD = nn.weighted_sum((mu[8], x_BTD), (mu[9], y_BTD), (mu[10], c0_BTD), (mu[11], ctx.ngram_BTD))
    (z_BTD,) = mix_channels(x_BTD, p, LAST, ctx, cfg, jnp.ones(()))
    return x_BTD, nn.weighted_sum((mu[12], x_BTD), (mu[13], z_BTD))


def layers(p: Params, ctx: Context, cfg: Sizes) -> tuple[Stream, jax.Array, jax.Array]:
    """Apply all layers; return the saved states, and the stream in the middle and at the end of the last layer."""

    def block(x_BTD: jax.Array, h_BTD: jax.Array, i: int) -> jax.Array:
        return add_mlp(add_attention(x_BTD, h_BTD, p, i, now, ctx, cfg), p, i, ctx, cfg)

    now = gates(ctx.x0_BTD, p, 0, cfg)
    x_BTD = start_BTD = nn.weighted_sum((jnp.ones(()), ctx.x0_BTD), (now["ngram", 0], ctx.ngram_BTD))
    for i in range(LATE):
        x_BTD = block(x_BTD, nn.rms_norm(x_BTD), i)
    early_BTD = x_BTD
    now = gates(x_BTD, p, 1, cfg)
    for i in range(LATE, SKIP):
        x_BTD = block(x_BTD, nn.rms_norm(x_BTD), i)
    gate_BT1 = jax.nn.sigmoid(p["scalars"][-1]) * now["skip", SKIP]
    x_BTD = add_mlp(nn.weighted_sum((jnp.ones(()), x_BTD), (gate_BT1, early_BTD)), p, SKIP, ctx, cfg)
    x_BTD = frozen_BTD = block(x_BTD, nn.rms_norm(x_BTD), FROZEN)
    for i in range(FROZEN + 1, LAST):
        x_BTD = block(x_BTD, nn.rms_norm(frozen_BTD), i)
    stream = Stream(start_BTD, early_BTD, frozen_BTD, x_BTD)
    return stream, *last_block(stream, p, now, ctx, cfg)


def mixed_end(x_BTD: jax.Array, stream: Stream, p: Params, ctx: Context) -> jax.Array:
    """Add earlier states and the first value embedding, with five weights per token. Record 81."""
    f = jnp.split(network(x_BTD, p, "mudd", 1, MUDD_SCALE)[..., :5], 5, axis=-1)
    first_BTD = ctx.values[min(ctx.values)]
    earlier = stream.start_BTD, stream.frozen_BTD, stream.late_BTD, first_BTD, stream.early_BTD
    return nn.weighted_sum((jnp.ones(()), x_BTD), *zip(f, earlier, strict=True))


def forward(p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: Config, kernels: Kernels) -> jax.Array:
    """Return the normalised final hidden states: [B, T, D] in the compute dtype.

    The inputs are windows in tokens (`short_keys`, `long_keys`), frequencies f32 [K/4] (`rotary`), `attention_scale`,
    `bigram_signs` +-1 [S, D], and in training how to multiply (`products`).
    """
    ctx = context(p, tokens_BT, inputs, cfg, kernels)
    stream, _, x_BTD = layers(p, ctx, cfg)
    return nn.rms_norm(mixed_end(x_BTD, stream, p, ctx))


#: 23 sigmoid((z + 5) / 7.5), except for a constant that softmax ignores. Record 54.
CAP = Cap(11.5, 15.0, 5.0)


def logits(p: Params, x_ND: jax.Array, _: Inputs, __: Sizes) -> jax.Array:
    """Return the capped logits of final hidden states: f32 [N, V]."""
    return cross_entropy.logits(x_ND, p["head"], cap=CAP)


def loss(p: Params, batch: Batch, inputs: Inputs, cfg: Config, kernels: Kernels, forward: Forward) -> Loss:
    """Return the weighted negative log likelihood of the targets, summed over the tokens of a sequence."""
    products = {"mlp": {"factors": cfg.mlp_dtype, "gradient_scale": cfg.mlp_gradient_scale}}
    in_training = replace(inputs, values={**inputs.values, "products": products})
    x_BTD = forward(p, batch.tokens_BT, in_training, cfg, kernels)
    x_ND, targets = x_BTD.reshape(-1, cfg.model_dim), targets_of(batch.targets_BT, inputs)
    losses = kernels.weighted_cross_entropy(x_ND, p["head"], targets, cap=CAP, fp8=cfg.head_fp8)
    return Loss(losses.weighted / len(x_BTD), losses.first / len(x_ND))
