"""Vocabulary head, soft cap and loss: the definition, and a form that touches each logit as seldom as possible.

Legend: N tokens, D model, V vocabulary.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

#: Tokens whose logits exist at one time: 256 x 50,304 float32 fit the caches of a CPU and keep its GEMMs busy.
CHUNK_TOKENS = 256

#: Above it exp(-2 cap), the least a sum may hold, underflows float32.
MAX_CAP = 40.0


def logits(x_ND: jax.Array, head_VD: jax.Array, *, cap: float) -> jax.Array:
    """Cap * tanh(x W^T / cap) in float32: [N, V], each within +-cap.

    The record writes 30 sigmoid(z / 7.5), which is 15 tanh(z / 15) plus a constant that softmax ignores.
    """
    return _capped(jnp.einsum("nd,vd->nv", x_ND, head_VD, preferred_element_type=jnp.float32), cap)


def cross_entropy(x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, *, cap: float) -> jax.Array:
    """The definition: negative log likelihood of each target in nats, f32 [N]."""
    logits_NV = logits(x_ND, head_VD, cap=cap)
    target_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits_NV, axis=1) - target_N


def summed_cross_entropy(
    x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, *, cap: float
) -> jax.Array:
    """Sum of `cross_entropy` over the tokens, f32 [], chunk by chunk.

    When it is differentiated, the gradients are formed with the loss, while a chunk's logits are at hand: three
    products instead of four, and never a [N, V] array. Logits are capped, so exp cannot overflow and no pass is
    needed for a maximum: the cap itself is subtracted. The target's logit comes from its weight row, so that
    no gradient is scattered. Measured with 1,024 tokens and the GPT-2 vocabulary: docs/LOG.md.

    Args:
        x_ND: final hidden states; any float dtype.
        head_VD: weights of the vocabulary, same dtype.
        targets_N: i32, each below V.
        cap: of the logits; at most `MAX_CAP`.
    """
    return _summed(x_ND, head_VD, targets_N, cap)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _summed(x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, cap: float) -> Any:
    def add(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _score(chunk[0], head_VD, chunk[1], cap).loss, None

    return jax.lax.scan(add, _zero_like(x_ND, ()), _chunks(x_ND, targets_N))[0]


class _Scored(NamedTuple):
    """One chunk, and what its gradients are made of."""

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
    """Sum over the last axis, first inside groups of up to 128 columns.

    XLA for CPU fuses exp into a plain reduction and then computes both without vectors, 2.5 times slower; a
    product with ones keeps them apart, and groups keep its rounding error below 1e-6 of the sum.
    """
    group = math.gcd(x_NV.shape[1], 128)
    groups = x_NV.reshape(len(x_NV), -1, group)
    exact = jax.lax.Precision.HIGHEST  # a GPU would round float32 factors to TF32
    return jnp.sum(jnp.matmul(groups, jnp.ones(group, x_NV.dtype), precision=exact), axis=1)


def _capped(z: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(z / cap)


def _chunks(x_ND: jax.Array, targets_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both cut into even chunks along the first axis, as large as allowed."""
    size = max(size for size in range(1, min(CHUNK_TOKENS, len(x_ND)) + 1) if len(x_ND) % size == 0)
    return x_ND.reshape(-1, size, x_ND.shape[1]), targets_N.reshape(-1, size)


def _zero_like(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Float32 zeros that vary over the same mesh axes as `x`, as a scan inside shard_map must have them."""
    return jnp.zeros(shape, jnp.float32) + 0 * x.ravel()[0].astype(jnp.float32)
