"""Causal attention inside documents and windows, in plain XLA, at a cost of T times the window.

Each tile of queries is multiplied with its own keys and those of the preceding tiles inside its window.

Legend: B batch, H heads, R both, T time (queries), S time (keys a tile can reach), K head width, N tiles, C its tokens.
"""

import jax
import jax.numpy as jnp

#: Smaller tiles copy each key more often than they save products.
SMALLEST_TILE_TOKENS = 16
#: Of scores that exist at once. With more, tiles take turns, and the backward pass recomputes their scores.
MOST_SCORE_BYTES = 2**26


def attention(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    first_BT: jax.Array,
    *,
    scale: float,
    window_tokens: int,
    tile_tokens: int | None = None,
) -> jax.Array:
    """Compute `attention.attention` for windows of at most `window_tokens`; a token that sees more gets NaN.

    Work is T (window + tile). A tile is half a window by default: smaller ones copy keys, larger ones waste products.
    """
    num_tokens, num_heads = q_BTHK.shape[1:3]
    bound = min(window_tokens, num_tokens)
    tile = tile_tokens or min(num_tokens, max(SMALLEST_TILE_TOKENS, -(-bound // 2)))
    num_tiles, num_before = -(-num_tokens // tile), -(-(bound - 1) // tile)

    def attend(
        q_RCK: jax.Array, k_RSK: jax.Array, v_RSK: jax.Array, first_RC: jax.Array, index: jax.Array
    ) -> jax.Array:
        t_C = index * tile + jnp.arange(tile)
        s_S = (index - num_before) * tile + jnp.arange((num_before + 1) * tile)
        seen_RCS = (s_S[None, None, :] <= t_C[None, :, None]) & (s_S[None, None, :] >= first_RC[:, :, None])
        scores_RCS = jnp.einsum("rck,rsk->rcs", q_RCK, k_RSK, preferred_element_type=jnp.float32) * scale
        weights_RCS = jax.nn.softmax(jnp.where(seen_RCS, scores_RCS, -jnp.inf), axis=-1)
        o_RCK = jnp.einsum("rcs,rsk->rck", weights_RCS.astype(v_RSK.dtype), v_RSK)
        beyond_RC = first_RC < jnp.maximum(s_S[:1], 0)[None]
        return jnp.where(beyond_RC[:, :, None], jnp.nan, o_RCK)

    rest = num_tiles * tile - num_tokens
    padding_BT = jnp.broadcast_to(jnp.arange(num_tokens, num_tokens + rest)[None], (len(q_BTHK), rest))
    first_BT = jnp.concatenate([first_BT, padding_BT], axis=1)  # padded queries see themselves
    # One row a head: XLA multiplies whole tiles without copying them first.
    q_RTK, k_RTK, v_RTK = (
        x.swapaxes(1, 2).reshape(-1, num_tokens, x.shape[-1]) for x in (q_BTHK, k_BTHK, v_BTHK)
    )
    inputs = (
        tiles(padded(q_RTK, 0, rest), tile),
        with_tiles_before(padded(k_RTK, num_before * tile, rest), tile, num_before),
        with_tiles_before(padded(v_RTK, num_before * tile, rest), tile, num_before),
        tiles(jnp.repeat(first_BT, num_heads, axis=0), tile),
        jnp.arange(num_tiles),
    )
    at_once = MOST_SCORE_BYTES // (4 * len(q_RTK) * tile * (num_before + 1) * tile)
    if at_once >= num_tiles:
        o_NRCK = jax.vmap(attend)(*inputs)
    else:
        o_NRCK = jax.lax.map(lambda each: jax.checkpoint(attend)(*each), inputs, batch_size=max(1, at_once))
    o_RTK = jnp.moveaxis(o_NRCK, 0, 1).reshape(len(q_RTK), num_tiles * tile, -1)[:, :num_tokens]
    return o_RTK.reshape(-1, num_heads, *o_RTK.shape[1:]).swapaxes(1, 2)


def padded(x_BT: jax.Array, before: int, after: int) -> jax.Array:
    """Pad the time axis with zeros."""
    return jnp.pad(x_BT, ((0, 0), (before, after), *((0, 0),) * (x_BT.ndim - 2)))


def tiles(x_BT: jax.Array, tile: int) -> jax.Array:
    """Reshape [B, N * C, ...] to [N, B, C, ...]."""
    return jnp.moveaxis(x_BT.reshape(len(x_BT), -1, tile, *x_BT.shape[2:]), 1, 0)


def with_tiles_before(x_BT: jax.Array, tile: int, num_before: int) -> jax.Array:
    """Prepend to each tile its predecessors: [N, B, S, ...]. The first `num_before` tiles of `x_BT` are padding.

    These are shifted copies: the gradient of a slice inside the loop would be an array of the whole sequence.
    """
    x_NBCHK = tiles(x_BT, tile)
    num_tiles = len(x_NBCHK) - num_before
    return jnp.concatenate([x_NBCHK[i : i + num_tiles] for i in range(num_before + 1)], axis=2)
