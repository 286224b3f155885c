"""unet: shortcuts with skips from the first half of the layers to the second, doubled rates, and a bfloat16 table.

Claim: none yet; not run at full size. Published: 7.2 minutes on 8xH100 and 3.2753 in 3,000 steps, as record 11 of
2024-11-10. The bfloat16 table and residual stream are record 10 (7.8 minutes).
Differs: scalars are float32, and rotary angles too (upstream rounded both); the momentum is a running mean.
Run: speedrun run --track main-8xh100 --recipe unet
Credits: modded-nanogpt, record 11 (@brendanh0gan, K. Jordan).

Legend: B batch, T time, D model, H heads, K head width.
"""

from dataclasses import replace

import jax

from speedrun.base.errors import UsageError
from speedrun.recipes import gpt2, modern, muon, shortcuts
from speedrun.science import nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.params import Params, ParamSpec, Table, constant
from speedrun.science.recipe import Expected, Stage


def table(cfg: shortcuts.Config) -> Table:
    """Declare the parameters of the model; raise UsageError for an odd number of layers."""
    if cfg.num_layers % 2:
        raise UsageError(f"config.num_layers is {cfg.num_layers}: the U-net needs an even number")
    skips = ParamSpec((cfg.num_layers // 2,), ("layer",), constant(1.0), "scalar")
    return shortcuts.table(cfg) | {"skips": skips}


def hidden(p: Params, tokens_BT: jax.Array, ctx: muon.Context, cfg: shortcuts.Config) -> jax.Array:
    """Return the normalised final hidden states: [B, T, D] in the compute dtype."""
    x_BTD = x0_BTD = nn.rms_norm(nn.lookup(p["embed"], tokens_BT))
    half, saved, first_BTHK = cfg.num_layers // 2, [], None
    for i in range(half):
        x_BTD, first_BTHK = shortcuts.block(x_BTD, x0_BTD, first_BTHK, p, f"block.{i}", ctx, cfg)
        saved.append(x_BTD)
    for i in range(half, cfg.num_layers):
        x_BTD += nn.weighted_sum((p["skips"][i - half], saved.pop()))
        x_BTD, first_BTHK = shortcuts.block(x_BTD, x0_BTD, first_BTHK, p, f"block.{i}", ctx, cfg)
    return nn.rms_norm(x_BTD)


def forward(p: Params, tokens_BT: jax.Array, _: Inputs, cfg: shortcuts.Config, kernels: Kernels) -> jax.Array:
    """Return the normalised final hidden states: [B, T, D] in the compute dtype."""
    attend = gpt2.attend_to_all(tokens_BT, cfg.head_dim, kernels)
    return hidden(p, tokens_BT, modern.context(tokens_BT, attend, cfg, kernels), cfg)


PARENT = shortcuts.RECIPE
SCHEDULE = replace(shortcuts.SCHEDULE, then=replace(shortcuts.SCHEDULE.then, cooldown_fraction=900 / 3000))
RECIPE = replace(
    PARENT,
    name="unet",
    summary="12 layers, 162M parameters, 1.6B tokens: U-net skips, record 11",
    parent="shortcuts",
    config=replace(PARENT.config, table_dtype="bfloat16"),
    table=table,
    forward=forward,
    optimizer=replace(PARENT.optimizer, muon_lr=0.04, embed_lr=0.6, head_lr=0.008, scalar_lr=0.04),
    schedule=SCHEDULE,
    stages=(Stage(num_steps=3000, num_sequences=512, seq_len=1024),),
    expected=Expected("unet", "main-8xh100", 3.2753, None, 1, "modded-nanogpt, record 11"),
)
