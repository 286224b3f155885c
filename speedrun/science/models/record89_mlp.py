"""The MLP of record 89: in training, its forward products have factors in 8 bits.

Legend: B batch, T time, D model, F mlp, I inputs of a product, O its outputs.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

#: In 16 bits and more nothing is rounded.
Factors = Literal["float8_e4m3fn", "bfloat16", "float32"]


def relu_squared_mlp(x_BTD: jax.Array, up_FD: jax.Array, down_DF: jax.Array, dtype: Factors) -> jax.Array:
    """Return W_down relu(W_up x)^2 of normalised states. Records 84 and 89 brought 8 bits to the two products.

    Scales come from bounds, which take no pass over states: |x_d| <= sqrt(D), so (W_up x)_f^2 <= D |row f of W_up|^2.
    Upstream has the largest state of this step for the first product, of the step before for the second.
    """
    squared_norms_F = jnp.sum(jnp.square(up_FD.astype(jnp.float32)), axis=1)
    most_x, most_h = jnp.sqrt(jnp.float32(x_BTD.shape[-1])), x_BTD.shape[-1] * jnp.max(squared_norms_F)
    h_BTF = jnp.square(jax.nn.relu(product(x_BTD, up_FD, most_x, dtype)))
    return product(h_BTF, down_DF, jax.lax.stop_gradient(most_h), dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(x_BTI: jax.Array, w_OI: jax.Array, most: jax.Array, dtype: Factors) -> jax.Array:
    """Return x W^T with factors in `dtype`, in the dtype of `x_BTI`. The gradients are those of exact factors.

    Args:
        x_BTI: states.
        w_OI: weights.
        most: bound of all |x|, f32 []. A larger x is cut.
        dtype: of the factors.
    """
    if jnp.finfo(dtype).bits > 8:
        return x_BTI @ w_OI.T
    x8_BTI, x_scale = _rounded(x_BTI, most, dtype)
    w8_OI, w_scale = _rounded(w_OI, jnp.max(jnp.abs(w_OI)), dtype)
    y_BTO = jnp.einsum("bti,oi->bto", x8_BTI, w8_OI, preferred_element_type=x_BTI.dtype)
    return (y_BTO.astype(jnp.float32) * (x_scale * w_scale)).astype(x_BTI.dtype)


def _rounded(x: jax.Array, most: jax.Array, dtype: Factors) -> tuple[jax.Array, jax.Array]:
    """Return x / scale in `dtype`, and the scale that makes `most` the largest number."""
    limit, least = float(jnp.finfo(dtype).max), jnp.finfo(jnp.float32).tiny
    scale = jnp.maximum(most.astype(jnp.float32) / limit, least)  # weights begin as zeros
    return jnp.clip(x.astype(jnp.float32) / scale, -limit, limit).astype(dtype), scale


Saved = tuple[jax.Array, jax.Array]


def _forward(x_BTI: jax.Array, w_OI: jax.Array, most: jax.Array, dtype: Factors) -> tuple[jax.Array, Saved]:
    return product(x_BTI, w_OI, most, dtype), (x_BTI, w_OI)


def _backward(dtype: Factors, saved: Saved, dy_BTO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    del dtype
    return *jax.vjp(lambda x_BTI, w_OI: x_BTI @ w_OI.T, *saved)[1](dy_BTO), None


product.defvjp(_forward, _backward)
