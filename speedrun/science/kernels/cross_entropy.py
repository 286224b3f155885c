"""Vocabulary head, soft cap and loss: the definition, and an implementation for CPUs that computes logits in chunks.

Legend: N tokens, D model, V vocabulary, M targets of a token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from speedrun.science.kernels.linear import transposed

#: Most tokens per chunk: 256 x 50,304 float32 logits fit a CPU's caches and keep its GEMMs busy.
CHUNK_TOKENS = 256
#: Above it exp(-2 cap), the smallest possible term of a sum, underflows float32.
MAX_CAP = 40.0


@dataclass(frozen=True, slots=True)
class Cap:
    """A soft cap of logits: height * tanh((z + shift) / unit).

    Records write 23 sigmoid((z + 5) / 7.5) for Cap(11.5, 15, 5). Both differ by a constant, which softmax ignores.
    """

    height: float  #: at most `MAX_CAP` for a loss
    unit: float
    shift: float = 0.0

    def tanh(self, z: jax.Array, scale: float = 1.0) -> jax.Array:
        """Return the tanh of the cap in float32, for logits that were multiplied by `scale`."""
        return jnp.tanh((z.astype(jnp.float32) + scale * self.shift) / (scale * self.unit))


class Targets(NamedTuple):
    """What each token predicts. The loss is the sum over n and m of weights_NM * nll_NM.

    Its gradient with respect to capped logits is softmax_N times the softmax, minus weights_NM at the targets. This is
    the derivative if softmax_N is the sum of the weights. Record 89 includes the weights of targets that do not exist.
    """

    ids_NM: jax.Array  #: i32, each below V; -1 for none
    weights_NM: jax.Array  #: f32; 0 where there is no target
    softmax_N: jax.Array  #: f32


class Losses(NamedTuple):
    """Sums over tokens in nats, f32 []."""

    weighted: jax.Array
    first: jax.Array  #: of the first targets with weight 1, for logs; it has no gradient


def single_targets(targets_N: jax.Array) -> Targets:
    """Return one target for each token, with weight 1."""
    ones_N = jnp.ones(targets_N.shape, jnp.float32)
    return Targets(targets_N[:, None], ones_N[:, None], ones_N)


def logits(x_ND: jax.Array, head_VD: jax.Array, *, cap: float | Cap) -> jax.Array:
    """Return capped x W^T in float32: [N, V]."""
    return _capped(jnp.einsum("nd,vd->nv", x_ND, head_VD, preferred_element_type=jnp.float32), as_cap(cap))


def weighted_cross_entropy(x_ND: jax.Array, head_VD: jax.Array, targets: Targets, *, cap: Cap) -> Losses:
    """Return the losses of weighted targets: the definition, also of the gradient."""
    return _define(logits(x_ND, head_VD, cap=cap), targets)


def _define(logits_NV: jax.Array, targets: Targets) -> Losses:
    lse_N = jax.nn.logsumexp(logits_NV, axis=1)
    losses = sum_losses(lse_N, jnp.take_along_axis(logits_NV, targets.ids_NM, axis=1), targets)
    missing_N = targets.softmax_N - jnp.sum(targets.weights_NM, axis=1)
    zero = jnp.sum(missing_N * (lse_N - jax.lax.stop_gradient(lse_N)))
    return losses._replace(weighted=losses.weighted + zero)


def sum_losses(lse_N: jax.Array, logits_NM: jax.Array, targets: Targets) -> Losses:
    """Return the losses, given log sums of exponentials and the logits of targets."""
    nll_NM = lse_N[:, None] - logits_NM
    first = jnp.sum(nll_NM[:, 0], where=targets.ids_NM[:, 0] >= 0)
    return Losses(jnp.sum(targets.weights_NM * nll_NM), jax.lax.stop_gradient(first))


def weighted_uncapped(
    x_ND: jax.Array, head_VD: jax.Array, targets: Targets, *, cap: Cap, num_chunks: int
) -> Losses:
    """Return `weighted_cross_entropy` for any cap, in four products: the backward pass recomputes the logits.

    The gradient of the head is summed over the chunks in float32.
    """
    wide_VD = head_VD.astype(jnp.float32)

    @jax.checkpoint
    def score(x_ND: jax.Array, targets: Targets) -> tuple[Losses, None]:
        return _define(_capped(products(x_ND, wide_VD.astype(head_VD.dtype)), cap), targets), None

    return _over_chunks(score, x_ND, targets, num_chunks)[0]


@jax.custom_vjp
def products(x_ND: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Return x W^T in float32. For fast products, the backward pass rounds the gradient to the dtype of `x_ND`."""
    return jnp.einsum("nd,vd->nv", x_ND, head_VD, preferred_element_type=jnp.float32)


def _products_backward(factors: tuple[jax.Array, jax.Array], dz_NV: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_ND, head_VD = factors
    dz_NV = dz_NV.astype(x_ND.dtype)
    return dz_NV @ head_VD, dz_NV.T @ x_ND


products.defvjp(lambda x_ND, head_VD: (products(x_ND, head_VD), (x_ND, head_VD)), _products_backward)


class Implementation(NamedTuple):
    """A way to compute the capped loss head."""

    #: States and weights -> the factors of the products.
    factors: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    #: Factors and targets of a chunk -> (losses, gradient of weights in f32), gradient of states.
    differentiate: Callable[[jax.Array, jax.Array, Targets], tuple[tuple[Losses, jax.Array], jax.Array]]
    scales: tuple[float, float] = (1.0, 1.0)  #: of the gradients of states and of weights


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def in_chunks(
    x_ND: jax.Array, head_VD: jax.Array, targets: Targets, impl: Implementation, num_chunks: int
) -> Losses:
    """Return `weighted_cross_entropy` by an implementation. Only states and weights have gradients.

    The forward pass also computes the gradients, chunk by chunk: three products instead of four, and no [N, V] array
    of all chunks. XLA drops the gradients where they are not used.
    """
    return _forward(x_ND, head_VD, targets, impl, num_chunks)[0]


def _forward(
    x_ND: jax.Array, head_VD: jax.Array, targets: Targets, impl: Implementation, num_chunks: int
) -> Any:
    x_ND, factor_VD = impl.factors(x_ND, head_VD)
    (losses, dhead_VD), dx_ND = _over_chunks(
        lambda x_ND, targets: impl.differentiate(x_ND, factor_VD, targets), x_ND, targets, num_chunks
    )
    # The last array only carries the head's dtype to the backward pass.
    return losses, (dx_ND, dhead_VD, jnp.zeros((), head_VD.dtype))


def _backward(impl: Implementation, num_chunks: int, saved: tuple[jax.Array, ...], g: Losses) -> Any:
    del num_chunks
    dx_ND, dhead_VD, like_head = saved
    by_x, by_head = (g.weighted / scale for scale in impl.scales)
    return (by_x * dx_ND).astype(dx_ND.dtype), (by_head * dhead_VD).astype(like_head.dtype), None


in_chunks.defvjp(_forward, _backward)


def _over_chunks(function: Callable[..., Any], x_ND: jax.Array, targets: Targets, num_chunks: int) -> Any:
    """Apply a function to equal parts of the tokens; sum its first results, concatenate its second ones."""
    chunks = jax.tree.map(lambda a: a.reshape(num_chunks, -1, *a.shape[1:]), (x_ND, targets))

    def add(total: Any, chunk: tuple[jax.Array, Targets]) -> tuple[Any, Any]:
        sums, rows_ND = function(*chunk)
        return jax.tree.map(jnp.add, total, sums), rows_ND

    # The first chunk starts the sums, so that a single chunk needs no loop.
    sums, rows_ND = function(*jax.tree.map(lambda a: a[0], chunks))
    if num_chunks > 1:
        sums, rest_CND = jax.lax.scan(add, sums, jax.tree.map(lambda a: a[1:], chunks))
        all_CND = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), rows_ND, rest_CND)
        rows_ND = jax.tree.map(lambda a: a.reshape(x_ND.shape), all_CND)
    return sums, rows_ND


def min_chunks(num_tokens: int, max_tokens: int) -> int:
    """Return the smallest number of equal chunks of at most `max_tokens`."""
    return next(n for n in range(1, num_tokens + 1) if num_tokens % n == 0 and num_tokens <= n * max_tokens)


def dlogits(exp_NV: jax.Array, sum_N: jax.Array, tanh_NV: jax.Array, targets: Targets, cap: Cap) -> jax.Array:
    """Return the gradient with respect to logits before the cap: f32 [N, V]."""
    slope = cap.height / cap.unit
    # The factors of a row are multiplied first, as a pass over all logits is bound by its instructions.
    dcapped_NV = exp_NV / (sum_N / (slope * targets.softmax_N))[:, None]
    column_NV = jax.lax.broadcasted_iota(jnp.int32, exp_NV.shape, 1)
    for ids_N, weights_N in zip(targets.ids_NM.T, slope * targets.weights_NM.T, strict=True):
        dcapped_NV -= weights_N[:, None] * (column_NV == ids_N[:, None])
    return dcapped_NV * (1 - tanh_NV * tanh_NV)


def weighted_on_cpu(x_ND: jax.Array, head_VD: jax.Array, targets: Targets, *, cap: Cap) -> Losses:
    """Return `weighted_cross_entropy` in chunks that stay in a CPU's cache, for factors of one dtype.

    Capped logits cannot overflow exp, so the cap is subtracted instead of a maximum. A target's logit is computed
    from its weight row, which avoids a scatter.
    """
    impl = Implementation(lambda x_ND, head_VD: (x_ND, head_VD), partial(_differentiate, cap=cap))
    return in_chunks(x_ND, head_VD, targets, impl, min_chunks(len(x_ND), CHUNK_TOKENS))


def _differentiate(x_ND: jax.Array, head_VD: jax.Array, targets: Targets, *, cap: Cap) -> Any:
    wide = partial(jnp.einsum, preferred_element_type=jnp.float32)
    tanh_NV = cap.tanh(wide("nd,vd->nv", x_ND, head_VD))
    exp_NV = jnp.exp(cap.height * tanh_NV - cap.height)
    sum_N = _row_sums(exp_NV)
    z_NM = jnp.stack([wide("nd,nd->n", x_ND, head_VD[ids_N]) for ids_N in targets.ids_NM.T], axis=1)
    losses = sum_losses(jnp.log(sum_N) + cap.height, _capped(z_NM, cap), targets)
    dz_NV = dlogits(exp_NV, sum_N, tanh_NV, targets, cap).astype(x_ND.dtype)
    return (losses, wide("vn,nd->vd", transposed(dz_NV), x_ND)), dz_NV @ head_VD


def _row_sums(x_NV: jax.Array) -> jax.Array:
    """Sum over the last axis, first in groups of up to 128 columns to limit the rounding error."""
    # XLA for CPU would fuse exp into a plain reduction without vectorising it, which is 2.5 times slower.
    group = math.gcd(x_NV.shape[1], 128)
    groups = x_NV.reshape(len(x_NV), -1, group)
    exact = jax.lax.Precision.HIGHEST  # a GPU would round float32 factors to TF32
    return jnp.sum(jnp.matmul(groups, jnp.ones(group, x_NV.dtype), precision=exact), axis=1)


def as_cap(cap: float | Cap) -> Cap:
    """Return the cap c tanh(z / c) of a number c; infinity caps nothing."""
    return cap if isinstance(cap, Cap) else Cap(cap, cap)


def _capped(z: jax.Array, cap: Cap) -> jax.Array:
    return z if math.isinf(cap.height) else cap.height * cap.tanh(z)
