"""Vocabulary head, soft cap and loss for GPUs: three products, and two passes over the logits.

Legend: N tokens, D model, V vocabulary, M targets of a token, C chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import Precision, dot_general

from speedrun.base.field_types import Positive
from speedrun.science.kernels.cross_entropy import Cap, Implementation, Losses, Targets, in_chunks, sum_losses


@dataclass(frozen=True, slots=True)
class Fp8:
    """Fixed scales of 8-bit products: each factor is multiplied by its scale, clipped and rounded.

    States and weights become e4m3 (at most 448), gradients of logits e5m2 (at most 57,344).
    """

    x: Positive
    head: Positive
    grad: Positive  #: of the *summed* loss, whose gradient does not depend on the number of tokens


#: Record 21, variant A (@YouJiacheng). It scales the gradient of a *mean* over 49,152 tokens by 2^19. For the gradient
#: of the sum that is 10.67, which holds for any number of chunks.
RECORD21 = Fp8(x=2.0, head=2.0**9, grad=2.0**19 / 49_152)

#: Record 89 divides by the reciprocals: 100/448, 1.6/448, 0.75/448.
RECORD89 = Fp8(x=448 / 100, head=448 / 1.6, grad=448 / 0.75)
RECORD92 = Fp8(x=448 / 100, head=448 / 2, grad=8 * 448 / 0.75)


class Passes(NamedTuple):
    """The passes over the products z [N, V]; capped = cap(z / scale)."""

    #: z, cap, scale -> sums of exp(capped - height): f32 [N].
    sum_exp: Callable[[jax.Array, Cap, float], jax.Array]
    #: z, factors f32 [N], cap, scale, dtype -> factor exp(capped - height) (1 - tanh^2): [N, V]; in 8 bits also
    #: [V, N], as 8-bit products need both factors contiguous along the sum.
    softmax_gradient: Callable[[jax.Array, jax.Array, Cap, float, Any], tuple[jax.Array, ...]]


def _sum_exp(z_NV: jax.Array, cap: Cap, scale: float) -> jax.Array:
    return jnp.sum(jnp.exp(cap.height * cap.tanh(z_NV, scale) - cap.height), axis=1)


def _softmax_gradient(z_NV: jax.Array, factor_N: jax.Array, cap: Cap, scale: float, dtype: Any) -> Any:
    tanh_NV = cap.tanh(z_NV, scale)
    exp_NV = jnp.exp(cap.height * tanh_NV - cap.height)
    g_NV = _rounded(exp_NV * factor_N[:, None] * (1 - tanh_NV * tanh_NV), dtype)
    return (g_NV, g_NV.T) if g_NV.dtype.itemsize == 1 else (g_NV,)


#: Fused by XLA, for any device.
PASSES = Passes(_sum_exp, _softmax_gradient)


def weighted_cross_entropy(
    x_ND: jax.Array,
    head_VD: jax.Array,
    targets: Targets,
    *,
    cap: Cap,
    fp8: Fp8 | None = None,
    num_chunks: int = 1,
    passes: Passes = PASSES,
) -> Losses:
    """Return `cross_entropy.weighted_cross_entropy`, in 8 bits if scales are given.

    The logits are written once, in the dtype of `x_ND`, and read twice: for the sum of exponentials and for their
    gradient. Capped logits cannot overflow exp, so the cap is subtracted instead of a maximum. Gradients at targets
    are computed separately and overwrite those of the pass. The gradient of the head is summed in float32 and returned
    in the dtype of `head_VD`. `num_chunks` must divide the tokens.
    """
    differentiate = partial(_differentiate, cap=cap, fp8=fp8, passes=passes, dtype=x_ND.dtype)
    scales = (1.0, 1.0) if fp8 is None else (fp8.grad * fp8.head, fp8.grad * fp8.x)
    impl = Implementation(partial(_factors, fp8=fp8), differentiate, scales)
    return in_chunks(x_ND, head_VD, targets, impl, num_chunks)


def _factors(x_ND: jax.Array, head_VD: jax.Array, *, fp8: Fp8 | None) -> tuple[jax.Array, jax.Array]:
    if fp8 is None:
        return x_ND, head_VD.astype(x_ND.dtype)
    e4m3 = jnp.float8_e4m3fn
    return _rounded(x_ND, e4m3, fp8.x), _rounded(head_VD, e4m3, fp8.head)


def _rounded(x: jax.Array, dtype: Any, scale: float = 1.0) -> jax.Array:
    """Scale in float32, as bfloat16 would round the scale. Clip to 8 bits, as e4m3 turns larger values into NaN."""
    x, limit = x.astype(jnp.float32) * scale, float(jnp.finfo(dtype).max)
    return (jnp.clip(x, -limit, limit) if jnp.dtype(dtype).itemsize == 1 else x).astype(dtype)


def _differentiate(
    x_ND: jax.Array,
    head_VD: jax.Array,
    targets: Targets,
    *,
    cap: Cap,
    fp8: Fp8 | None,
    passes: Passes,
    dtype: Any,
) -> tuple[tuple[Losses, jax.Array], jax.Array]:
    """Return losses and scaled gradients of a chunk; logits and the gradient of `x_ND` have the given dtype."""
    scale, slope = (1.0, 1.0) if fp8 is None else (fp8.x * fp8.head, fp8.grad)
    slope *= cap.height / cap.unit
    # In 8 bits, the default precision lets tensor cores accumulate with fewer bits, as record 21's forward pass does.
    z_NV = dot_general(x_ND, head_VD, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    sum_N = passes.sum_exp(z_NV, cap, scale)
    tanh_NM = cap.tanh(jnp.take_along_axis(z_NV, targets.ids_NM, axis=1), scale)
    losses = sum_losses(jnp.log(sum_N) + cap.height, cap.height * tanh_NM, targets)
    # Without the barrier, XLA stores tanh as float32 [N, V] instead of computing it twice.
    losses, z_NV, sum_N = jax.lax.optimization_barrier((losses, z_NV, sum_N))
    factor_N = slope * targets.softmax_N / sum_N
    rounded, precision = (dtype, Precision.DEFAULT) if fp8 is None else (jnp.float8_e5m2, Precision.HIGHEST)
    gradients = passes.softmax_gradient(z_NV, factor_N, cap, scale, rounded)
    exp_NM = jnp.exp(cap.height * tanh_NM - cap.height)
    weights_NM, columns_NM = _by_column(targets, z_NV.shape[1])
    g_NM = _rounded((exp_NM * factor_N[:, None] - slope * weights_NM) * (1 - tanh_NM * tanh_NM), rounded)
    at = jnp.arange(len(z_NV))[:, None], columns_NM
    put = {"mode": "drop", "unique_indices": True}
    g_NV = gradients[0].at[at].set(g_NM, **put)
    g_VN = gradients[1].at[at[::-1]].set(g_NM, **put) if len(gradients) > 1 else g_NV.T
    product = partial(dot_general, dimension_numbers=(((1,), (0,)), ((), ())), precision=precision)
    dx_ND = product(g_NV, head_VD, preferred_element_type=dtype)
    dhead_VD = product(g_VN, x_ND, preferred_element_type=jnp.float32)
    return (losses, dhead_VD), dx_ND


def _by_column(targets: Targets, num_columns: int) -> tuple[jax.Array, jax.Array]:
    """Return sums of weights of equal targets, and columns; of equals, only the first has a column below the last."""
    ids_NM = targets.ids_NM
    same_NMM = ids_NM[:, :, None] == ids_NM[:, None, :]
    weights_NM = jnp.sum(same_NMM * targets.weights_NM[:, None, :], axis=2)
    order_1M = jnp.arange(ids_NM.shape[1])[None]
    is_first_NM = jnp.argmax(same_NMM, axis=2) == order_1M
    return weights_NM, jnp.where(is_first_NM & (ids_NM >= 0), ids_NM, num_columns + order_1M)
