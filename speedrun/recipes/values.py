"""values: windows with three value embeddings, windows of blocks, half of the rotary, and no attention in layer 7.

Claim: none yet; not run at full size. Published: 3.57 minutes on 8xH100 and 3.2794 (1,261 runs) in 1,490 steps, as
record 17 of 2024-12-17; records 14 to 16, with other forms of the value embeddings, 4.41, 3.95 and 3.80 minutes.
Differs: scalars are float32 (upstream bfloat16).
Run: speedrun run --track main-8xh100 --recipe values
Credits: modded-nanogpt, records 14 (@KoszarskyB), 15 (@leloykun, @YouJiacheng), 16 and 17 (@YouJiacheng).

Legend: B batch, T time, D model, H heads, K head width.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from speedrun.recipes import gpt2, modern, muon, unet, windows
from speedrun.science import nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.params import Params, ParamSpec, Table, constant, normal
from speedrun.science.recipe import Expected, Stage

AttentionKind = Literal["window", "none"]

#: Stands for "no value embedding" in `Config.value_tables`.
NO_TABLE = -1


@dataclass(frozen=True, slots=True)
class Config(windows.Config):
    """Sizes, and tuples with one entry per layer."""

    attention_kinds: tuple[AttentionKind, ...]  #: attention of each layer, or none
    value_tables: tuple[int, ...]  #: value embedding of each layer; NO_TABLE for none

    def __post_init__(self) -> None:
        windows.Config.__post_init__(self)
        for name, entries in (("attention_kinds", self.attention_kinds), ("value_tables", self.value_tables)):
            if len(entries) != self.num_layers:
                raise ValueError(f"{name} has {len(entries)} entries; need num_layers, {self.num_layers}")
        tables = self.value_tables
        if min(tables, default=NO_TABLE) < NO_TABLE:
            raise ValueError(f"value_tables is {tables}; number tables from 0, {NO_TABLE} for none")

    @property
    def used_tables(self) -> list[int]:
        """Indices of value embeddings that some layer adds."""
        return sorted({*self.value_tables} - {NO_TABLE})


def table(cfg: Config) -> Table:
    """Declare the parameters of the model. Tables that are only looked up have no padding rows."""
    inner = cfg.num_heads * cfg.head_dim

    def rows(axis: str, width: int) -> ParamSpec:
        return ParamSpec((cfg.vocab_size, width), ("vocab", axis), normal, "embed", cfg.table_dtype)

    lambdas = ParamSpec((2,), ("lambda",), constant(0.5, 0.5), "scalar")
    specs = {
        **unet.table(cfg),
        "embed": rows("model", cfg.model_dim),
        **{f"value_embed.{i}": rows("heads", inner) for i in cfg.used_tables},
        **{f"block.{i}.value_lambdas": lambdas for i in range(cfg.num_layers)},
    }
    gone = {f"block.{i}.value_lambda" for i in range(cfg.num_layers)}
    for i, kind in enumerate(cfg.attention_kinds):
        if kind == "none":
            gone |= {f"block.{i}.{part}" for part in ("qkv", "attn_out", "value_lambdas")}
    return {name: spec for name, spec in specs.items() if name not in gone}


def attention(
    h_BTD: jax.Array, values: dict[int, jax.Array], p: Params, i: int, ctx: muon.Context, cfg: Config
) -> jax.Array:
    """Apply attention of layer `i` to a weighted sum of its own values and its value embedding."""
    if cfg.attention_kinds[i] == "none":
        return jnp.zeros_like(h_BTD)
    q_BTHK, k_BTHK, v_BTHK = muon.heads(h_BTD, p, f"block.{i}", cfg)
    own, shared = p[f"block.{i}.value_lambdas"]
    v_BTHK = nn.weighted_sum((own, v_BTHK), (shared, values[cfg.value_tables[i]]))
    return muon.project(ctx.attend(*ctx.turn(q_BTHK, k_BTHK), v_BTHK), p, f"block.{i}")


def forward(p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: Config, kernels: Kernels) -> jax.Array:
    """Return the normalised final hidden states: [B, T, D] in the compute dtype.

    The input `window_blocks` is the number of blocks that each token sees, including its own.
    """
    doc_BT, window = nn.documents(tokens_BT, cfg.document_token), inputs.window("window_blocks")
    attend = gpt2.attend_in(doc_BT, window, cfg.block_tokens, cfg.head_dim, kernels)
    angles = nn.rotary_angles(
        tokens_BT.shape[1], cfg.head_dim
    )  # half of the frequencies are zero (record 17)
    ctx = muon.Context(attend, partial(kernels.qk_norm, angles=angles))
    heads = (*tokens_BT.shape, cfg.num_heads, cfg.head_dim)
    values = {i: nn.lookup(p[f"value_embed.{i}"], tokens_BT).reshape(heads) for i in cfg.used_tables}
    values[NO_TABLE] = jnp.zeros((), p["embed"].dtype)
    x_BTD = x0_BTD = nn.rms_norm(nn.lookup(p["embed"], tokens_BT))
    half, saved = cfg.num_layers // 2, []
    for i in range(cfg.num_layers):
        if i >= half:
            x_BTD += nn.weighted_sum((p["skips"][i - half], saved.pop()))
        keep, shortcut = p[f"block.{i}.lambdas"]
        x_BTD = nn.weighted_sum((keep, x_BTD), (shortcut, x0_BTD))
        x_BTD += attention(nn.rms_norm(x_BTD), values, p, i, ctx, cfg)
        x_BTD += modern.mlp(x_BTD, p, f"block.{i}")
        if i < half:
            saved.append(x_BTD)
    return nn.rms_norm(x_BTD)


PARENT = windows.RECIPE
THEN = replace(windows.SCHEDULE.then, cooldown_fraction=600 / 1490, final_window=14.5)
RECIPE = replace(
    PARENT,
    name="values",
    summary="12 layers, 276M parameters, 0.8B tokens: value embeddings, record 17",
    parent="windows",
    config=Config(
        **asdict(replace(PARENT.config, block_tokens=128)),
        attention_kinds=(
            *("window", "window", "window", "window", "window", "window"),
            *("window", "none", "window", "window", "window", "window"),
        ),
        value_tables=(0, 1, 2, *(NO_TABLE,) * 6, 0, 1, 2),
    ),
    table=table,
    forward=forward,
    schedule=replace(windows.SCHEDULE, then=THEN),
    stages=(Stage(num_steps=1490, num_sequences=8, seq_len=65536),),
    expected=Expected("values", "main-8xh100", 3.2794, None, 1261, "modded-nanogpt, record 17"),
)
