"""Vocabulary head, soft cap and loss: the definition, and a form for CPUs that computes the logits in chunks.

Legend: N tokens, D model, V vocabulary.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

#: Most tokens per chunk: 256 x 50,304 float32 logits fit a CPU's caches and keep its GEMMs busy.
CHUNK_TOKENS = 256

#: Above it exp(-2 cap), the smallest possible term of a sum, underflows float32.
MAX_CAP = 40.0


def logits(x_ND: jax.Array, head_VD: jax.Array, *, cap: float) -> jax.Array:
    """Return cap * tanh(x W^T / cap) in float32: [N, V]. An infinite cap caps nothing.

    Record 21 writes 30 sigmoid(z / 7.5), which is 15 tanh(z / 15) plus a constant that softmax ignores.
    """
    return _capped(jnp.einsum("nd,vd->nv", x_ND, head_VD, preferred_element_type=jnp.float32), cap)


def cross_entropy(x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, *, cap: float) -> jax.Array:
    """Return the negative log likelihood of each target in nats: f32 [N]. This is the definition."""
    logits_NV = logits(x_ND, head_VD, cap=cap)
    target_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits_NV, axis=1) - target_N


def summed_uncapped(
    x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, *, cap: float, num_chunks: int
) -> jax.Array:
    """Return the sum of `cross_entropy` over the tokens, f32 [], for any cap.

    Logits are computed again in the backward pass, chunk by chunk: four products. The head's gradient is summed over
    the chunks in float32.
    """
    wide_VD = head_VD.astype(jnp.float32)

    @jax.checkpoint
    def add(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        logits_NV = _capped(_products(chunk[0], wide_VD.astype(head_VD.dtype)), cap)
        target_N = jnp.take_along_axis(logits_NV, chunk[1][:, None], axis=1)[:, 0]
        return total + jnp.sum(jax.nn.logsumexp(logits_NV, axis=1) - target_N), None

    return jax.lax.scan(add, _zero_like(x_ND, ()), in_chunks(x_ND, targets_N, num_chunks))[0]


@jax.custom_vjp
def _products(x_ND: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Return x W^T in float32. The backward pass rounds its gradient to the dtype of `x_ND`, for fast products."""
    return jnp.einsum("nd,vd->nv", x_ND, head_VD, preferred_element_type=jnp.float32)


def _products_backward(factors: tuple[jax.Array, jax.Array], dz_NV: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_ND, head_VD = factors
    dz_NV = dz_NV.astype(x_ND.dtype)
    return dz_NV @ head_VD, dz_NV.T @ x_ND


_products.defvjp(lambda x_ND, head_VD: (_products(x_ND, head_VD), (x_ND, head_VD)), _products_backward)


def summed_cross_entropy(
    x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, *, cap: float
) -> jax.Array:
    """Return the sum of `cross_entropy` over the tokens, f32 [], computed in chunks.

    The forward pass of a derivative also computes the gradients, chunk by chunk: three products instead of four, and
    no [N, V] array. Capped logits cannot overflow exp, so the cap is subtracted instead of a maximum. The target's
    logit is computed from its weight row, which avoids a scatter. Timings: docs/LOG.md.

    `x_ND` and `head_VD` have one float dtype. Targets are i32, each below V. The cap is at most `MAX_CAP`.
    """
    return _summed(x_ND, head_VD, targets_N, cap)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _summed(x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, cap: float) -> Any:
    def add(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _score(chunk[0], head_VD, chunk[1], cap).loss, None

    return jax.lax.scan(add, _zero_like(x_ND, ()), _chunks(x_ND, targets_N))[0]


class _Scored(NamedTuple):
    """Loss of a chunk, and the terms of its gradients."""

    loss: jax.Array  #: f32 [], summed nats
    exp_NV: jax.Array  #: exp(logit - cap)
    sum_N: jax.Array
    tanh_NV: jax.Array


def _score(x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, cap: float) -> _Scored:
    tanh_NV = jnp.tanh(jnp.einsum("nd,vd->nv", x_ND, head_VD, preferred_element_type=jnp.float32) / cap)
    exp_NV = jnp.exp(cap * tanh_NV - cap)
    sum_N = _row_sums(exp_NV)
    z_N = jnp.einsum("nd,nd->n", x_ND, head_VD[targets_N], preferred_element_type=jnp.float32)
    target_N = _capped(z_N, cap)
    return _Scored(jnp.sum(jnp.log(sum_N) + cap - target_N), exp_NV, sum_N, tanh_NV)


def _forward(
    x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, cap: float
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def add(
        carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        (total, dhead_VD), (x_ND, targets_N) = carry, chunk
        loss, exp_NV, sum_N, tanh_NV = _score(x_ND, head_VD, targets_N, cap)
        is_target_NV = jax.lax.broadcasted_iota(jnp.int32, exp_NV.shape, 1) == targets_N[:, None]
        dlogits_NV = exp_NV / sum_N[:, None] - is_target_NV
        dz_NV = (dlogits_NV * (1 - tanh_NV * tanh_NV)).astype(x_ND.dtype)
        dhead_VD += jnp.einsum("nv,nd->vd", dz_NV, x_ND, preferred_element_type=jnp.float32)
        return (total + loss, dhead_VD), dz_NV @ head_VD

    start = _zero_like(x_ND, ()), _zero_like(x_ND, head_VD.shape)
    (total, dhead_VD), dx_CND = jax.lax.scan(add, start, _chunks(x_ND, targets_N))
    return total, (dx_CND.reshape(x_ND.shape), dhead_VD.astype(head_VD.dtype))


def _backward(cap: float, grads: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    del cap
    dx_ND, dhead_VD = grads
    return (g * dx_ND).astype(dx_ND.dtype), (g * dhead_VD).astype(dhead_VD.dtype), None


_summed.defvjp(_forward, _backward)


def _row_sums(x_NV: jax.Array) -> jax.Array:
    """Sum over the last axis, first in groups of up to 128 columns.

    XLA for CPU fuses exp into a plain reduction and does not vectorise the result, which is 2.5 times slower.
    A product with ones prevents that, and groups keep its rounding error below 1e-6 of the sum.
    """
    group = math.gcd(x_NV.shape[1], 128)
    groups = x_NV.reshape(len(x_NV), -1, group)
    exact = jax.lax.Precision.HIGHEST  # a GPU would round float32 factors to TF32
    return jnp.sum(jnp.matmul(groups, jnp.ones(group, x_NV.dtype), precision=exact), axis=1)


def _capped(z: jax.Array, cap: float) -> jax.Array:
    return z if math.isinf(cap) else cap * jnp.tanh(z / cap)


def fewest_chunks(num_tokens: int, most_tokens: int) -> int:
    """Return the smallest number of equal chunks of at most `most_tokens` each."""
    return next(n for n in range(1, num_tokens + 1) if num_tokens % n == 0 and num_tokens <= n * most_tokens)


def in_chunks(x_ND: jax.Array, targets_N: jax.Array, num_chunks: int) -> tuple[jax.Array, jax.Array]:
    """Split both into equal chunks: [C, N / C, D] and [C, N / C]."""
    return x_ND.reshape(num_chunks, -1, x_ND.shape[1]), targets_N.reshape(num_chunks, -1)


def _chunks(x_ND: jax.Array, targets_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    return in_chunks(x_ND, targets_N, fewest_chunks(len(x_ND), CHUNK_TOKENS))


def _zero_like(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return float32 zeros that vary over the same mesh axes as `x`; a scan inside shard_map needs that."""
    return jnp.zeros(shape, jnp.float32) + 0 * x.ravel()[0].astype(jnp.float32)
