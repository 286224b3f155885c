"""Building blocks of models, as pure functions.

Legend: B batch, T time, D model, H heads, K head width.
"""

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr

from speedrun.science.kernels.linear import linear

#: float32 machine epsilon, as in record 21.
EPS = 1.1920929e-07


@jax.custom_vjp
def rms_norm(x: jax.Array) -> jax.Array:
    """Return x / rms(x) over the last axis in the dtype of `x`, computed in float32."""
    return _normalised(x.astype(jnp.float32)).astype(x.dtype)


def _normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(_mean_square(x))


def _mean_square(x: jax.Array) -> jax.Array:
    return jnp.mean(x * x, axis=-1, keepdims=True) + EPS


def _rms_norm_backward(x: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    # XLA fuses x * f(sum of x^2) with what follows if the sum has no other use; multiplying by `one` adds such a sum.
    x32 = jax.lax.optimization_barrier(x).astype(jnp.float32)
    one = jnp.minimum(_mean_square(x32) / EPS, 1.0)
    (dx,) = jax.vjp(_normalised, x32 * one)[1](dy.astype(jnp.float32))
    return (dx.astype(x.dtype),)


rms_norm.defvjp(lambda x: (rms_norm(x), x), _rms_norm_backward)


def project(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
    """Return x W^T for each W. The barrier makes XLA sum the gradient of x inside its matmuls."""
    *others, last = weights
    held = jax.lax.optimization_barrier(x)
    return [*(linear(held, w) for w in others), linear(x, last)]


def scaled(w: jax.Array, by: jax.Array) -> jax.Array:
    """Return by * w. Without the barrier, XLA scales all layers at once, after all gathers."""
    return weighted_sum((jax.lax.optimization_barrier(by), w))


def weighted_sum(*terms: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return the sum of weight * x over the terms, computed in float32, in the dtype of the first `x`.

    Weights are learned scalars and stay float32: bfloat16 would change them by up to 0.4 %.
    """
    total = sum(weight.astype(jnp.float32) * x.astype(jnp.float32) for weight, x in terms)
    return _held(jnp.asarray(total).astype(terms[0][1].dtype))


@jax.custom_vjp
def _held(x: jax.Array) -> jax.Array:
    """Return x, and make XLA read its gradient once for all terms of a blend."""
    return x


_held.defvjp(lambda x: (x, None), lambda _, dx: (jax.lax.optimization_barrier(dx),))


def documents(tokens_BT: jax.Array, document_token: int) -> jax.Array:
    """Return the document index of each token; each document begins with `document_token`."""
    return jnp.cumsum(tokens_BT == document_token, axis=1)


def lookup(table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """Return rows of a table: [B, T, D] in its dtype. Gradients are summed in float32; a bfloat16 sum stagnates."""
    return table_VD.astype(jnp.float32)[ids_BT].astype(table_VD.dtype)


def rotary_angles(num_positions: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Return the cosines and sines [T, K/2] of half-truncated rotary (record 2024-12, @YouJiacheng).

    f_i = (1/1024)^(i / (K/4 - 1)) for the first K/4 pairs; the other K/4 pairs do not rotate.
    """
    quarter = head_dim // 4
    f_K = jnp.concatenate([(1 / 1024) ** jnp.linspace(0, 1, quarter, dtype=jnp.float32), jnp.zeros(quarter)])
    theta_TK = jnp.arange(num_positions, dtype=jnp.float32)[:, None] * f_K[None, :]
    return jnp.cos(theta_TK), jnp.sin(theta_TK)


def rotary(x_BTHK: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate pairs (i, i + K/2) by position * f_i, in float32. Angles [T, n K/2] cycle through n heads."""
    u, w = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    width, shape, num_turns = u[0, 0].size, (1, *u.shape[1:]), -(-u[0, 0].size // angles[0].shape[1])
    cos_BTHK, sin_BTHK = (jnp.tile(a, (1, num_turns))[:, :width].reshape(shape) for a in angles)
    turned_BTHK = jnp.concatenate([u * cos_BTHK + w * sin_BTHK, w * cos_BTHK - u * sin_BTHK], axis=-1)
    return turned_BTHK.astype(x_BTHK.dtype)


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """Return x Phi(x), rounded once, where Phi is the distribution function of the standard normal."""
    return (_wide(x) * ndtr(_wide(x))).astype(x.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))  # erf does not support 16-bit types


def _slope(x: jax.Array) -> jax.Array:
    return ndtr(x) + x * jnp.exp(-0.5 * x * x) * (2 * jnp.pi) ** -0.5


# JAX 0.12 cannot differentiate `erf` inside `shard_map`.
gelu.defjvps(lambda dx, _, x: _slope(_wide(x)).astype(x.dtype) * dx)
