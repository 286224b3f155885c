"""Causal attention inside documents and block windows: the mask, and the definition.

Query q sees key k if  k <= q,  doc[q] == doc[k],  q // block - k // block < window_blocks.
Documents are contiguous, so the keys of a query are an interval, first[q] <= k <= q, and first_BT describes the mask.

Legend: B batch, T time (queries), S time (keys), H heads, K head width.
Source: record 21's block-sparse mask.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Window(NamedTuple):
    """Number of blocks a layer sees, including its own. Static window if int, scheduled if traced."""

    blocks: jax.Array | int  #: traced: i32[], so that a growing window compiles once
    most: int  #: static upper bound

    def halved(self) -> "Window":
        """Return a window of half the blocks, at least one."""
        return self._replace(blocks=self.blocks // 2 + (self.blocks < 2), most=max(1, self.most // 2))


def first_key(doc_BT: jax.Array, window_blocks: jax.Array | int, block_tokens: int) -> jax.Array:
    """Return first_BT, the first key that each token sees: max(start[q], (q // block - window_blocks + 1) * block).

    `doc_BT` has the document index of each token. The result is i32 and non-decreasing in T. A token sees nothing if
    its first key is a later one, as in a window of less than one block.
    """
    t_T = jnp.arange(doc_BT.shape[-1], dtype=jnp.int32)
    opens_BT = jnp.diff(doc_BT, axis=-1, prepend=doc_BT[:, :1]) != 0
    start_BT = jax.lax.cummax(jnp.where(opens_BT, t_T[None], 0), axis=1)
    near_T = (t_T // block_tokens - window_blocks + 1) * block_tokens
    return jnp.maximum(start_BT, near_T[None])


def visible(first_BT: jax.Array) -> jax.Array:
    """Return the mask: bool [B, T, S]."""
    t_T = jnp.arange(first_BT.shape[-1])
    return (t_T[None, None, :] <= t_T[None, :, None]) & (t_T[None, None, :] >= first_BT[:, :, None])


def attention(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, first_BT: jax.Array, *, scale: float
) -> jax.Array:
    """Return softmax(scale q k^T, over visible keys) v in the dtype of `v_BTHK`, with a float32 softmax.

    Memory grows with T squared. The output of a query that sees nothing is NaN, in every implementation.
    """
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK, preferred_element_type=jnp.float32) * scale
    seen_BHTS = visible(first_BT)[:, None]
    weights_BHTS = jax.nn.softmax(jnp.where(seen_BHTS, scores_BHTS, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights_BHTS.astype(v_BTHK.dtype), v_BTHK)
