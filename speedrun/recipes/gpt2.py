"""gpt2: record 1 of 2024-05-28, GPT-2 trained by llm.c with AdamW. The bottom of the ladder.

Claim: none yet; not run at full size. Published: 45 minutes on 8xH100, and 3.2722 in 19,560 steps, in a log of
2024-10-13.
Differs: tokens are not shuffled; gains and biases are float32 in the forward pass, too.
Run: speedrun run --track main-8xh100 --recipe gpt2
Credits: Radford et al. 2019; A. Karpathy and the contributors of llm.c.

Legend: B batch, T time, D model, H heads, K head width, F mlp, N tokens, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from speedrun.base.errors import UsageError
from speedrun.base.field_types import Count, Momentum, Positive, Rate
from speedrun.base.mesh import DATA
from speedrun.science import nn, variants
from speedrun.science.inputs import Inputs
from speedrun.science.kernels import cross_entropy
from speedrun.science.kernels.attention import Window, first_key
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.optim.muon_and_adam import by_group, in_float32, scale_by_input
from speedrun.science.optim.schedules import Schedule
from speedrun.science.params import Init, Layout, Params, ParamSpec, Table, constant, gaussian, zeros
from speedrun.science.recipe import Batch, Expected, Forward, Loss, Recipe, Stage

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  #: (q_BTHK, k_BTHK, v_BTHK) -> o_BTHK

EPS = 1e-5  #: of LayerNorm
INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes."""

    vocab_size: Count
    max_positions: Count  #: longest sequence
    num_layers: Count
    model_dim: Count
    num_heads: Count
    head_dim: Count
    mlp_dim: Count


def affine_table(name: str, shape: tuple[int, ...], axes: tuple[str, ...], init: Init) -> Table:
    """Declare weights [..., outputs, inputs], and biases that start at zero."""
    return {
        f"{name}.weight": ParamSpec(shape, axes, init, "matrix"),
        f"{name}.bias": ParamSpec(shape[:-1], axes[:-1], zeros, "vector", packing="vector"),
    }


def norm_table(name: str, cfg: Config) -> Table:
    """Declare the gain and bias of a LayerNorm."""

    def vector(value: float) -> ParamSpec:
        return ParamSpec((cfg.model_dim,), ("model",), constant(value), "vector", packing="vector")

    return {f"{name}.gain": vector(1.0), f"{name}.bias": vector(0.0)}


def block_table(name: str, cfg: Config) -> Table:
    """Declare the parameters of a layer. Projections into the residual stream start smaller in deeper models."""
    inner, weight = cfg.num_heads * cfg.head_dim, gaussian(INIT_STD)
    into_stream = gaussian(INIT_STD / math.sqrt(2 * cfg.num_layers))
    return {
        **norm_table(f"{name}.attn_norm", cfg),
        **affine_table(f"{name}.qkv", (3, inner, cfg.model_dim), ("qkv", "heads", "model"), weight),
        **affine_table(f"{name}.attn_out", (cfg.model_dim, inner), ("model", "heads"), into_stream),
        **norm_table(f"{name}.mlp_norm", cfg),
        **affine_table(f"{name}.mlp_up", (cfg.mlp_dim, cfg.model_dim), ("mlp", "model"), weight),
        **affine_table(f"{name}.mlp_down", (cfg.model_dim, cfg.mlp_dim), ("model", "mlp"), into_stream),
    }


def table(cfg: Config) -> Table:
    """Declare the parameters of the model. The token table is also the head."""

    def rows(number: int, axis: str, group: str) -> ParamSpec:
        return ParamSpec((number, cfg.model_dim), (axis, "model"), gaussian(INIT_STD), group)

    specs = {
        "embed": rows(cfg.vocab_size, "vocab", "head"),
        "positions": rows(cfg.max_positions, "position", "embed"),
    }
    for i in range(cfg.num_layers):
        specs |= block_table(f"block.{i}", cfg)
    return specs | norm_table("final_norm", cfg)


def layer_norm(x_BTD: jax.Array, gain_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    """Return gain * (x - mean) / std + bias over the last axis in the dtype of `x_BTD`, computed in float32."""
    x = x_BTD.astype(jnp.float32)
    x -= jnp.mean(x, axis=-1, keepdims=True)
    x *= jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS)
    return (gain_D[None, None] * x + bias_D[None, None]).astype(x_BTD.dtype)


def affine(x_BTD: jax.Array, weight_FD: jax.Array, bias_F: jax.Array) -> jax.Array:
    """Return x W^T + b in the dtype of `x_BTD`."""
    return x_BTD @ weight_FD.T + bias_F.astype(x_BTD.dtype)[None, None]


def attend_in(
    doc_BT: jax.Array, window: Window, block_tokens: int, head_dim: int, kernels: Kernels
) -> Attend:
    """Return attention to the blocks of a window, inside documents."""
    seen = first_key(doc_BT, window.blocks, block_tokens)

    def attend(q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array) -> jax.Array:
        qkv, scale = (q_BTHK, k_BTHK, v_BTHK), head_dim**-0.5
        return kernels.attention(*qkv, seen, scale=scale, window=window, block_tokens=block_tokens)

    return attend


def attend_to_all(tokens_BT: jax.Array, head_dim: int, kernels: Kernels) -> Attend:
    """Return attention to all earlier tokens of the sequence, across documents."""
    one_BT = nn.documents(tokens_BT, -1)  # no token is -1
    return attend_in(one_BT, Window(1, 1), tokens_BT.shape[1], head_dim, kernels)


def attention(h_BTD: jax.Array, p: Params, block: str, attend: Attend, cfg: Config) -> jax.Array:
    """Apply attention with biases."""
    heads = (*h_BTD.shape[:2], cfg.num_heads, cfg.head_dim)
    qkv = zip(p[f"{block}.qkv.weight"], p[f"{block}.qkv.bias"], strict=True)
    o_BTHK = attend(*(affine(h_BTD, w, b).reshape(heads) for w, b in qkv))
    o_BTD = o_BTHK.reshape(*h_BTD.shape[:2], -1)
    return affine(o_BTD, p[f"{block}.attn_out.weight"], p[f"{block}.attn_out.bias"])


def mlp(h_BTD: jax.Array, p: Params, block: str) -> jax.Array:
    """Apply two affine maps with the tanh approximation of GELU between them."""
    up_BTF = affine(h_BTD, p[f"{block}.mlp_up.weight"], p[f"{block}.mlp_up.bias"])
    h_BTF = jax.nn.gelu(up_BTF, approximate=True)
    return affine(h_BTF, p[f"{block}.mlp_down.weight"], p[f"{block}.mlp_down.bias"])


def forward(p: Params, tokens_BT: jax.Array, _: Inputs, cfg: Config, kernels: Kernels) -> jax.Array:
    """Return the normalised final hidden states: [B, T, D] in the compute dtype.

    Raises:
        UsageError: if sequences are longer than the table of positions.
    """
    num_tokens = tokens_BT.shape[1]
    if num_tokens > cfg.max_positions:
        most = cfg.max_positions
        raise UsageError(f"sequences of {num_tokens} tokens; need config.max_positions, {most}, or fewer")

    def norm(x_BTD: jax.Array, name: str) -> jax.Array:
        return layer_norm(x_BTD, p[f"{name}.gain"], p[f"{name}.bias"])

    attend = attend_to_all(tokens_BT, cfg.head_dim, kernels)
    x_BTD = nn.lookup(p["embed"], tokens_BT) + p["positions"][None, :num_tokens]
    for block in (f"block.{i}" for i in range(cfg.num_layers)):
        x_BTD += attention(norm(x_BTD, f"{block}.attn_norm"), p, block, attend, cfg)
        x_BTD += mlp(norm(x_BTD, f"{block}.mlp_norm"), p, block)
    return norm(x_BTD, "final_norm")


def logits(p: Params, x_ND: jax.Array, _: Inputs, __: Config) -> jax.Array:
    """Return the logits of final hidden states: f32 [N, V]."""
    return cross_entropy.logits(x_ND, p["embed"], cap=math.inf)


def mean_nll(x_BTD: jax.Array, head_VD: jax.Array, batch: Batch, kernels: Kernels, *, cap: float) -> Loss:
    """Return the mean negative log likelihood of the targets, given final hidden states."""
    x_ND, targets_N = x_BTD.reshape(-1, x_BTD.shape[-1]), batch.targets_BT.reshape(-1)
    nll = kernels.summed_cross_entropy(x_ND, head_VD, targets_N, cap=cap, fp8=None) / targets_N.size
    return Loss(nll, nll)


def loss(p: Params, batch: Batch, inputs: Inputs, cfg: Config, kernels: Kernels, forward: Forward) -> Loss:
    """Return the mean negative log likelihood of the targets."""
    x_BTD = forward(p, batch.tokens_BT, inputs, cfg, kernels)
    return mean_nll(x_BTD, p["embed"], batch, kernels, cap=math.inf)


def clip_by_global_norm(most: float, layout: Layout) -> optax.GradientTransformation:
    """Scale all gradients so that their norm over all parameters and devices is at most `most`."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        sharded = {name: grad for name, grad in updates.items() if DATA in layout.specs[name]}
        repeated = {name: grad for name, grad in updates.items() if name not in sharded}
        own, rest = (optax.tree.norm(grads, squared=True) for grads in (sharded, repeated))
        scale = jnp.minimum(1, most * jax.lax.rsqrt(jax.lax.psum(own, DATA) + rest))
        return jax.tree.map(lambda grad: scale * grad, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


@dataclass(frozen=True, slots=True)
class AdamW:
    """Adam with clipped gradients and decoupled decay of matrices and tables.

    Learning rates are multiplied by the input `lr_scale`.
    """

    matrix_lr: Rate
    other_lr: Rate
    beta1: Momentum
    beta2: Momentum
    eps: Positive
    weight_decay: Rate  #: a step shrinks weights by the factor 1 - lr * lr_scale * weight_decay
    clip_norm: Positive

    def transform(self, layout: Layout) -> optax.GradientTransformationExtraArgs:
        """Return the transformation of packed parameters."""
        adam = in_float32(optax.scale_by_adam(self.beta1, self.beta2, self.eps))
        decayed = optax.chain(adam, optax.add_decayed_weights(self.weight_decay))
        matrix, other = optax.scale(-self.matrix_lr), optax.scale(-self.other_lr)
        groups = {
            "matrix": optax.chain(decayed, matrix),
            "head": optax.chain(decayed, other),
            "embed": optax.chain(decayed, other),
            "vector": optax.chain(adam, other),
        }
        clip = clip_by_global_norm(self.clip_norm, layout)
        return optax.chain(clip, by_group(groups, layout), scale_by_input("lr_scale"))


RECIPE = Recipe(
    name="gpt2",
    summary="12 layers, 124M parameters, 10.3B tokens: llm.c's GPT-2, record 1",
    parent=None,
    revision=1,
    config=Config(
        vocab_size=50257,
        max_positions=1024,
        num_layers=12,
        model_dim=768,
        num_heads=12,
        head_dim=64,
        mlp_dim=3072,
    ),
    table=table,
    forward=forward,
    logits=logits,
    loss=loss,
    optimizer=AdamW(
        matrix_lr=0.0006,
        other_lr=0.0006,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        clip_norm=1.0,
    ),
    schedule=Schedule(cooldown_fraction=1.0, cooldown="cosine", warmup_steps=700),
    stages=(Stage(num_steps=19_560, num_sequences=512, seq_len=1024),),
    eval_sequences=512,
    eval_seq_len=1024,
    compute_dtype="bfloat16",
    sizes=variants.SIZED,
    features=variants.FEATURES,
    expected=Expected("gpt2", "main-8xh100", 3.2722, None, 1, "modded-nanogpt, log of 2024-10-13"),
)
