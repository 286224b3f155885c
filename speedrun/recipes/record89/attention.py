"""The attention of record 89: paired heads, a key offset, value embeddings, exclusive heads and composed heads.

Legend: B batch, T time, D model, H heads, K head width, S keys a tile can reach, C tokens of a tile, N tiles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from speedrun.science.kernels.attention import Window
from speedrun.science.kernels.attention_banded import padded, tiles, with_tiles_before
from speedrun.science.kernels.cross_entropy import products
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.kernels.mlp import Arrays, Factors, unscaled

Angles = tuple[jax.Array, jax.Array]
Turns = tuple[jax.Array, jax.Array]  #: frequencies [K/4] and attention's scale

COMPOSE_EPS = 1e-6  #: for the norm of the weights that mix heads
SMALLEST_NORM = 1e-8  #: squared, of a value


class View(NamedTuple):
    """What queries see, and the rotary angles. Paired layers have two queries a token (record 58, @classiclarryd)."""

    first_BT: jax.Array
    window: Window  #: in tokens, with the query
    angles: Angles | None  #: multiplied by the root of attention's scale; None: queries and keys are rotated


def angles(positions_N: jax.Array, rotary_K: jax.Array, scale: jax.Array, width: int) -> Angles:
    """Return cosines and sines [N, K/2] of each position, times sqrt(scale). Pairs beyond `rotary_K` do not rotate.

    Products of queries and keys then have the scale, which may change at every step and costs no pass.
    """
    f_K = jnp.pad(rotary_K, (0, width // 2 - len(rotary_K)))
    theta_NK = positions_N.astype(jnp.float32)[:, None] * f_K[None, :]
    root = jnp.sqrt(scale)
    return root * jnp.cos(theta_NK), root * jnp.sin(theta_NK)


def paired(cos_NK: jax.Array, sin_NK: jax.Array, num_heads: int) -> Angles:
    """Return the angles of paired layers, given those of every half token.

    Head h of token t turns as at 2 t + h mod 2, so heads of one half of a token differ.
    """
    width, turns = 2 * cos_NK.shape[1], (1, num_heads // 2)
    cos_NJ, sin_NJ = (jnp.tile(a.reshape(-1, width), turns).reshape(len(a), -1) for a in (cos_NK, sin_NK))
    return cos_NJ[:, :width], sin_NJ[:, :width]


class Heads(NamedTuple):
    """Queries, keys and values [B, T, H, K], ready for the softmax."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def narrowed(w_ND: jax.Array, num_heads: int, width: int) -> jax.Array:
    """Return the first `width` rows of each head."""
    w_HKD = w_ND.reshape(num_heads, -1, w_ND.shape[-1])
    return w_ND if w_HKD.shape[1] == width else w_HKD[:, :width].reshape(-1, w_ND.shape[-1])


def project(h_BTD: jax.Array, qkv: Arrays, num_heads: int, factors: Factors) -> tuple[Heads, jax.Array]:
    """Return W h / s for each head and W [N, D] of `qkv`, and s of the values. QK-norm makes up for the others'."""
    heads, h_TD = (*h_BTD.shape[:2], num_heads, -1), h_BTD.reshape(-1, h_BTD.shape[-1])
    projected, scales = unscaled(h_TD, qkv, factors)
    return Heads(*(x_TN.reshape(heads) for x_TN in projected)), jax.lax.stop_gradient(scales[-1])


def rotated(heads: Heads, view: View, kernels: Kernels) -> tuple[Heads, View]:
    """Apply QK-norm and rotary."""
    assert view.angles is not None
    q_BTHK, k_BTHK = kernels.qk_norm(_seen_as(heads.q, view), _seen_as(heads.k, view), view.angles)
    heads = heads._replace(q=q_BTHK.reshape(heads.q.shape), k=k_BTHK.reshape(heads.k.shape))
    return heads, view._replace(angles=None)


def _seen_as(x_BTHK: jax.Array, view: View) -> jax.Array:
    return x_BTHK.reshape(*view.first_BT.shape, -1, x_BTHK.shape[-1])


def with_key_offset(heads: Heads) -> Heads:
    """Take the dimensions of keys that do not rotate from the previous token, even of another document.

    The first token keeps its own. Record 49, @classiclarryd.
    """
    k_BTHK = heads.k
    width = k_BTHK.shape[-1]
    rests_K = jnp.arange(width) % (width // 2) >= width // 4
    before_BTHK = jnp.concatenate([k_BTHK[:, :1], k_BTHK[:, :-1]], axis=1)
    return heads._replace(k=jnp.where(rests_K[None, None, None], before_BTHK, k_BTHK))


def attend(heads: Heads, view: View, kernels: Kernels) -> jax.Array:
    """Return softmax(q k^T) v over what `view` shows, after QK-norm and rotary by its angles."""
    q_BTHK, k_BTHK, v_BTHK = (_seen_as(x_BTHK, view) for x_BTHK in heads)
    how = {"scale": 1.0, "window": view.window, "block_tokens": 1, "angles": view.angles}
    return kernels.attention(q_BTHK, k_BTHK, v_BTHK, view.first_BT, **how).reshape(heads.v.shape)


def exclusive(o_BTHK: jax.Array, v_BTHK: jax.Array, alpha_BTH: jax.Array) -> jax.Array:
    """Remove tanh(alpha) of the part of each head's output that points along its own value (XSA). Record 82."""
    o_32, v_32 = o_BTHK.astype(jnp.float32), v_BTHK.astype(jnp.float32)
    along_BTH1 = jnp.sum(o_32 * v_32, axis=-1, keepdims=True)
    norm_BTH1 = jnp.maximum(jnp.sum(v_32 * v_32, axis=-1, keepdims=True), SMALLEST_NORM)
    part_BTHK = jnp.tanh(alpha_BTH.astype(jnp.float32))[..., None] * (along_BTH1 / norm_BTH1) * v_32
    return (o_32 - part_BTHK).astype(o_BTHK.dtype)


def composed(
    heads: Heads, first_BT: jax.Array, w1_BTH: jax.Array, w2_BTH: jax.Array, max_keys: int
) -> jax.Array:
    """Return the output of dynamically composed heads: w2_h(t) sum_s A(t, s) v_h(s). Record 85.

    A = sum_h w1'_h P_h, with w1' of unit mean square over the heads, and P_h = softmax(q_h k_h^T) over at most
    `max_keys` keys from `first_BT`.
    Source: Xiao et al. 2024, Improving Transformers with Dynamically Composable Multi-Head Attention.
    """
    num_tokens, tile = heads.q.shape[1], max(128, max_keys)
    tile = min(tile, num_tokens)
    rest, num_before = -num_tokens % tile, -(-(max_keys - 1) // tile)
    w1_BTH = w1_BTH.astype(jnp.float32)
    w1_BTH *= jax.lax.rsqrt(jnp.mean(w1_BTH * w1_BTH, axis=-1, keepdims=True) + COMPOSE_EPS)

    own_BT = jnp.broadcast_to(jnp.arange(num_tokens, num_tokens + rest), (len(first_BT), rest))
    first_NBC = tiles(jnp.concatenate([first_BT, own_BT], axis=1), tile)  # padded queries see themselves
    t_NC = jnp.arange(num_tokens + rest).reshape(-1, tile)
    s_NS = t_NC[:, :1] - num_before * tile + jnp.arange((num_before + 1) * tile)[None]
    seen_NBCS = s_NS[:, None, None] <= t_NC[:, None, :, None]
    seen_NBCS &= s_NS[:, None, None] >= first_NBC[..., None]

    def compose(q_NBCHK: jax.Array, k_NBSHK: jax.Array, v_NBSHK: jax.Array, w_NBCH: jax.Array) -> jax.Array:
        z_NBHCS = jax.vmap(jax.vmap(jax.vmap(products, 1)))(q_NBCHK, k_NBSHK)
        p_NBHCS = jax.nn.softmax(jnp.where(seen_NBCS[:, :, None], z_NBHCS, -jnp.inf), axis=-1)
        a_NBCS = jnp.einsum("nbch,nbhcs->nbcs", w_NBCH, p_NBHCS)
        return jnp.einsum("nbcs,nbshk->nbchk", a_NBCS.astype(v_NBSHK.dtype), v_NBSHK)

    mixed_NBCHK = compose(
        tiles(padded(heads.q, 0, rest), tile),
        with_tiles_before(padded(heads.k, num_before * tile, rest), tile, num_before),
        with_tiles_before(padded(heads.v, num_before * tile, rest), tile, num_before),
        tiles(jnp.pad(w1_BTH, ((0, 0), (0, rest), (0, 0))), tile),
    )
    mixed_BTHK = jnp.moveaxis(mixed_NBCHK, 0, 1).reshape(len(first_BT), -1, *heads.v.shape[2:])
    mixed_BTHK = mixed_BTHK[:, :num_tokens]
    return w2_BTH[..., None].astype(mixed_BTHK.dtype) * mixed_BTHK
