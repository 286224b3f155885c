"""copying: docs with a head that points to earlier tokens of the document, and copies what followed them.

Claim: 3.61 nats per token, 0.85 less than without copies (0.83 to 0.86, six pairs of seeds, 2026-11-29).
Run: speedrun run --track docs-cpu --recipe copying
Credits: modded-nanogpt #379 (36.0 s with record 92; open). Its gate is a spare column of the head, as here.

Legend: B batch, T time, D model, E what travels, K width, N tokens, V columns of the head.
"""

from dataclasses import asdict, dataclass, replace

import jax
import jax.numpy as jnp

from speedrun.base.field_types import Count, Natural, Positive
from speedrun.recipes import docs
from speedrun.science import copying, nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.models import record21_model as record21
from speedrun.science.params import Params, ParamSpec, Table, constant, uniform_fan_in
from speedrun.science.recipe import Batch, Expected, Forward, Loss

#: Share of the copies: in bfloat16, weights whose sum is 1 may have a larger one.
MOST = 0.99


@dataclass(frozen=True, slots=True)
class Config(record21.Config):
    """Record 21's sizes, and those of the pointer.

    The last column of the head is the gate. It counts in the softmax, as all columns that are never targets.
    """

    copy_dim: Count  #: width of the pointer's queries and keys
    copy_scale: Positive  #: of products of normalised queries and keys
    num_copies: Natural  #: most tokens that are copied

    def __post_init__(self) -> None:
        record21.Config.__post_init__(self)
        if self.padded_vocab_size == self.vocab_size:
            raise ValueError("padded_vocab_size is vocab_size; need a column for the gate")


def table(cfg: Config) -> Table:
    """Declare record 21's parameters, and those of the pointer: 2 D K + 2."""
    qk = ParamSpec((2, cfg.copy_dim, cfg.model_dim), ("qk", "copy", "model"), uniform_fan_in, "matrix")
    return record21.table(cfg) | {
        "copy.qk": qk,
        "copy.bias": ParamSpec((2,), ("bias",), constant(4.0, -2.0), "scalar"),
    }


def forward(p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: Config, kernels: Kernels) -> jax.Array:
    """Return the normalised final hidden states, and copies beside them: [B, T, E]."""
    x_BTD = record21.forward(p, tokens_BT, inputs, cfg, kernels)
    q_BTK, k_BTK = (nn.rms_norm(x_BTD @ w_KD.T) for w_KD in p["copy.qk"])
    sink, bias = p["copy.bias"]
    gate_BT = MOST * jax.nn.sigmoid((x_BTD @ p["head"][-1]).astype(jnp.float32) + bias)
    where = tokens_BT, nn.documents(tokens_BT, cfg.document_token)
    found = copying.pointed(cfg.copy_scale * q_BTK, k_BTK, *where, sink, gate_BT, cfg.num_copies)
    return copying.beside(x_BTD, found)


def logits(p: Params, x_NE: jax.Array, inputs: Inputs, cfg: Config) -> jax.Array:
    """Return the logarithm of the mixture: f32 [N, V]."""
    x_ND, copies = copying.apart(x_NE, cfg.model_dim)
    return copying.mixed(record21.logits(p, x_ND, inputs, cfg), copies)


def loss(p: Params, batch: Batch, inputs: Inputs, cfg: Config, kernels: Kernels, forward: Forward) -> Loss:
    """Return the mean negative log likelihood of the targets under the mixture."""
    x_NE = forward(p, batch.tokens_BT, inputs, cfg, kernels).reshape(batch.targets_BT.size, -1)
    x_ND, copies = copying.apart(x_NE, cfg.model_dim)
    logits_NV = record21.logits(p, x_ND, inputs, cfg)
    nll = jnp.mean(copying.nll(logits_NV, copies, batch.targets_BT.reshape(-1)))
    return Loss(nll, nll)


RECIPE = replace(
    docs.RECIPE,
    name="copying",
    summary="docs with a head that copies what followed in similar places",
    parent="docs",
    revision=1,
    config=Config(
        **asdict(replace(docs.RECIPE.config, padded_vocab_size=4104)),
        copy_dim=64,
        copy_scale=0.2,
        num_copies=32,
    ),
    table=table,
    forward=forward,
    logits=logits,
    loss=loss,
    features={**docs.RECIPE.features, "copying": {"config.num_copies": 0}},
    expected=Expected("copying", "docs-cpu", 3.616, 0.009, 6, "one device, docs/LOG.md"),
)
