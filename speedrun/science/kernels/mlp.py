"""The MLP with a squared ReLU: the definition, in full precision and in 8 bits; and other products in 8 bits.

Legend: D model, F mlp, I inputs of a product, O its outputs; `...` are tokens.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from speedrun.science import nn
from speedrun.science.kernels.linear import linear

#: The dtype of the factors of forward products. Above 8 bits nothing is rounded.
Factors = Literal["float8_e4m3fn", "bfloat16", "float32"]


def mlp(x_D: jax.Array, up_FD: jax.Array, down_DF: jax.Array, *, factors: Factors = "float32") -> jax.Array:
    """Return W_down relu(W_up x)^2 in the dtype of `x_D`; states must be normalised for 8 bits.

    Source: So et al. 2021, Primer; 8 bits from records 84 and 89.
    """
    if jnp.finfo(factors).bits > 8:
        return linear(jnp.square(jax.nn.relu(linear(x_D, up_FD))), down_DF)
    most_x, most_h = bounds(x_D, up_FD)
    h_F = jnp.square(jax.nn.relu(product(x_D, up_FD, most_x, factors)))
    return product(h_F, down_DF, most_h, factors)


def bounds(x_D: jax.Array, up_FD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return upper bounds of |x| and of the squares, f32 [], without a pass over states.

    |x_d| <= sqrt(D), so (W_up x)_f^2 <= D |row f of W_up|^2. Upstream uses the largest states of this step and of the
    step before.
    """
    squared_norms_F = jnp.sum(jnp.square(up_FD.astype(jnp.float32)), axis=1)
    most_h = jax.lax.stop_gradient(x_D.shape[-1] * jnp.max(squared_norms_F))
    return jnp.sqrt(jnp.float32(x_D.shape[-1])), most_h


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(x_I: jax.Array, w_OI: jax.Array, most: jax.Array, factors: Factors) -> jax.Array:
    """Return x W^T from rounded factors, in the dtype of `x_I`. The gradients are those of exact factors.

    `most` is the bound of all |x|, f32 []; larger values are clipped.
    """
    (x8_I, x_scale), (w8_OI, w_scale) = rounded(x_I, most, factors), rounded_weights(w_OI, factors)
    y_O = jnp.einsum("...i,oi->...o", x8_I, w8_OI, preferred_element_type=x_I.dtype)
    return (y_O.astype(jnp.float32) * (x_scale * w_scale)).astype(x_I.dtype)


def rounded_weights(w_OI: jax.Array, dtype: Factors) -> tuple[jax.Array, jax.Array]:
    """Return `rounded` with the largest weight as the bound."""
    return rounded(w_OI, jnp.max(jnp.abs(w_OI)), dtype)


def rounded(x: jax.Array, most: jax.Array, dtype: Factors) -> tuple[jax.Array, jax.Array]:
    """Return x / scale in `dtype`, and the scale that maps `most` to its largest number."""
    scale = scale_of(most, dtype)
    return clipped(x.astype(jnp.float32) / scale, dtype), scale


def clipped(x: jax.Array, dtype: Any) -> jax.Array:
    """Return x in a dtype of 8 bits, whose cast turns what is too large into NaN or infinity."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype)


def scale_of(most: jax.Array, dtype: Factors) -> jax.Array:
    """Return the scale that maps `most` to the largest number of `dtype`: f32 []."""
    least = jnp.finfo(jnp.float32).tiny  # weights begin as zeros
    return jnp.maximum(most.astype(jnp.float32) / float(jnp.finfo(dtype).max), least)


Saved = tuple[jax.Array, jax.Array]


def _forward(x_I: jax.Array, w_OI: jax.Array, most: jax.Array, factors: Factors) -> tuple[jax.Array, Saved]:
    return product(x_I, w_OI, most, factors), (x_I, w_OI)


def _backward(factors: Factors, saved: Saved, dy_O: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    del factors
    return *jax.vjp(linear, *saved)[1](dy_O), None


product.defvjp(_forward, _backward)


Arrays = tuple[jax.Array, ...]


def unscaled(x_I: jax.Array, weights: Arrays, factors: Factors) -> Any:
    """Return all y [..., O] in the dtype of `x_I`, and scales s, f32 []: s y is `product` of normalised states.

    No pass multiplies by s. Gradients are those of exact factors, none for s. Above 8 bits nothing is rounded, s is 1.
    """
    if jnp.finfo(factors).bits > 8:
        return nn.project(x_I, *weights), [jnp.ones(())] * len(weights)
    return _unscaled(x_I, weights, factors)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _unscaled(x_I: jax.Array, weights: Arrays, factors: Factors) -> tuple[Arrays, Arrays]:
    x8_I, x_scale = rounded(x_I, jnp.sqrt(jnp.float32(x_I.shape[-1])), factors)
    # Gradients are divided by the scale, also those of weights that are zero.
    eights = [rounded(w, jnp.maximum(jnp.max(jnp.abs(w)), 1e-9), factors) for w in weights]
    each = [jnp.einsum("...i,oi->...o", x8_I, w8, preferred_element_type=x_I.dtype) for w8, _ in eights]
    return tuple(each), tuple(x_scale * w_scale for _, w_scale in eights)


def _unscaled_forward(x_I: jax.Array, weights: Arrays, factors: Factors) -> Any:
    found: Any = _unscaled(x_I, weights, factors)
    return found, (x_I, weights, found[1])


def _unscaled_backward(_: Factors, saved: Any, given: tuple[Arrays, Arrays]) -> tuple[jax.Array, Arrays]:
    """Scale weights and their gradients, which have fewer numbers than dy."""
    x_I, weights, scales = saved
    pull: Any = jax.vjp(
        nn.project, x_I, *(nn.scaled(w, 1 / s) for w, s in zip(weights, scales, strict=True))
    )[1]
    dx_I, *grads = pull(list(given[0]))
    return dx_I, tuple(nn.scaled(dw, 1 / s) for dw, s in zip(grads, scales, strict=True))


_unscaled.defvjp(_unscaled_forward, _unscaled_backward)
