"""The model of record 11: each layer of the second half adds the output of its mirror layer in the first half.

Legend: B batch, T time, D model, H heads, K head width.
Source: modded-nanogpt, record 11 (@brendanh0gan).
"""

import jax

from speedrun.base.errors import UsageError
from speedrun.science import nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.choose import Kernels
from speedrun.science.models import gpt2, modern, muon, shortcuts
from speedrun.science.params import Params, ParamSpec, Table, constant


def table(cfg: shortcuts.Config) -> Table:
    """Declare the parameters of the model.

    Raises:
        UsageError: for an odd number of layers.
    """
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
        x_BTD += nn.blend((p["skips"][i - half], saved.pop()))
        x_BTD, first_BTHK = shortcuts.block(x_BTD, x0_BTD, first_BTHK, p, f"block.{i}", ctx, cfg)
    return nn.rms_norm(x_BTD)


def forward(
    p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: shortcuts.Config, kernels: Kernels
) -> jax.Array:
    """Return the normalised final hidden states: [B, T, D] in the compute dtype."""
    del inputs
    attend = gpt2.attend_to_all(tokens_BT, cfg.head_dim, kernels)
    return hidden(p, tokens_BT, modern.context(tokens_BT, attend, cfg, kernels), cfg)
