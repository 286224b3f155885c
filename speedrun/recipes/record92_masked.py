"""record92_masked: record 92, with record 91's mask when it is scored.

Scored logits are masked: a token that GPT-2's tokenizer never emits after the one before has probability zero. Training
is that of record92. In the record's README, state the loss without the mask (RULES.md, Masks).

Claim: none yet. Record 91 claims 0.0017 nats less than without the mask, for equal weights of its own model.
Run: speedrun run --track main-8xh100 --recipe record92_masked
Credits: modded-nanogpt, record 91.
"""

from dataclasses import replace
from typing import Any

import jax

from speedrun.base.bpe_pairs import IMPOSSIBLE_PAIRS
from speedrun.recipes.record92 import RECIPE as RECORD92
from speedrun.recipes.record92.parameters import Config
from speedrun.science import masks
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.params import Params
from speedrun.science.recipe import Batch, Constants, Forward, Loss, Vocabulary


def constants(cfg: Config, vocabulary: Vocabulary) -> Constants:
    """Return record 92's constants, and the mask, which the harness derives."""
    return {**RECORD92.constants(cfg, vocabulary), "impossible": IMPOSSIBLE_PAIRS}


def forward(p: Params, tokens_BT: jax.Array, inputs: Inputs, cfg: Config, kernels: Kernels) -> jax.Array:
    """Return the final hidden states, and beside them the ids, for the mask: [B, T, D + 2]."""
    return masks.with_ids(RECORD92.forward(p, tokens_BT, inputs, cfg, kernels), tokens_BT)


def logits(p: Params, x_NE: jax.Array, inputs: Inputs, cfg: Config) -> jax.Array:
    """Return the capped logits, -inf for impossible pairs: f32 [N, V]."""
    x_ND, ids_N = masks.split_ids(x_NE)
    return masks.possible(RECORD92.logits(p, x_ND, inputs, cfg), ids_N, inputs, "impossible")


def loss(p: Params, batch: Batch, inputs: Inputs, cfg: Config, kernels: Kernels, forward: Forward) -> Loss:
    """Return record 92's loss, which knows no mask."""

    def states(*given: Any) -> jax.Array:
        return forward(*given)[..., : cfg.model_dim]

    return RECORD92.loss(p, batch, inputs, cfg, kernels, states)


RECIPE = replace(
    RECORD92,
    name="record92_masked",
    summary="record 92, scored with record 91's mask of impossible pairs of tokens",
    parent="record92",
    constants=constants,
    forward=forward,
    logits=logits,
    loss=loss,
)
