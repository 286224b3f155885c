"""Causal attention inside documents and block windows: the definition.

Query q may see key k iff  k <= q,  doc[q] == doc[k],  q // block - k // block < window_blocks.
Legend: B batch, T time (queries), S time (keys), H heads, K head width.
Source: record 21, whose block-sparse mask this rule states in one line.
"""

import jax
import jax.numpy as jnp


def visible(doc_BT: jax.Array, window_blocks: jax.Array, block_tokens: int) -> jax.Array:
    """Who sees whom: bool [B, T, S].

    Args:
        doc_BT: i32, the document each token belongs to.
        window_blocks: i32[], at least 1; a traced value, so that a growing window compiles once.
        block_tokens: tokens of one block.
    """
    t_T = jnp.arange(doc_BT.shape[-1])
    causal_TS = t_T[:, None] >= t_T[None, :]
    near_TS = (t_T // block_tokens)[:, None] - (t_T // block_tokens)[None, :] < window_blocks
    return (causal_TS & near_TS)[None] & (doc_BT[:, :, None] == doc_BT[:, None, :])


def attention(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, visible_BTS: jax.Array, *, scale: float
) -> jax.Array:
    """softmax(scale q k^T, over visible keys) v, with a float32 softmax. Memory grows with T squared.

    Args:
        q_BTHK: queries; any float dtype.
        k_BTHK: keys.
        v_BTHK: values.
        visible_BTS: bool; each query sees at least itself.
        scale: a fixed number; the record uses 0.12 for unit-RMS q and k of 128 dimensions.

    Returns:
        [B, T, H, K] in the dtype of `v_BTHK`.
    """
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK, preferred_element_type=jnp.float32) * scale
    weights_BHTS = jax.nn.softmax(jnp.where(visible_BTS[:, None], scores_BHTS, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights_BHTS.astype(v_BTHK.dtype), v_BTHK)
