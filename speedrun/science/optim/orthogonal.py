"""Muon: momentum, then the nearest semi-orthogonal matrix.

Works on banks [K, m, n] of whole local matrices with m <= n (`params.Layout`), so it is batched and needs no
communication. Means start at zero and are not bias-corrected, in contrast to `optax.contrib.muon`.
Source: Jordan et al. 2024; coefficients and Nesterov form of record 21.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from speedrun.science.inputs import Inputs
from speedrun.science.optim.banks import in_stacks, quintics
from speedrun.science.params import Dtype, Member, Params

#: Quintic Newton-Schulz coefficients, steep at zero. Singular values end between about 0.7 and 1.2.
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonalize(g_Kmn: jax.Array, *, steps: int, dtype: Dtype) -> jax.Array:
    """Move singular values of each matrix (m <= n) towards one, by steps of `quintics` in `dtype`. Zero stays zero."""
    x = g_Kmn.astype(dtype)
    return quintics(x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7), [(A, B, C)] * steps)


def shape_factor(matrix: Member) -> float:
    """Return the update scale of a matrix: sqrt(max(1, rows / cols))."""
    return math.sqrt(max(1.0, matrix.rows / matrix.cols))


class MuonState(NamedTuple):
    """Running mean of the gradients by bank."""

    momentum: Any


def scale_by_muon(
    factors: Callable[[], Params], *, steps: int, dtype: Dtype
) -> optax.GradientTransformationExtraArgs:
    """M <- mu M + (1 - mu) G;  update = factor * orthogonalize(mu M + (1 - mu) G).

    `inputs["momentum"]` is mu; `factors()` returns the factor of each matrix (f32 [K, 1, 1]) by bank.
    """

    def init(params: optax.Params) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    @jax.named_scope("muon")
    def update(
        updates: optax.Updates, state: MuonState, params: Any = None, *, inputs: Inputs, **_: Any
    ) -> tuple[optax.Updates, MuonState]:
        momentum = inputs["momentum"]

        def lerp(old: jax.Array, new: jax.Array) -> jax.Array:
            return momentum * old + (1 - momentum) * new

        mean = jax.tree.map(lerp, state.momentum, updates)
        nesterov = jax.tree.map(lerp, mean, updates)
        paths, tree = jax.tree_util.tree_flatten_with_path(nesterov)
        directions = in_stacks([x for _, x in paths], partial(orthogonalize, steps=steps, dtype=dtype))
        factor = factors()
        moves = [factor[path[-1].key] * x for (path, _), x in zip(paths, directions, strict=True)]
        return tree.unflatten(moves), MuonState(mean)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
