"""modern: muon with QK-norm, squared ReLU, projections that start at zero, six heads, and an untied, padded head.

Claim: none yet; not run at full size. Published: 10.8 minutes on 8xH100 and 3.2762 in 4,578 steps, as record 8 of
2024-11-03. Records 6 and 7 made record 5 faster (15.2 to 12.0 minutes) without changing it.
Differs: the residual stream is bfloat16 (upstream from record 10 on), rotary angles float32 (upstream rounded them).
Run: speedrun run --track main-8xh100 --recipe modern
Credits: modded-nanogpt, records 5 to 8 (K. Jordan, @Grad62304977).

Legend: B batch, T time, D model, N tokens, V vocabulary.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import partial

import jax

from speedrun.base.field_types import Count
from speedrun.recipes import gpt2, muon
from speedrun.science import nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels import cross_entropy
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.kernels.mlp import mlp as squared_relu_mlp
from speedrun.science.optim.orthogonal import shape_factor
from speedrun.science.params import Dtype, Params, ParamSpec, Table, normal, zeros
from speedrun.science.recipe import Batch, Expected, Forward, Loss, Stage


@dataclass(frozen=True, slots=True)
class Config(muon.Config):
    """Sizes."""

    padded_vocab_size: Count  #: rows of table and head; those beyond vocab_size are never targets
    table_dtype: Dtype  #: of the stored token table and its moments

    def __post_init__(self) -> None:
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size is {self.padded_vocab_size}; need {self.vocab_size} or more")


def table(cfg: Config) -> Table:
    """Declare the parameters. The head and projections into the residual stream start at zero."""
    matrices = {name: spec for name, spec in muon.table(cfg).items() if spec.group == "matrix"}
    outputs = [name for name in matrices if name.endswith(("_out", "_down"))]
    matrices |= {name: replace(matrices[name], init=zeros) for name in outputs}
    rows, axes = (cfg.padded_vocab_size, cfg.model_dim), ("vocab", "model")
    return {
        "embed": ParamSpec(rows, axes, normal, "embed", cfg.table_dtype),
        **matrices,
        "head": ParamSpec(rows, axes, zeros, "head"),
    }


def context(tokens_BT: jax.Array, attend: gpt2.Attend, cfg: Config, kernels: Kernels) -> muon.Context:
    """Return functions of attention with QK-norm before rotary."""
    angles = muon.rotary_angles(tokens_BT.shape[1], cfg.head_dim)
    return muon.Context(attend, partial(kernels.qk_norm, angles=angles))


def forward(p: Params, tokens_BT: jax.Array, _: Inputs, cfg: Config, kernels: Kernels) -> jax.Array:
    """Return the normalised final hidden states: [B, T, D] in the compute dtype."""
    ctx = context(tokens_BT, gpt2.attend_to_all(tokens_BT, cfg.head_dim, kernels), cfg, kernels)
    x_BTD = nn.rms_norm(nn.lookup(p["embed"], tokens_BT))
    for block in (f"block.{i}" for i in range(cfg.num_layers)):
        x_BTD += muon.attention(nn.rms_norm(x_BTD), p, block, ctx, cfg)
        x_BTD += mlp(x_BTD, p, block)
    return nn.rms_norm(x_BTD)


def mlp(x_BTD: jax.Array, p: Params, block: str) -> jax.Array:
    """Apply the MLP to the normalised residual stream."""
    return squared_relu_mlp(nn.rms_norm(x_BTD), p[f"{block}.mlp_up"], p[f"{block}.mlp_down"])


def logits(p: Params, x_ND: jax.Array, _: Inputs, __: Config) -> jax.Array:
    """Return the logits of final hidden states: f32 [N, V]."""
    return cross_entropy.logits(x_ND, p["head"], cap=math.inf)


def loss(p: Params, batch: Batch, inputs: Inputs, cfg: Config, kernels: Kernels, forward: Forward) -> Loss:
    """Return the mean negative log likelihood of the targets."""
    x_BTD = forward(p, batch.tokens_BT, inputs, cfg, kernels)
    return gpt2.mean_nll(x_BTD, p["head"], batch, kernels, cap=math.inf)


PARENT = muon.RECIPE
RECIPE = replace(
    PARENT,
    name="modern",
    summary="12 layers, 162M parameters, 2.4B tokens: the architecture of record 8",
    parent="muon",
    config=Config(
        **asdict(replace(PARENT.config, num_heads=6, head_dim=128)),
        padded_vocab_size=50304,
        table_dtype="float32",
    ),
    table=table,
    forward=forward,
    logits=logits,
    loss=loss,
    optimizer=replace(PARENT.optimizer, muon_lr=0.02, embed_lr=0.3, head_lr=0.002, factor_of=shape_factor),
    schedule=replace(PARENT.schedule, cooldown_fraction=1308 / 4578),
    stages=(Stage(num_steps=4578, num_sequences=512, seq_len=1024),),
    expected=Expected("modern", "main-8xh100", 3.2762, None, 1, "modded-nanogpt, record 8"),
)
