"""muon: gpt2 with Muon for the matrices, rotary, a constant learning rate with a linear end, and no biases.

Claim: none yet; not run at full size. Published: 22.3 minutes on 8xH100 and 3.2785 in 6,200 steps, as record 4 of
2024-10-11; record 3, with the first Muon, 24.9 minutes.
Differs: the residual stream is bfloat16 (upstream from record 10 on); the RMS norm has an epsilon of 1e-7, not 1e-6.
Run: speedrun run --track main-8xh100 --recipe muon
Credits: modded-nanogpt, record 4 (K. Jordan, J. Bernstein (@jxbz), @bozavlado); rotary from Su et al. 2021.

Legend: B batch, T time, D model, H heads, K head width, F mlp.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from speedrun.base.field_types import Count
from speedrun.recipes import gpt2
from speedrun.science import nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.optim.muon_and_adam import Adam, MuonAndAdam
from speedrun.science.optim.schedules import Schedule
from speedrun.science.params import Member, Params, ParamSpec, Table, uniform_within_fan_in
from speedrun.science.recipe import Expected, Stage


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes."""

    vocab_size: Count
    num_layers: Count
    model_dim: Count
    num_heads: Count
    head_dim: Count
    mlp_dim: Count


class Context(NamedTuple):
    """Functions that the attention of all layers shares."""

    attend: gpt2.Attend
    #: (q_BTHK, k_BTHK) -> both with positions
    turn: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def block_table(name: str, cfg: Config) -> Table:
    """Declare the matrices of a layer."""
    inner, init = cfg.num_heads * cfg.head_dim, uniform_within_fan_in
    return {
        f"{name}.qkv": ParamSpec((3, inner, cfg.model_dim), ("qkv", "heads", "model"), init, "matrix"),
        f"{name}.attn_out": ParamSpec((cfg.model_dim, inner), ("model", "heads"), init, "matrix"),
        f"{name}.mlp_up": ParamSpec((cfg.mlp_dim, cfg.model_dim), ("mlp", "model"), init, "matrix"),
        f"{name}.mlp_down": ParamSpec((cfg.model_dim, cfg.mlp_dim), ("model", "mlp"), init, "matrix"),
    }


def table(cfg: Config) -> Table:
    """Declare the parameters of the model. The token table is also the head, and starts as a head would."""
    rows = cfg.vocab_size, cfg.model_dim
    specs = {"embed": ParamSpec(rows, ("vocab", "model"), uniform_within_fan_in, "head")}
    for i in range(cfg.num_layers):
        specs |= block_table(f"block.{i}", cfg)
    return specs


def rotary_angles(num_positions: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines [T, K/2] of rotary: f_i = 10000^(-2 i / K)."""
    f_K = 10_000.0 ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    theta_TK = jnp.arange(num_positions, dtype=jnp.float32)[:, None] * f_K[None, :]
    return jnp.cos(theta_TK), jnp.sin(theta_TK)


def heads(h_BTD: jax.Array, p: Params, block: str, cfg: Config) -> tuple[jax.Array, ...]:
    """Return queries, keys and values: each [B, T, H, K]."""
    shape = (*h_BTD.shape[:2], cfg.num_heads, cfg.head_dim)
    return tuple((h_BTD @ w.T).reshape(shape) for w in p[f"{block}.qkv"])


def project(o_BTHK: jax.Array, p: Params, block: str) -> jax.Array:
    """Project the outputs of all heads into the residual stream: [B, T, D]."""
    return o_BTHK.reshape(*o_BTHK.shape[:2], -1) @ p[f"{block}.attn_out"].T


def attention(h_BTD: jax.Array, p: Params, block: str, ctx: Context, cfg: Config) -> jax.Array:
    """Apply attention."""
    q_BTHK, k_BTHK, v_BTHK = heads(h_BTD, p, block, cfg)
    return project(ctx.attend(*ctx.turn(q_BTHK, k_BTHK), v_BTHK), p, block)


def forward(p: Params, tokens_BT: jax.Array, _: Inputs, cfg: Config, kernels: Kernels) -> jax.Array:
    """Return the normalised final hidden states: [B, T, D] in the compute dtype."""
    angles = rotary_angles(tokens_BT.shape[1], cfg.head_dim)
    attend = gpt2.attend_to_all(tokens_BT, cfg.head_dim, kernels)
    ctx = Context(attend, lambda q_BTHK, k_BTHK: (nn.rotary(q_BTHK, angles), nn.rotary(k_BTHK, angles)))
    x_BTD = nn.lookup(p["embed"], tokens_BT)
    for block in (f"block.{i}" for i in range(cfg.num_layers)):
        x_BTD += attention(nn.rms_norm(x_BTD), p, block, ctx, cfg) / math.sqrt(2 * cfg.num_layers)
        h_BTF = nn.gelu(nn.rms_norm(x_BTD) @ p[f"{block}.mlp_up"].T)
        x_BTD += h_BTF @ p[f"{block}.mlp_down"].T
    return nn.rms_norm(x_BTD)


def longer_side_root(matrix: Member) -> float:
    """Return the scale at which the entries of an orthogonal matrix have a mean square of one."""
    return math.sqrt(max(matrix.rows, matrix.cols))


RECIPE = replace(
    gpt2.RECIPE,
    name="muon",
    summary="12 layers, 124M parameters, 3.3B tokens: Muon and rotary, record 4",
    parent="gpt2",
    config=Config(
        vocab_size=50257,
        num_layers=12,
        model_dim=768,
        num_heads=12,
        head_dim=64,
        mlp_dim=3072,
    ),
    table=table,
    forward=forward,
    optimizer=MuonAndAdam(
        muon_lr=0.00036,
        muon_steps=5,
        muon_dtype="bfloat16",
        head_lr=0.0036,
        adam=Adam(beta1=0.9, beta2=0.95, eps=1e-8),
        factor_of=longer_side_root,
    ),
    schedule=Schedule(cooldown_fraction=1800 / 6200, momentum_start=0.95, momentum_end=0.95),
    stages=(Stage(num_steps=6200, num_sequences=512, seq_len=1024),),
    expected=Expected("muon", "main-8xh100", 3.2785, None, 1, "modded-nanogpt, record 4"),
)
