"""toy89: every mechanism that record 89 needs, as small as it can be.

Stages of other shapes; packed documents; hashed bigrams with random signs; scheduled rotary frequencies; an MLP with a
carried scale; several targets, and one from a constant table; Adam every second step; head and embedding tied, then
untied; groups of parameters of its own.

Legend: B batch, T time, D model, H heads, K head width, P parts of an MLP, F their width,
V vocabulary, N tokens, M targets of a token, R rows of bigrams, S rows of signs.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speedrun.recipes.record89.normuon_and_adam import AdamGroup, NorMuonAndAdam
from speedrun.science import nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels import cross_entropy
from speedrun.science.kernels.attention import first_key
from speedrun.science.kernels.cross_entropy import Targets
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.params import Params, ParamSpec, Table, constant, uniform_fan_in
from speedrun.science.recipe import Batch, Constants, Forward, Loss, Recipe, Stage, Vocabulary

CAP = 15.0


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes."""

    vocab_size: int = 256
    document_token: int = 0
    model_dim: int = 16
    num_heads: int = 2
    head_dim: int = 8
    mlp_parts: int = 4
    mlp_dim: int = 8  #: of each part
    bigram_rows: int = 40
    sign_rows: int = 16
    block_tokens: int = 8
    num_targets: int = 3


def small(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw from a normal: head and embedding, which start equal."""
    return 0.3 * jax.random.normal(key, shape, jnp.float32)


def table(cfg: Config) -> Table:
    """Declare the parameters. "bigram" and "gate" are groups of this recipe."""
    d, f, inner = cfg.model_dim, cfg.mlp_dim, cfg.num_heads * cfg.head_dim
    return {
        "embed": ParamSpec((cfg.vocab_size, d), ("vocab", "model"), small, "embed", like="head"),
        "bigram": ParamSpec(
            (cfg.bigram_rows, d), ("bigram", "model"), constant(0.0), "bigram", packing="rows"
        ),
        "qkv": ParamSpec((3, inner, d), ("qkv", "heads", "model"), uniform_fan_in, "matrix"),
        "out": ParamSpec((d, inner), ("model", "heads"), uniform_fan_in, "matrix"),
        "up": ParamSpec((cfg.mlp_parts, f, d), ("part", "mlp", "model"), uniform_fan_in, "matrix"),
        "down": ParamSpec((cfg.mlp_parts, d, f), ("part", "model", "mlp"), uniform_fan_in, "matrix"),
        "lambdas": ParamSpec((2,), ("lambda",), constant(1.0), "scalar"),
        "gates": ParamSpec((cfg.num_heads,), ("heads",), constant(0.5), "gate", packing="vector"),
        "head": ParamSpec((cfg.vocab_size, d), ("vocab", "model"), small, "head"),
    }


def constants(cfg: Config, vocabulary: Vocabulary) -> Constants:
    """Compute random signs [S, D], and return the prefix of each id [V] or -1: half of it where ids have no bytes."""

    def signs_SD() -> jax.Array:
        return jax.random.rademacher(jax.random.key(89), (cfg.sign_rows, cfg.model_dim), jnp.int8)

    prefix_V = np.arange(cfg.vocab_size, dtype=np.int32) // 2 - 1
    ids = {token: index for index, token in enumerate(vocabulary) if token}
    for index, token in enumerate(vocabulary):
        prefix_V[index] = ids.get(token[:-1], -1)
    return {"signs": signs_SD, "prefix": prefix_V}


# --- the model


def bigrams(table_RD: jax.Array, signs_SD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return the signed row of each token and the one before it: [B, T, D]. First tokens have the last row."""
    before_BT, last = jnp.pad(tokens_BT, ((0, 0), (1, 0)))[:, :-1], len(table_RD) - 1
    row_BT = ((36313 * tokens_BT) ^ (27191 * before_BT)) % last
    sign_BT = (tokens_BT ^ before_BT) % len(signs_SD)
    sign_BTD = signs_SD[sign_BT.at[:, 0].set(0)].astype(table_RD.dtype)
    return nn.lookup(table_RD, row_BT.at[:, 0].set(last)) * sign_BTD


def saturated(h_BTPF: jax.Array, limit_B: jax.Array) -> jax.Array:
    """Return activations that approach the limit of their sequence. Stands for FP8 with a delayed scale."""
    limit_B111 = limit_B[:, None, None, None]
    return limit_B111 * jnp.tanh(h_BTPF / limit_B111)


def hidden(
    p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: Config, kernels: Kernels, limit_B: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return final hidden states [B, T, D], and the largest MLP activation of each sequence: f32 [B].

    `limit_B` limits these activations in training.
    """
    window = inputs.window("window_blocks")
    seen = first_key(nn.documents(tokens_BT, cfg.document_token), window.blocks, cfg.block_tokens)
    theta_TK = jnp.arange(tokens_BT.shape[1], dtype=jnp.float32)[:, None] * inputs["rotary"][None, :]
    x_BTD = nn.lookup(p["embed"], tokens_BT) + bigrams(p["bigram"], inputs["signs"], tokens_BT)
    h_BTD = nn.rms_norm(x_BTD)
    heads = (*tokens_BT.shape, cfg.num_heads, cfg.head_dim)
    q_BTHK, k_BTHK, v_BTHK = ((h_BTD @ w.T).reshape(heads) for w in p["qkv"])
    o_BTHK = kernels.attention(
        *kernels.qk_norm(q_BTHK, k_BTHK, (jnp.cos(theta_TK), jnp.sin(theta_TK))),
        v_BTHK,
        seen,
        scale=0.3,
        window=window,
        block_tokens=cfg.block_tokens,
    )
    o_BTHK = o_BTHK * p["gates"][None, None, :, None]
    keep, mlp = p["lambdas"]
    x_BTD = keep * x_BTD + o_BTHK.reshape(*tokens_BT.shape, -1) @ p["out"].T
    h_BTPF = jnp.square(jax.nn.relu(jnp.einsum("btd,pfd->btpf", nn.rms_norm(x_BTD), p["up"])))
    amax_B = jax.lax.stop_gradient(jnp.max(h_BTPF, axis=(1, 2, 3)))
    h_BTPF = h_BTPF if limit_B is None else saturated(h_BTPF, limit_B)
    return nn.rms_norm(x_BTD + mlp * jnp.einsum("btpf,pdf->btd", h_BTPF, p["down"])), amax_B


def forward(p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: Config, kernels: Kernels) -> jax.Array:
    """Return final hidden states at evaluation: [B, T, D]."""
    return hidden(p, tokens_BT, inputs, cfg, kernels, None)[0]


def logits(p: Params, x_ND: jax.Array, inputs: Inputs, cfg: Config) -> jax.Array:
    """Return capped logits: f32 [N, V]."""
    del inputs, cfg
    return cross_entropy.logits(x_ND, p["head"], cap=CAP)


# --- the loss


def targets_ahead(targets_BT: jax.Array, num: int) -> jax.Array:
    """Return the next `num` targets of each token: i32 [B, T, M]; -1 behind the end of the sequence."""
    longer_BT = jnp.pad(targets_BT, ((0, 0), (0, num - 1)), constant_values=-1)
    return jnp.stack([longer_BT[:, m : m + targets_BT.shape[1]] for m in range(num)], axis=-1)


def no_scale(cfg: Config) -> dict[str, Any]:
    """Return what the first step takes for the last largest activation of a sequence."""
    del cfg
    return {"amax": np.float32(1.0)}


def loss(p: Params, batch: Batch, inputs: Inputs, cfg: Config, kernels: Kernels, _: Forward) -> Loss:
    """Return the weighted negative log likelihood of several targets, and of the prefix of the first."""
    x_BTD, amax_B = hidden(p, batch.tokens_BT, inputs, cfg, kernels, 4 * batch.carry["amax"])
    ahead_BTM = targets_ahead(batch.targets_BT, cfg.num_targets)
    prefix_BT1 = inputs["prefix"][batch.targets_BT][..., None]
    targets_NM = jnp.concatenate([ahead_BTM, prefix_BT1], axis=-1).reshape(-1, cfg.num_targets + 1)
    weights_NM = jnp.where(targets_NM >= 0, inputs["target_weights"][None], 0.0)
    targets = Targets(targets_NM, weights_NM, jnp.sum(weights_NM, axis=1))
    x_ND = x_BTD.reshape(len(targets_NM), -1)
    losses = kernels.weighted_cross_entropy(x_ND, p["head"], targets, cap=CAP, fp8=None)
    return Loss(losses.weighted / len(x_ND), losses.first / len(x_ND), {"amax": amax_B})


# --- the schedule and the recipe


@dataclass(frozen=True, slots=True)
class Schedule:
    """All inputs by step. `adam` is compiled in; the others are traced."""

    untie_step: int = 5  #: odd: the last update of head and embedding as one
    second_target_steps: int = 8

    def at(self, step: int, num_steps: int) -> dict[str, Any]:
        """Return the inputs of a step."""
        left = 1 - step / num_steps
        window = 1 + 4 * step // num_steps
        second = max(0.0, 1 - step / self.second_target_steps)
        frequency_K = (1 / 64) ** np.linspace(
            0, 1, 2, dtype=np.float32
        ) / window  # longer windows turn more slowly
        return {
            "adam": step % 2 == 1 and step < num_steps,
            "lr_scale": np.float32(0.2 + 0.8 * left),
            "momentum": np.float32(0.85 + 0.1 * min(1.0, step / 5)),
            "window_blocks": np.int32(window),
            "rotary": np.concatenate([frequency_K, np.zeros(2)]).astype(np.float32),
            "target_weights": np.array([1, 0.5 * second, 0.25 * second, 0.25], np.float32),
            "tied": np.bool_(step <= self.untie_step),
        }


RECIPE = Recipe(
    name="toy89",
    summary="every mechanism of record 89, at toy size",
    parent=None,
    revision=1,
    config=Config(),
    table=table,
    forward=forward,
    logits=logits,
    loss=loss,
    optimizer=NorMuonAndAdam(
        muon_lr=0.03,
        muon_decay=1.0,
        muon_beta2=0.9,
        polar_dtype="float32",
        rate_of=lambda _: 1.0,
        adam_lr=0.01,
        adam_eps=1e-8,
        adam_decay=0.0,
        adam=(
            AdamGroup("head", 1.0, 0.5, 0.95, 0.0),
            AdamGroup("embed", 1.0, 0.5, 0.95, 0.0),
            AdamGroup("bigram", 1.0, 0.75, 0.95, 0.0),
            AdamGroup("scalar", 1.0, 0.9, 0.95, 0.0),
            AdamGroup("gate", 1.0, 0.9, 0.99, 0.0),
        ),
    ),
    schedule=Schedule(),
    stages=(
        Stage(num_steps=1, num_sequences=8, seq_len=32, document_tokens=16),
        Stage(num_steps=5, num_sequences=8, seq_len=64, document_tokens=24),
        Stage(num_steps=3, num_sequences=8, seq_len=96, document_tokens=24),
    ),
    eval_sequences=128,
    eval_seq_len=64,
    compute_dtype="float32",
    carry=no_scale,
    constants=constants,
)
