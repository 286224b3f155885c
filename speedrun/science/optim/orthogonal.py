"""Muon: momentum, then the nearest semi-orthogonal matrix.

Works on banks [K, m, n] of whole local matrices with m <= n (`params.Layout`), so it is batched and needs no
communication. Source: Jordan et al. 2024; coefficients and Nesterov form of record 21.

Means begin at zero and are not corrected, as in record 21 and torch. `optax.contrib.muon` divides M of step t by
1 - mu^(t + 1) and g by 1 - mu^t in the Nesterov form below: for random gradients the second update differs by 9 to 15 %
of its norm, the tenth by 2 to 3 %. It adds 1e-8 to norms, we 1e-7; torch takes the larger of norm and 1e-7.
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
