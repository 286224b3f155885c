"""The MLP with a squared ReLU: its definition, in 8 bits as well.

Legend: D model, F mlp, I inputs of a product, O its outputs; `...` are tokens.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

#: Of the factors of forward products. In 16 bits and more nothing is rounded.
Factors = Literal["float8_e4m3fn", "bfloat16", "float32"]


class Bounds(NamedTuple):
    """Bounds of what is rounded, f32 []: all |x| of normalised states, all squares."""

    x: jax.Array
    h: jax.Array


def mlp(x_D: jax.Array, up_FD: jax.Array, down_DF: jax.Array, *, factors: Factors = "float32") -> jax.Array:
    """Return W_down relu(W_up x)^2: [..., D] in the dtype of `x_D`. Source: So et al. 2021, Primer.

    Records 84 and 89 brought 8 bits to the two products; states must be normalised for that.
    """
    if jnp.finfo(factors).bits > 8:
        return jnp.square(jax.nn.relu(x_D @ up_FD.T)) @ down_DF.T
    most = bounds(x_D, up_FD)
    h_F = jnp.square(jax.nn.relu(product(x_D, up_FD, most.x, factors)))
    return product(h_F, down_DF, most.h, factors)


def bounds(x_D: jax.Array, up_FD: jax.Array) -> Bounds:
    """Return bounds that take no pass over states: |x_d| <= sqrt(D), so (W_up x)_f^2 <= D |row f of W_up|^2.

    Upstream has the largest state of this step for the first product, of the step before for the second.
    """
    squared_norms_F = jnp.sum(jnp.square(up_FD.astype(jnp.float32)), axis=1)
    most_h = jax.lax.stop_gradient(x_D.shape[-1] * jnp.max(squared_norms_F))
    return Bounds(jnp.sqrt(jnp.float32(x_D.shape[-1])), most_h)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(x_I: jax.Array, w_OI: jax.Array, most: jax.Array, factors: Factors) -> jax.Array:
    """Return x W^T, from rounded factors, in the dtype of `x_I`. The gradients are those of exact factors.

    Args:
        x_I: states.
        w_OI: weights.
        most: bound of all |x|, f32 []. A larger x is cut.
        factors: dtype of the factors.
    """
    (x8_I, x_scale), (w8_OI, w_scale) = rounded(x_I, most, factors), rounded_weights(w_OI, factors)
    y_O = jnp.einsum("...i,oi->...o", x8_I, w8_OI, preferred_element_type=x_I.dtype)
    return (y_O.astype(jnp.float32) * (x_scale * w_scale)).astype(x_I.dtype)


def rounded_weights(w_OI: jax.Array, dtype: Factors) -> tuple[jax.Array, jax.Array]:
    """Return `rounded` with the largest of the weights as bound."""
    return rounded(w_OI, jnp.max(jnp.abs(w_OI)), dtype)


def rounded(x: jax.Array, most: jax.Array, dtype: Factors) -> tuple[jax.Array, jax.Array]:
    """Return x / scale in `dtype`, and the scale that makes `most` the largest number."""
    scale, limit = scale_of(most, dtype), float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) / scale, -limit, limit).astype(dtype), scale


def scale_of(most: jax.Array, dtype: Factors) -> jax.Array:
    """Return the scale that makes `most` the largest number of `dtype`: f32 []."""
    least = jnp.finfo(jnp.float32).tiny  # weights begin as zeros
    return jnp.maximum(most.astype(jnp.float32) / float(jnp.finfo(dtype).max), least)


Saved = tuple[jax.Array, jax.Array]


def _forward(x_I: jax.Array, w_OI: jax.Array, most: jax.Array, factors: Factors) -> tuple[jax.Array, Saved]:
    return product(x_I, w_OI, most, factors), (x_I, w_OI)


def _backward(factors: Factors, saved: Saved, dy_O: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    del factors
    return *jax.vjp(lambda x_I, w_OI: x_I @ w_OI.T, *saved)[1](dy_O), None


product.defvjp(_forward, _backward)
