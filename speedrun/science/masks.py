"""Logits of tokens that can follow, given `base.bpe_pairs.IMPOSSIBLE_PAIRS` among the constants of a recipe.

Ids travel beside the hidden states, as `logits` gets no others. Source: modded-nanogpt #350. Rules: RULES.md, Masks.
Legend: B batch, T time, N tokens, D model, V vocabulary.
"""

import jax
import jax.numpy as jnp

from speedrun.science.recipe import Inputs


def with_ids(x_BTD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Append two columns to hidden states: id // 256 and id % 256, both exact in bfloat16 for ids of 16 bits."""
    columns_BT2 = jnp.stack(jnp.divmod(tokens_BT, 256), axis=-1)
    return jnp.concatenate([x_BTD, columns_BT2.astype(x_BTD.dtype)], axis=-1)


def split_ids(x_NE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return hidden states [N, D] and ids [N], i32."""
    high_N, low_N = x_NE[:, -2:].astype(jnp.int32).T
    return x_NE[:, :-2], 256 * high_N + low_N


def possible(logits_NV: jax.Array, ids_N: jax.Array, inputs: Inputs, name: str) -> jax.Array:
    """Return the logits, -inf for each token that never follows its row's id."""
    rows_NC = inputs[f"{name}.bits"][inputs[f"{name}.row_of"][ids_N]]
    impossible_NV = jnp.unpackbits(rows_NC, axis=1, bitorder="little")[:, inputs[f"{name}.column_of"]]
    padding = logits_NV.shape[1] - impossible_NV.shape[1]  # columns of no id
    return jnp.where(jnp.pad(impossible_NV, ((0, 0), (0, padding))) == 1, -jnp.inf, logits_NV)
