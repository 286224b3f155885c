"""The architecture of speedrun record 92 (2026), which README.md explains.

The layers are those of record 89; n-grams, segments, the end and the sampled loss are new.

Legend: B batch, T time, D model, S sources, J groups of channels, G hidden width of a gate, N tokens.
Source: modded-nanogpt, records 90 to 92.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from speedrun.recipes.record89 import model as record89
from speedrun.recipes.record89.model import CAP, Context, Stream
from speedrun.recipes.record89.parameters import LAST, MUDD_SCALE
from speedrun.recipes.record89.tokens import targets_of
from speedrun.recipes.record92.parameters import TWIN, Config
from speedrun.recipes.record92.tokens import ngrams, sampled, segments
from speedrun.science import nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.params import Params
from speedrun.science.recipe import Batch, Forward, Loss


def mixed_end(
    x_BTD: jax.Array, middle_BTD: jax.Array, stream: Stream, p: Params, ctx: Context, cfg: Config
) -> jax.Array:
    """Add ten sources, each with a weight per token and group of channels."""
    early = stream.start_BTD, stream.frozen_BTD, stream.late_BTD, ctx.values[1], stream.early_BTD
    normed = nn.rms_norm(middle_BTD), nn.rms_norm(stream.frozen_BTD)
    sources = *early, *(ctx.values[i] for i in (2, LAST, TWIN)), *normed
    grouped = [x.reshape(*x.shape[:2], -1, cfg.mix_dim) for x in (x_BTD, *sources)]
    weights = [w_BTJ[..., None] for w_BTJ in jnp.unstack(mix_weights(x_BTD, p)[:, :, : len(sources)], axis=2)]
    return nn.weighted_sum(*zip([jnp.ones(()), *weights], grouped, strict=True)).reshape(x_BTD.shape)


def mix_weights(x_BTD: jax.Array, p: Params) -> jax.Array:
    """Return the weights of 14 sources, of which four do not exist: f32 [B, T, S, J]."""
    w2g_SJG = p["mudd_w2g"].astype(jnp.float32)
    own_BTSJ = jnp.einsum("btg,sjg->btsj", record89.hidden(x_BTD, p["mudd_w1"][1]), w2g_SJG)
    return record89.network(x_BTD, p, "mudd", 1, MUDD_SCALE)[..., None] + MUDD_SCALE * own_BTSJ


def context(p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: Config, kernels: Kernels) -> Context:
    """Compute what all layers share."""
    most = inputs.values.get("segment_tokens", tokens_BT.shape[1])
    segment_BT = segments(tokens_BT, cfg.document_token, most)
    short, long = ((inputs[f"{kind}_rotary"], inputs[f"{kind}_scale"]) for kind in ("short", "long"))
    views = record89.views(segment_BT, inputs, short, long, cfg)
    ngram_BTD = ngrams(p, tokens_BT, inputs["bigram_signs"])
    embedded = record89.embeddings(p, kernels.lookup(tokens_BT), cfg)
    return Context(kernels, views, *embedded, ngram_BTD, inputs.values.get("products", {}))


def forward(p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: Config, kernels: Kernels) -> jax.Array:
    """Return the normalised final hidden states: [B, T, D] in the compute dtype.

    The inputs are windows in tokens (`short_keys`, `long_keys`); for each, frequencies f32 [K/4] (`short_rotary`, ...)
    and attention's scale (`short_scale`, ...); `bigram_signs` +-1 [S, D]; in training `segment_tokens`, `products`.
    """
    ctx = context(p, tokens_BT, inputs, cfg, kernels)
    stream, middle_BTD, x_BTD = record89.layers(p, ctx, cfg)
    return nn.rms_norm(mixed_end(x_BTD, middle_BTD, stream, p, ctx, cfg))


def carry(_: Config) -> Params:
    """Return how far a sequence's sweeps through the vocabulary have come."""
    return {"swept": jnp.zeros((), jnp.int32)}


def loss(p: Params, batch: Batch, inputs: Inputs, cfg: Config, kernels: Kernels, forward: Forward) -> Loss:
    """Return the weighted negative log likelihood of the targets, summed over the tokens of a sequence.

    While the input `columns` is above 0 and below the vocabulary, the softmax of a sequence has as many columns, and
    so has the likelihood in the log.
    """
    mlp = {"factors": cfg.mlp_dtype, "gradient_scale": cfg.mlp_gradient_scale}
    own = {"segment_tokens": cfg.segment_tokens, "products": {"mlp": mlp, "qkv": cfg.qkv_dtype}}
    in_training = replace(inputs, values={**inputs.values, **own})
    x_BTD, v = forward(p, batch.tokens_BT, in_training, cfg, kernels), cfg.vocab_size
    score = partial(kernels.weighted_cross_entropy, cap=CAP, fp8=cfg.head_fp8)
    targets = partial(targets_of, inputs=inputs)
    num_columns, swept_B = inputs["columns"], batch.carry["swept"]
    if 0 < num_columns < v:
        starts_B = v * (batch.index_B % cfg.sweep_starts) // cfg.sweep_starts
        given = zip(batch.targets_BT, (starts_B + swept_B) % v, strict=True)
        columns = [sampled(ids_T, offset, num_columns, v) for ids_T, offset in given]
        each = zip(x_BTD, batch.targets_BT, columns, strict=True)
        found = [score(x_TD, p["head"][one.ids_P], one.of(targets(ids_T[None]))) for x_TD, ids_T, one in each]
        losses = jax.tree.map(lambda *x: sum(x), *found)
        swept_B = (jnp.stack([one.offset for one in columns]) - starts_B) % v
    else:
        losses = score(x_BTD.reshape(-1, cfg.model_dim), p["head"], targets(batch.targets_BT))
    return Loss(losses.weighted / len(x_BTD), losses.first / batch.targets_BT.size, {"swept": swept_B})
