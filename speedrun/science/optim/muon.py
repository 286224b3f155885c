"""Muon: momentum, then the nearest semi-orthogonal matrix.

Works on banks [K, m, n] of whole local matrices with m <= n (`params.Layout`), so it is batched and needs no
communication. Source: Jordan et al. 2024; coefficients and Nesterov form of record 21.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from speedrun.science.inputs import Inputs
from speedrun.science.params import Dtype, Member, Params

#: Quintic Newton-Schulz coefficients: steep at zero; singular values end at about 0.7 to 1.2, not at 1.
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonalize(g_Kmn: jax.Array, *, steps: int, dtype: Dtype) -> jax.Array:
    """Move the singular values of each matrix towards one: x <- A x + (B s + C s^2) x with s = x x^T.

    Args:
        g_Kmn: matrices with m <= n (so that s is the smaller square); leading axes are batch axes.
        steps: of the iteration; five in every record.
        dtype: of the iteration; bfloat16 in every record.

    Returns:
        Array of the same shape in `dtype`. Zero stays zero.
    """
    x = g_Kmn.astype(dtype)
    return quintics(x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7), [(A, B, C)] * steps)


def quintics(x: jax.Array, coefficients: Sequence[tuple[float, float, float]]) -> jax.Array:
    """For each (a, b, c) in turn: x <- a x + (b s + c s^2) x with s = x x^T. Raises ValueError if m > n."""
    m, n = x.shape[-2:]
    if m > n:
        raise ValueError(f"got matrices of {m} x {n}, need rows <= columns; transpose them")
    for a, b, c in coefficients:
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x


def shape_factor(matrix: Member) -> float:
    """Return the update scale of a matrix as declared: sqrt(max(1, rows / cols))."""
    return math.sqrt(max(1.0, matrix.rows / matrix.cols))


class MuonState(NamedTuple):
    """Running mean of the gradients, one array for each bank."""

    momentum: Any


def scale_by_muon(
    factors: Callable[[], Params], *, steps: int, dtype: Dtype
) -> optax.GradientTransformationExtraArgs:
    """M <- mu m + (1 - mu) g;  update = factor * orthogonalize(mu m + (1 - mu) g).

    Banks of equal shape are orthogonalised together: on eight devices each owns one matrix per bank, which is too
    small to fill a GPU.

    `inputs["momentum"]` is mu; `factors()` returns the `shape_factor` of each matrix (f32 [K, 1, 1]) by bank.
    """

    def init(params: optax.Params) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    @jax.named_scope("muon")
    def update(
        updates: optax.Updates,
        state: MuonState,
        params: optax.Params | None = None,
        *,
        inputs: Inputs,
        **_: Any,
    ) -> tuple[optax.Updates, MuonState]:
        del params
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


def in_stacks(banks: list[jax.Array], function: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
    """Apply a function of matrices to every bank, with banks of one shape stacked."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, x_Kmn in enumerate(banks):
        alike.setdefault(x_Kmn.shape, []).append(i)
    done: dict[int, jax.Array] = {}
    for places in alike.values():
        stack = function(jnp.concatenate([banks[i] for i in places]))
        done |= dict(zip(places, jnp.split(stack, len(places)), strict=True))
    return [done[i] for i in range(len(banks))]
