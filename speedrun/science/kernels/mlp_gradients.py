"""The MLP with a squared ReLU in 8 bits, and its gradients, too.

Legend: N tokens, D model, F mlp; in a product S is summed, and R and C are rows and columns of the result.
Source: modded-nanogpt, records 90 and 92. They also round the factors of dy W_down, and scale slopes by the largest
of the last step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import Precision

from speedrun.science.kernels.mlp import bounds, clipped, rounded, rounded_weights, scale_of

E4M3: Any = jnp.float8_e4m3fn
E5M2: Any = jnp.float8_e5m2
#: A rounded array, and the scale by which it was divided.
Rounded = tuple[jax.Array, jax.Array | float]


class Fused(NamedTuple):
    """Products of the MLP with what follows them. Both return [N, F], and the same as [F, N].

    Products in 8 bits need both factors contiguous along the sum, and the next ones sum over F and over N.
    """

    #: x8 [N, D], up8 [F, D], factor f32 [1], dtype of a product in memory -> h8 = relu(factor x8 up8)^2, in e4m3.
    squares: Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, jax.Array]]
    #: dy [N, D], down [D, F], h8 [N, F], factor f32 [1] -> dz8 = factor (dy down) sqrt(h8), in e5m2.
    slopes: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def _squares(x8_ND: jax.Array, up8_FD: jax.Array, factor: jax.Array, dtype: Any) -> Any:
    z_NF = jnp.einsum("nd,fd->nf", x8_ND, up8_FD, preferred_element_type=dtype)
    h8_NF = clipped(jnp.square(jax.nn.relu(factor[0] * z_NF.astype(jnp.float32))), E4M3)
    return h8_NF, h8_NF.T


def _slopes(dy_ND: jax.Array, down_DF: jax.Array, h8_NF: jax.Array, factor: jax.Array) -> Any:
    dh_NF = jnp.einsum("nd,df->nf", dy_ND, down_DF).astype(jnp.float32)
    dz8_NF = clipped(factor[0] * dh_NF * jnp.sqrt(h8_NF.astype(jnp.float32)), E5M2)
    return dz8_NF, dz8_NF.T


#: Fused by XLA, for any device.
FUSED = Fused(_squares, _slopes)


def mlp(
    x_D: jax.Array, up_FD: jax.Array, down_DF: jax.Array, *, gradient_scale: float, fused: Fused = FUSED
) -> jax.Array:
    """Return W_down relu(W_up x)^2 of normalised states, in their dtype; all products but dy W_down have 8 bits.

    Factors are e4m3, or e5m2 if they are gradients: dy and that of W_up x, divided by `gradient_scale` and clipped,
    infinities too, but not NaN. The slope of the square is that of the rounded one, and rounding has the slope one.
    """
    x_ND = x_D.reshape(-1, x_D.shape[-1])
    return jnp.reshape(_mlp(x_ND, up_FD, down_DF, gradient_scale, fused), x_D.shape)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _mlp(x_ND: jax.Array, up_FD: jax.Array, down_DF: jax.Array, gradient_scale: float, fused: Fused) -> Any:
    return _forward(x_ND, up_FD, down_DF, gradient_scale, fused)[0]


def _forward(
    x_ND: jax.Array, up_FD: jax.Array, down_DF: jax.Array, gradient_scale: float, fused: Fused
) -> Any:
    del gradient_scale
    most_x, most_h = bounds(x_ND, up_FD)
    x8, up8, h_scale = rounded(x_ND, most_x, E4M3), rounded_weights(up_FD, E4M3), scale_of(most_h, E4M3)
    # The factors before and after the square, and the slope of the square, are one factor each.
    factor = (x8[1] * up8[1] * jax.lax.rsqrt(h_scale))[None]
    h8_NF, h8_FN = fused.squares(x8[0], up8[0], factor, x_ND.dtype)
    y_ND = _product((h8_NF, h_scale), rounded_weights(down_DF, E4M3), x_ND.dtype, Precision.DEFAULT)
    return y_ND, (x8, up8, down_DF, h8_NF, (h8_FN, h_scale))


def _backward(gradient_scale: float, fused: Fused, saved: Any, dy_ND: jax.Array) -> tuple[jax.Array, ...]:
    (x8_ND, x_scale), (up8_FD, up_scale), down_DF, h8_NF, h8 = saved
    dz8_NF, dz8_FN = fused.slopes(dy_ND, down_DF, h8_NF, (2 * jnp.sqrt(h8[1]) / gradient_scale)[None])
    dy8_DN = clipped(dy_ND.T.astype(jnp.float32) / gradient_scale, E5M2)
    dx_ND = _product((dz8_NF, gradient_scale), (up8_FD.T, up_scale), dy_ND.dtype)
    dup_FD = _product((dz8_FN, gradient_scale), (x8_ND.T, x_scale), down_DF.dtype)
    return dx_ND, dup_FD, _product((dy8_DN, gradient_scale), h8, down_DF.dtype)


def _product(a_RS: Rounded, b_CS: Rounded, dtype: Any, precision: Precision = Precision.HIGHEST) -> jax.Array:
    """Return the product of two rounded arrays; by default, tensor cores keep all bits of sums, which costs time."""
    dims = (((1,), (1,)), ((), ()))
    sums = jax.lax.dot_general(a_RS[0], b_CS[0], dims, precision, preferred_element_type=dtype)
    return (sums.astype(jnp.float32) * (a_RS[1] * b_CS[1])).astype(dtype)


_mlp.defvjp(_forward, _backward)
