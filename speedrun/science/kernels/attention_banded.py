"""Causal attention inside documents and windows, in plain XLA, at a cost of T times the window.

Each tile of queries is multiplied with its own keys and those of the preceding tiles inside its window.

Legend: B batch, T time (queries), S time (keys a tile can reach), H heads, K head width, N tiles, C tokens of a tile.
"""

import jax
import jax.numpy as jnp

#: Products of smaller tiles do not fill a core or a GPU.
SMALLEST_TILE_TOKENS = 128


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

    Work is T (window + tile). Scores exist for one tile at a time, and the backward pass recomputes them. By default a
    tile is half a window: smaller tiles copy keys more often, larger ones waste products.
    """
    num_tokens, bound = q_BTHK.shape[1], min(window_tokens, q_BTHK.shape[1])
    tile = tile_tokens or min(num_tokens, max(SMALLEST_TILE_TOKENS, -(-bound // 2)))
    num_tiles, num_before = -(-num_tokens // tile), -(-(bound - 1) // tile)

    def attend(
        q_BCHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, first_BC: jax.Array, index: jax.Array
    ) -> jax.Array:
        t_C = index * tile + jnp.arange(tile)
        s_S = (index - num_before) * tile + jnp.arange((num_before + 1) * tile)
        seen_BCS = (s_S[None, None, :] <= t_C[None, :, None]) & (s_S[None, None, :] >= first_BC[:, :, None])
        scores_BHCS = jnp.einsum("bthk,bshk->bhts", q_BCHK, k_BSHK, preferred_element_type=jnp.float32)
        scores_BHCS *= scale
        weights_BHCS = jax.nn.softmax(jnp.where(seen_BCS[:, None], scores_BHCS, -jnp.inf), axis=-1)
        o_BCHK = jnp.einsum("bhts,bshk->bthk", weights_BHCS.astype(v_BSHK.dtype), v_BSHK)
        beyond_BC = first_BC < jnp.maximum(s_S[:1], 0)[None]
        return jnp.where(beyond_BC[:, :, None, None], jnp.nan, o_BCHK)

    rest = num_tiles * tile - num_tokens
    padding_BT = jnp.broadcast_to(jnp.arange(num_tokens, num_tokens + rest)[None], (len(q_BTHK), rest))
    first_BT = jnp.concatenate([first_BT, padding_BT], axis=1)  # padded queries see themselves
    o_NBCHK = jax.lax.map(
        lambda tiles: jax.checkpoint(attend)(*tiles),
        (
            tiles(padded(q_BTHK, 0, rest), tile),
            with_tiles_before(padded(k_BTHK, num_before * tile, rest), tile, num_before),
            with_tiles_before(padded(v_BTHK, num_before * tile, rest), tile, num_before),
            tiles(first_BT, tile),
            jnp.arange(num_tiles),
        ),
    )
    o_BTHK = jnp.moveaxis(o_NBCHK, 0, 1).reshape(len(q_BTHK), num_tiles * tile, *v_BTHK.shape[2:])
    return o_BTHK[:, :num_tokens]


def padded(x_BTHK: jax.Array, before: int, after: int) -> jax.Array:
    """Pad the time axis with zeros."""
    return jnp.pad(x_BTHK, ((0, 0), (before, after), (0, 0), (0, 0)))


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
