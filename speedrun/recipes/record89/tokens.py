"""Hashed token pairs, targets and prefixes of record 89.

Legend: B batch, T time, D model, V vocabulary, S rows of signs, M targets of a token, N tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np

from speedrun.base.errors import UsageError
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.cross_entropy import Targets
from speedrun.science.params import Params

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
    sign_BT = ((previous(tokens_BT) ^ tokens_BT) % len(signs_SD)).at[:, 0].set(0)
    return p["bigram_embed"] * signs_SD[sign_BT].astype(p["bigram_embed"].dtype)


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
                "the schedule weighs prefixes, and this data has no bytes of its ids; set those weights of all "
                "phases to 0: --set schedule.phases.0.prefix_weight=0, in record 92 ...prefix_weights=()"
            )
        ids.append(inputs["prefixes"][ids[0]])
        weights.append(jnp.where(ids[-1] >= 0, inputs["prefix_weight"], 0.0))
        softmax_N += weights[-1]
    return Targets(jnp.stack(ids, axis=1), jnp.stack(weights, axis=1), softmax_N)


def prefixes(vocabulary: tuple[bytes, ...]) -> np.ndarray:
    """Return the id of the longest proper prefix of each id's bytes, or -1: i32 [V]."""
    ids = {token: index for index, token in enumerate(vocabulary) if token}

    def longest(token: bytes) -> int:
        shorter = (token[:length] for length in range(len(token) - 1, 0, -1))
        return next((ids[part] for part in shorter if part in ids), -1)

    return np.array([longest(token) for token in vocabulary], np.int32)
