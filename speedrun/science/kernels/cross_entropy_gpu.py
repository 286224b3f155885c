"""Vocabulary head, soft cap and loss for GPUs: three products, and as few passes over the logits as possible.

Computes the sum of `cross_entropy.cross_entropy`. Two more arguments set how factors are rounded, and the number of
chunks.

Legend: N tokens, D model, V vocabulary, C chunks.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import Precision, dot_general

from speedrun.science.kernels.cross_entropy import in_chunks


@dataclass(frozen=True, slots=True)
class Fp8:
    """Fixed scales of 8-bit products: each factor is multiplied by its scale, clipped and rounded.

    States and weights become e4m3 (at most 448), gradients of logits e5m2 (at most 57,344).
    """

    x: float
    head: float
    grad: float  #: of the *summed* loss, whose gradient lies within +-1 for any number of tokens


#: Record 21, variant A (@YouJiacheng). It scales the gradient of a *mean* over 49,152 tokens by 2^19. For the gradient
#: of the sum that is 10.67, which holds for any number of chunks.
RECORD21 = Fp8(x=2.0, head=2.0**9, grad=2.0**19 / 49_152)


def summed_cross_entropy(
    x_ND: jax.Array,
    head_VD: jax.Array,
    targets_N: jax.Array,
    *,
    cap: float,
    fp8: Fp8 | None = None,
    num_chunks: int = 1,
) -> jax.Array:
    """Return the sum of `cross_entropy.cross_entropy` over the tokens: f32 [].

    The logits are written once, in the dtype of `x_ND`, and read twice: for the sum of exponentials and for their
    gradient. Capped logits cannot overflow exp, so the cap is subtracted instead of a maximum. The target's logit is
    gathered, and no gradient is scattered. A barrier makes XLA compute tanh twice instead of storing it as float32
    [N, V]. Gradients are computed with the loss, as in the CPU form, so that chunks need no fourth product.
    Memory traffic on an H100: docs/LOG.md.

    Args:
        x_ND: final hidden states, any float dtype.
        head_VD: weights of the vocabulary, any float dtype. Their gradient is summed in float32 and returned
            in this dtype: pass float32 to keep its precision, as record 21 does.
        targets_N: i32, each below V.
        cap: of the logits; at most `cross_entropy.MAX_CAP`.
        fp8: scales for training in 8 bits. None: factors in the dtype of `x_ND`.
        num_chunks: number of chunks, processed in sequence to save memory for logits.

    Raises:
        ValueError: if `num_chunks` does not divide the tokens.
    """
    if len(x_ND) % num_chunks:
        raise ValueError(f"{len(x_ND)} tokens cannot be split into {num_chunks} equal chunks; need a divisor")
    return _summed(x_ND, head_VD, targets_N, cap, fp8, num_chunks)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _summed(
    x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, cap: float, fp8: Fp8 | None, num_chunks: int
) -> Any:
    factors = _factors(x_ND, head_VD, fp8)

    def score(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _score(factors._replace(x_ND=chunk[0]), chunk[1], cap).loss

    return jnp.sum(jax.lax.map(score, in_chunks(factors.x_ND, targets_N, num_chunks)))


class _Factors(NamedTuple):
    """Both factors of the logits as they are multiplied, and the scale of their product."""

    x_ND: jax.Array
    head_VD: jax.Array
    scale: float
    dtype: Any  #: of the logits


def _factors(x_ND: jax.Array, head_VD: jax.Array, fp8: Fp8 | None) -> _Factors:
    if fp8 is None:
        return _Factors(x_ND, head_VD.astype(x_ND.dtype), 1.0, x_ND.dtype)
    x8_ND = _rounded(x_ND, fp8.x, jnp.float8_e4m3fn)
    head8_VD = _rounded(head_VD, fp8.head, jnp.float8_e4m3fn)
    return _Factors(x8_ND, head8_VD, fp8.x * fp8.head, x_ND.dtype)


def _rounded(x: jax.Array, scale: float, dtype: Any) -> jax.Array:
    """Scale, clip and cast; e4m3 would turn larger values into NaN."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x * scale, -limit, limit).astype(dtype)


class _Scored(NamedTuple):
    """Loss of a chunk, and the terms of its gradients."""

    loss: jax.Array  #: f32 [], summed nats
    z_NV: jax.Array  #: logits before the cap, times the factors' scale
    sum_N: jax.Array  #: of exp(logit - cap)


def _score(factors: _Factors, targets_N: jax.Array, cap: float) -> _Scored:
    # In 8 bits, the default precision lets tensor cores accumulate with fewer bits, as in record 21's forward.
    z_NV = dot_general(
        factors.x_ND, factors.head_VD, (((1,), (1,)), ((), ())), preferred_element_type=factors.dtype
    )
    sum_N = jnp.sum(jnp.exp(cap * _tanh(z_NV, factors.scale * cap) - cap), axis=1)
    z_N = jnp.take_along_axis(z_NV, targets_N[:, None], axis=1)[:, 0]
    return _Scored(jnp.sum(jnp.log(sum_N) + cap - cap * _tanh(z_N, factors.scale * cap)), z_NV, sum_N)


def _tanh(z: jax.Array, unit: float) -> jax.Array:
    return jnp.tanh(z.astype(jnp.float32) / unit)


class _Sums(NamedTuple):
    """Sums over chunks."""

    loss: jax.Array
    dhead_VD: jax.Array  #: f32, times the scales of its two factors


def _differentiate(
    factors: _Factors, targets_N: jax.Array, cap: float, fp8: Fp8 | None
) -> tuple[_Sums, jax.Array]:
    """Return loss and gradients of a chunk. Gradients are still scaled; that of `x_ND` has the dtype of the logits."""
    loss, z_NV, sum_N = jax.lax.optimization_barrier(_score(factors, targets_N, cap))
    tanh_NV = _tanh(z_NV, factors.scale * cap)
    is_target_NV = jax.lax.broadcasted_iota(jnp.int32, z_NV.shape, 1) == targets_N[:, None]
    dlogits_NV = jnp.exp(cap * tanh_NV - cap) / sum_N[:, None] - is_target_NV
    dz_NV = dlogits_NV * (1 - tanh_NV * tanh_NV)
    if fp8 is None:
        g_NV, precision = dz_NV.astype(factors.dtype), Precision.DEFAULT
    else:
        g_NV, precision = _rounded(dz_NV, fp8.grad, jnp.float8_e5m2), Precision.HIGHEST  # full accumulation
    product = partial(dot_general, g_NV, precision=precision)
    dx_ND = product(factors.head_VD, (((1,), (0,)), ((), ())), preferred_element_type=factors.dtype)
    dhead_VD = product(factors.x_ND, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return _Sums(loss, dhead_VD), dx_ND


def _forward(
    x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, cap: float, fp8: Fp8 | None, num_chunks: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    factors = _factors(x_ND, head_VD, fp8)
    x_CND, targets_CN = in_chunks(factors.x_ND, targets_N, num_chunks)

    def add(total: _Sums, chunk: tuple[jax.Array, jax.Array]) -> tuple[_Sums, jax.Array]:
        sums, dx_ND = _differentiate(factors._replace(x_ND=chunk[0]), chunk[1], cap, fp8)
        return jax.tree.map(jnp.add, total, sums), dx_ND

    # The first chunk starts the sums, so that a single chunk needs no loop.
    sums, dx_ND = _differentiate(factors._replace(x_ND=x_CND[0]), targets_CN[0], cap, fp8)
    if num_chunks > 1:
        sums, rest_CND = jax.lax.scan(add, sums, (x_CND[1:], targets_CN[1:]))
        dx_ND = jnp.concatenate([dx_ND[None], rest_CND]).reshape(x_ND.shape)
    # The last array only carries the head's dtype to the backward pass.
    return sums.loss, (dx_ND, sums.dhead_VD, jnp.zeros((), head_VD.dtype))


def _backward(
    cap: float, fp8: Fp8 | None, num_chunks: int, saved: tuple[jax.Array, ...], g: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    del cap, num_chunks
    dx_ND, dhead_VD, like_head = saved
    scale_x, scale_head = (1.0, 1.0) if fp8 is None else (fp8.grad * fp8.head, fp8.grad * fp8.x)
    dx = (g / scale_x * dx_ND).astype(dx_ND.dtype)
    return dx, (g / scale_head * dhead_VD).astype(like_head.dtype), None


_summed.defvjp(_forward, _backward)
