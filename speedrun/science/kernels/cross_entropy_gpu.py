"""Vocabulary head, soft cap and loss for GPUs: three products, and as few passes over the logits as possible.

Computes `cross_entropy.weighted_cross_entropy`. Two more arguments set how factors are rounded, and the number of
chunks.

Legend: N tokens, D model, V vocabulary, M targets of a token, C chunks.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import Precision, dot_general

from speedrun.science.kernels.cross_entropy import Cap, Form, Losses, Targets, dlogits, in_chunks, sum_losses


@dataclass(frozen=True, slots=True)
class Fp8:
    """Fixed scales of 8-bit products: each factor is multiplied by its scale, clipped and rounded.

    States and weights become e4m3 (at most 448), gradients of logits e5m2 (at most 57,344).
    """

    x: float
    head: float
    grad: float  #: of the *summed* loss, whose gradient does not depend on the number of tokens


#: Record 21, variant A (@YouJiacheng). It scales the gradient of a *mean* over 49,152 tokens by 2^19. For the gradient
#: of the sum that is 10.67, which holds for any number of chunks.
RECORD21 = Fp8(x=2.0, head=2.0**9, grad=2.0**19 / 49_152)

#: Record 89 divides by the reciprocals: 100/448, 1.6/448, 0.75/448. Upstream divides the last one by the number of
#: accumulations, because it differentiates the sum divided by that number. What is rounded is the same.
RECORD89 = Fp8(x=448 / 100, head=448 / 1.6, grad=448 / 0.75)


def weighted_cross_entropy(
    x_ND: jax.Array,
    head_VD: jax.Array,
    targets: Targets,
    *,
    cap: Cap,
    fp8: Fp8 | None = None,
    num_chunks: int = 1,
) -> Losses:
    """Return `cross_entropy.weighted_cross_entropy`.

    The logits are written once, in the dtype of `x_ND`, and read twice: for the sum of exponentials and for their
    gradient. Capped logits cannot overflow exp, so the cap is subtracted instead of a maximum. The targets' logits are
    gathered, and no gradient is scattered. A barrier makes XLA compute tanh twice instead of storing it as float32
    [N, V]. Memory traffic on an H100: docs/LOG.md.

    Args:
        x_ND: final hidden states, any float dtype.
        head_VD: weights of the vocabulary, any float dtype. Their gradient is summed in float32 and returned
            in this dtype: pass float32 to keep its precision, as record 21 does.
        targets: of each state.
        cap: of the logits.
        fp8: scales for training in 8 bits. None: factors in the dtype of `x_ND`.
        num_chunks: number of chunks, processed in sequence to save memory for logits.

    Raises:
        ValueError: if `num_chunks` does not divide the tokens.
    """
    if len(x_ND) % num_chunks:
        raise ValueError(f"{len(x_ND)} tokens cannot be split into {num_chunks} equal chunks; need a divisor")
    differentiate = partial(_differentiate, cap=cap, fp8=fp8, dtype=x_ND.dtype)
    scales = (1.0, 1.0) if fp8 is None else (fp8.grad * fp8.head, fp8.grad * fp8.x)
    form = Form(partial(_factors, fp8=fp8), differentiate, scales)
    return in_chunks(x_ND, head_VD, targets, form, num_chunks)


def _factors(x_ND: jax.Array, head_VD: jax.Array, *, fp8: Fp8 | None) -> tuple[jax.Array, jax.Array]:
    if fp8 is None:
        return x_ND, head_VD.astype(x_ND.dtype)
    e4m3 = jnp.float8_e4m3fn
    return _rounded(x_ND, fp8.x, e4m3), _rounded(head_VD, fp8.head, e4m3)


def _rounded(x: jax.Array, scale: float, dtype: Any) -> jax.Array:
    """Scale in float32, as bfloat16 would round the scale, too. Clip, as e4m3 turns larger values into NaN."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) * scale, -limit, limit).astype(dtype)


def _differentiate(
    x_ND: jax.Array, head_VD: jax.Array, targets: Targets, *, cap: Cap, fp8: Fp8 | None, dtype: Any
) -> tuple[tuple[Losses, jax.Array], jax.Array]:
    """Return losses and gradients of a chunk. Gradients are scaled; that of `x_ND` has the given dtype, like logits."""
    # In 8 bits, the default precision lets tensor cores accumulate with fewer bits, as in record 21's forward.
    z_NV = dot_general(x_ND, head_VD, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    tanh = partial(cap.tanh, scale=1.0 if fp8 is None else fp8.x * fp8.head)
    sum_N = jnp.sum(jnp.exp(cap.height * tanh(z_NV) - cap.height), axis=1)
    logits_NM = cap.height * tanh(jnp.take_along_axis(z_NV, targets.ids_NM, axis=1))
    losses = sum_losses(jnp.log(sum_N) + cap.height, logits_NM, targets)
    losses, z_NV, sum_N = jax.lax.optimization_barrier((losses, z_NV, sum_N))
    tanh_NV = tanh(z_NV)
    exp_NV = jnp.exp(cap.height * tanh_NV - cap.height)
    dz_NV = dlogits(exp_NV, sum_N, tanh_NV, targets, cap)
    if fp8 is None:
        g_NV, precision = dz_NV.astype(dtype), Precision.DEFAULT
    else:
        g_NV, precision = _rounded(dz_NV, fp8.grad, jnp.float8_e5m2), Precision.HIGHEST  # full accumulation
    product = partial(dot_general, g_NV, precision=precision)
    dx_ND = product(head_VD, (((1,), (0,)), ((), ())), preferred_element_type=dtype)
    dhead_VD = product(x_ND, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return (losses, dhead_VD), dx_ND
