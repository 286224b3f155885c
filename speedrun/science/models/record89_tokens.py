"""Hashed token pairs, targets and constants of record 89.

Legend: B batch, T time, D model, V vocabulary, S rows of signs, M targets of a token, N tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np

from speedrun.base.errors import UsageError
from speedrun.science import nn
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.cross_entropy import Targets
from speedrun.science.models.record89_table import Config
from speedrun.science.params import Params
from speedrun.science.recipe import Constants, Vocabulary

BIGRAM_ID, BIGRAM_PREVIOUS = 36313, 27191  #: factors of the hash of token pairs


def previous(x_BT: jax.Array) -> jax.Array:
    """Return the entry of the previous token, zero for the first: [B, T, ...]."""
    return jnp.pad(x_BT, ((0, 0), (1, 0), *((0, 0),) * (x_BT.ndim - 2)))[:, :-1]


def bigram_rows(tokens_BT: jax.Array, rows: int) -> jax.Array:
    """Return the row of each token pair: ((a id) xor (b previous id)) mod (rows - 1), i32 [B, T].

    The first token has the last row. For the second, the first counts as id rows - 1, a quirk of record 62
    (@classiclarryd).
    """
    before_BT = previous(tokens_BT.at[:, 0].set(rows - 1))
    hashed_BT = ((BIGRAM_ID * tokens_BT) ^ (BIGRAM_PREVIOUS * before_BT)) % (rows - 1)
    return hashed_BT.at[:, 0].set(rows - 1)


def bigrams(p: Params, tokens_BT: jax.Array, signs_SD: jax.Array) -> jax.Array:
    """Return the vectors of token pairs: [B, T, D]. Records 62 and 83.

    They are multiplied by random signs of a second hash, as pairs that share a row rarely share signs.
    """
    row_BT = bigram_rows(tokens_BT, len(p["bigram_embed"]))
    sign_BT = ((previous(tokens_BT) ^ tokens_BT) % len(signs_SD)).at[:, 0].set(0)
    vector_BTD = lookup_of_few(p["bigram_embed"], row_BT)
    return vector_BTD * signs_SD[sign_BT].astype(vector_BTD.dtype)


def lookup_of_few(table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """Look up ids in a table with many more rows: gradients are summed in float32 only for rows that occur."""
    num_rows, ids_N = len(table_VD), ids_BT.reshape(-1)
    t_N = jnp.arange(len(ids_N))
    last_N = jnp.zeros(num_rows, jnp.int32).at[ids_N].max(t_N)[ids_N]  # last token with the same id
    row_N = jnp.where(last_N == t_N, ids_N, num_rows + t_N)  # the others have no row
    rows_ND = table_VD.at[row_N].get(mode="fill", fill_value=0, unique_indices=True)
    return nn.lookup(rows_ND, last_N.reshape(ids_BT.shape))


def targets_of(targets_BT: jax.Array, inputs: Inputs) -> Targets:
    """Return the targets of each token: the next tokens of its sequence, and the prefix of the first of them.

    `softmax_N` also counts targets beyond the end of a sequence, so the gradient is not the derivative there.
    Records 53 and 88.
    """
    num_ahead, (rows, num_tokens) = inputs["targets"], targets_BT.shape
    longer_BT = jnp.pad(targets_BT, ((0, 0), (0, num_ahead - 1)), constant_values=-1)
    ids = [longer_BT[:, m : m + num_tokens].reshape(-1) for m in range(num_ahead)]
    ahead_M = inputs["target_weights"][:num_ahead]
    weights = [jnp.where(ids_N >= 0, weight, 0.0) for ids_N, weight in zip(ids, ahead_M, strict=True)]
    softmax_N = jnp.broadcast_to(jnp.sum(ahead_M), (rows * num_tokens,))
    if inputs["has_prefix"]:
        if "prefixes" not in inputs.values:
            raise UsageError(
                "the schedule weighs prefixes, and this data has no bytes of its ids; set prefix_weight and "
                "end_prefix_weight of all phases to 0: --set schedule.phases.0.prefix_weight=0"
            )
        ids.append(inputs["prefixes"][ids[0]])
        weights.append(jnp.where(ids[-1] >= 0, inputs["prefix_weight"], 0.0))
        softmax_N += weights[-1]
    return Targets(jnp.stack(ids, axis=1), jnp.stack(weights, axis=1), softmax_N)


def constants(cfg: Config, vocabulary: Vocabulary) -> Constants:
    """Return `bigram_signs`, i8 [S, D], the same in all runs; and `prefixes`, i32 [V], if ids have bytes."""

    def signs_SD() -> jax.Array:
        return jax.random.rademacher(jax.random.key(89), (cfg.sign_rows, cfg.model_dim), jnp.int8)

    if not vocabulary:
        return {"bigram_signs": signs_SD}
    rest = np.full(cfg.vocab_size - len(vocabulary), -1, np.int32)
    return {"bigram_signs": signs_SD, "prefixes": np.concatenate([prefixes(vocabulary), rest])}


def prefixes(vocabulary: tuple[bytes, ...]) -> np.ndarray:
    """Return the id of the longest proper prefix of each id's bytes, or -1: i32 [V]."""
    ids = {token: index for index, token in enumerate(vocabulary) if token}

    def longest(token: bytes) -> int:
        shorter = (token[:length] for length in range(len(token) - 1, 0, -1))
        return next((ids[part] for part in shorter if part in ids), -1)

    return np.array([longest(token) for token in vocabulary], np.int32)
