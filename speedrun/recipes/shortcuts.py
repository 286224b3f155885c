"""shortcuts: modern with shortcuts of embedding and values to every layer, capped logits, and a momentum warm-up.

Claim: none yet; not run at full size. Published: 8.2 minutes on 8xH100 and 3.2791 in 3,200 steps, as record 9 of
2024-11-06.
Differs: as modern; and the momentum is a running mean, so old gradients weigh a little more while the momentum rises.
Run: speedrun run --track main-8xh100 --recipe shortcuts
Credits: modded-nanogpt, record 9 (@Grad62304977, K. Jordan); value residuals from Zhou et al. 2024.

Legend: B batch, T time, D model, H heads, K head width, N tokens, V vocabulary.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np

from speedrun.base.field_types import Count, Momentum
from speedrun.recipes import gpt2, modern, muon
from speedrun.science import nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels import cross_entropy
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.params import Params, ParamSpec, Table, constant
from speedrun.science.recipe import Batch, Expected, Forward, Loss, Stage


@dataclass(frozen=True, slots=True)
class Config(modern.Config):
    """Sizes."""

    logit_cap: float

    def __post_init__(self) -> None:
        modern.Config.__post_init__(self)
        cap, most = self.logit_cap, cross_entropy.MAX_CAP
        if not 0 < cap <= most:
            raise ValueError(f"logit_cap is {cap:g}; need more than 0, at most {most:g}")


def table(cfg: Config) -> Table:
    """Declare the parameters of the model."""
    shortcuts: Table = {}
    for block in (f"block.{i}" for i in range(cfg.num_layers)):
        shortcuts[f"{block}.lambdas"] = ParamSpec((2,), ("lambda",), constant(1.0, 0.0), "scalar")
        shortcuts[f"{block}.value_lambda"] = ParamSpec((1,), ("lambda",), constant(0.5), "scalar")
    return modern.table(cfg) | shortcuts


def block(
    x_BTD: jax.Array,
    x0_BTD: jax.Array,
    first_BTHK: jax.Array | None,
    p: Params,
    name: str,
    ctx: muon.Context,
    cfg: Config,
) -> tuple[jax.Array, jax.Array]:
    """Apply a layer; return the residual stream and the values of the first layer."""
    keep, shortcut = p[f"{name}.lambdas"]
    x_BTD = nn.weighted_sum((keep, x_BTD), (shortcut, x0_BTD))
    q_BTHK, k_BTHK, v_BTHK = muon.heads(nn.rms_norm(x_BTD), p, name, cfg)
    first_BTHK = v_BTHK if first_BTHK is None else first_BTHK
    (share,) = p[f"{name}.value_lambda"]
    v_BTHK = nn.weighted_sum((1 - share, v_BTHK), (share, first_BTHK))
    x_BTD += muon.project(ctx.attend(*ctx.turn(q_BTHK, k_BTHK), v_BTHK), p, name)
    return x_BTD + modern.mlp(x_BTD, p, name), first_BTHK


def forward(p: Params, tokens_BT: jax.Array, _: Inputs, cfg: Config, kernels: Kernels) -> jax.Array:
    """Return the normalised final hidden states: [B, T, D] in the compute dtype."""
    ctx = modern.context(tokens_BT, gpt2.attend_to_all(tokens_BT, cfg.head_dim, kernels), cfg, kernels)
    x_BTD = x0_BTD = nn.rms_norm(nn.lookup(p["embed"], tokens_BT))
    first_BTHK = None
    for i in range(cfg.num_layers):
        x_BTD, first_BTHK = block(x_BTD, x0_BTD, first_BTHK, p, f"block.{i}", ctx, cfg)
    return nn.rms_norm(x_BTD)


def logits(p: Params, x_ND: jax.Array, _: Inputs, cfg: Config) -> jax.Array:
    """Return the capped logits of final hidden states: f32 [N, V]."""
    return cross_entropy.logits(x_ND, p["head"], cap=cfg.logit_cap)


def loss(p: Params, batch: Batch, inputs: Inputs, cfg: Config, kernels: Kernels, forward: Forward) -> Loss:
    """Return the mean negative log likelihood of the targets."""
    x_BTD = forward(p, batch.tokens_BT, inputs, cfg, kernels)
    return gpt2.mean_nll(x_BTD, p["head"], batch, kernels, cap=cfg.logit_cap)


PARENT = modern.RECIPE


@dataclass(frozen=True, slots=True)
class MomentumWarmup:
    """Another schedule with a linear warm-up of the momentum."""

    then: Any  #: the other schedule
    first_momentum: Momentum
    warmup_steps: Count

    def at(self, step: int, num_steps: int) -> dict[str, Any]:
        """Return the inputs of step `step` (from 0) of `num_steps`."""
        inputs, warm = self.then.at(step, num_steps), min(1.0, step / self.warmup_steps)
        momentum = self.first_momentum + (inputs["momentum"] - self.first_momentum) * warm
        return inputs | {"momentum": np.float32(momentum)}


SCHEDULE = MomentumWarmup(
    then=replace(PARENT.schedule, cooldown_fraction=914 / 3200), first_momentum=0.85, warmup_steps=500
)
RECIPE = replace(
    PARENT,
    name="shortcuts",
    summary="12 layers, 162M parameters, 1.7B tokens: shortcuts and capped logits, record 9",
    parent="modern",
    config=Config(**asdict(PARENT.config), logit_cap=30.0),
    table=table,
    forward=forward,
    logits=logits,
    loss=loss,
    optimizer=replace(PARENT.optimizer, scalar_lr=0.02),
    schedule=SCHEDULE,
    stages=(Stage(num_steps=3200, num_sequences=512, seq_len=1024),),
    expected=Expected("shortcuts", "main-8xh100", 3.2791, None, 1, "modded-nanogpt, record 9"),
)
