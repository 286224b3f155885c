"""Causal attention inside documents and block windows: the mask, and the definition.

Query q sees key k iff  k <= q,  doc[q] == doc[k],  q // block - k // block < window_blocks.
Documents are contiguous, so the keys of a query are one interval, first[q] <= k <= q, and one integer per token
describes the mask. Faster forms skip whole tiles with it, and none of them holds a mask of T x T.

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


class Sight(NamedTuple):
    """How far back each token sees; computed once per step and window. Both arrays are non-decreasing in T."""

    start_BT: jax.Array  #: i32, the first token of its document
    first_BT: jax.Array  #: i32, the first key it sees, in its document; it sees none if that is later


def sight(doc_BT: jax.Array, window_blocks: jax.Array | int, block_tokens: int) -> Sight:
    """Return the mask as intervals: first[q] = max(start[q], (q // block - window_blocks + 1) * block).

    `doc_BT` has the index of each token's document, i32; documents are contiguous. Below one block nothing is seen.
    """
    t_T = jnp.arange(doc_BT.shape[-1], dtype=jnp.int32)
    opens_BT = jnp.diff(doc_BT, axis=-1, prepend=doc_BT[:, :1]) != 0
    start_BT = jax.lax.cummax(jnp.where(opens_BT, t_T[None], 0), axis=1)
    near_T = (t_T // block_tokens - window_blocks + 1) * block_tokens
    return Sight(start_BT, jnp.maximum(start_BT, near_T[None]))


def visible(first_BT: jax.Array) -> jax.Array:
    """Return the mask: bool [B, T, S]. For the definition and for tests."""
    t_T = jnp.arange(first_BT.shape[-1])
    return (t_T[None, None, :] <= t_T[None, :, None]) & (t_T[None, None, :] >= first_BT[:, :, None])


def attention(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, sight: Sight, *, scale: float
) -> jax.Array:
    """Return softmax(scale q k^T, over visible keys) v, with a float32 softmax. Memory grows with T squared.

    `sight` is made from this layer's window. A query that sees nothing is NaN, in every form.
    Record 21 scales by 0.12 for unit-RMS q and k of 128 dimensions.

    Returns:
        [B, T, H, K] in the dtype of `v_BTHK`.
    """
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK, preferred_element_type=jnp.float32) * scale
    seen_BHTS = visible(sight.first_BT)[:, None]
    weights_BHTS = jax.nn.softmax(jnp.where(seen_BHTS, scores_BHTS, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights_BHTS.astype(v_BTHK.dtype), v_BTHK)


def size_refusals(shape_BTHK: tuple[int, ...], *, multiple: int = 1, widths: tuple[int, ...]) -> list[str]:
    """Return why kernels cannot run on this shape: T must be a multiple of `multiple`, K one of `widths`."""
    _, num_tokens, _, head_dim = shape_BTHK
    reasons = []
    if num_tokens % multiple:
        reasons.append(f"sequences of {num_tokens:,} tokens; the kernels need a multiple of {multiple}")
    if head_dim not in widths:
        need = f"{', '.join(map(str, widths[:-1]))} or {widths[-1]}"
        reasons.append(f"heads of {head_dim} dimensions; the kernels need {need}")
    return reasons
