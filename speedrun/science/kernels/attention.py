"""Causal attention inside documents and block windows: who sees whom, and the definition.

Query q may see key k iff  k <= q,  doc[q] == doc[k],  q // block - k // block < window_blocks.
Documents follow one another, so the keys of a query are one interval, first[q] <= k <= q, and one integer a token
says it all. Faster forms skip whole tiles by it; none of them ever holds a mask of T squared.

Legend: B batch, T time (queries), S time (keys), H heads, K head width.
Source: record 21, whose block-sparse mask this rule states in one line.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Window(NamedTuple):
    """How many blocks a kind of layer sees, its own included."""

    blocks: (
        jax.Array | int
    )  #: i32[] if traced, so that a growing window compiles once; an int is the only one
    most: int  #: never more: what a form may reckon with where the window is traced

    def halved(self) -> "Window":
        """Of half the blocks, at least one."""
        return self._replace(blocks=self.blocks // 2 + (self.blocks < 2), most=max(1, self.most // 2))


class Sight(NamedTuple):
    """How far back each token sees; computed once a step for each kind of window. Neither array ever falls."""

    start_BT: jax.Array  #: i32, the first token of its document
    first_BT: jax.Array  #: i32, the first key it sees: at least its start, at most itself


def sight(doc_BT: jax.Array, window_blocks: jax.Array | int, block_tokens: int) -> Sight:
    """The rule as intervals: first[q] = max(start[q], (q // block - window_blocks + 1) * block).

    Args:
        doc_BT: i32, the document each token belongs to; the tokens of one stand together.
        window_blocks: i32[], at least 1; a traced value, so that a growing window compiles once.
        block_tokens: tokens of one block.
    """
    t_T = jnp.arange(doc_BT.shape[-1], dtype=jnp.int32)
    opens_BT = jnp.diff(doc_BT, axis=-1, prepend=doc_BT[:, :1]) != 0
    start_BT = jax.lax.cummax(jnp.where(opens_BT, t_T[None], 0), axis=1)
    near_T = (t_T // block_tokens - window_blocks + 1) * block_tokens
    return Sight(start_BT, jnp.maximum(start_BT, near_T[None]))


def visible(first_BT: jax.Array) -> jax.Array:
    """Who sees whom as a mask: bool [B, T, S]. For the definition and for tests."""
    t_T = jnp.arange(first_BT.shape[-1])
    return (t_T[None, None, :] <= t_T[None, :, None]) & (t_T[None, None, :] >= first_BT[:, :, None])


def attention(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, sight: Sight, *, scale: float
) -> jax.Array:
    """softmax(scale q k^T, over visible keys) v, with a float32 softmax. Memory grows with T squared.

    Args:
        q_BTHK: queries; any float dtype.
        k_BTHK: keys.
        v_BTHK: values.
        sight: of this layer's window; each query sees at least itself.
        scale: a fixed number; the record uses 0.12 for unit-RMS q and k of 128 dimensions.

    Returns:
        [B, T, H, K] in the dtype of `v_BTHK`.
    """
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK, preferred_element_type=jnp.float32) * scale
    seen_BHTS = visible(sight.first_BT)[:, None]
    weights_BHTS = jax.nn.softmax(jnp.where(seen_BHTS, scores_BHTS, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights_BHTS.astype(v_BTHK.dtype), v_BTHK)
