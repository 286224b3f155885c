"""Muon: momentum, then the nearest semi-orthogonal matrix.

It sees banks [K, m, n] of whole matrices with m <= n (`params.Layout`), all of them local, so it is batched
and communicates nothing. Source: Jordan et al. 2024; coefficients and Nesterov form of record 21.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

#: Quintic Newton-Schulz coefficients: steep at zero; singular values end in about 0.7 .. 1.2, not at 1.
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonalize(g_Kmn: jax.Array, *, steps: int) -> jax.Array:
    """Pulls the singular values of each matrix towards one: x <- A x + (B s + C s^2) x with s = x x^T.

    Args:
        g_Kmn: matrices with m <= n (so that s is the smaller square); leading axes are batch.
        steps: five in every record.

    Returns:
        Same shape and dtype. Zero stays zero.

    Raises:
        ValueError: if m > n.
    """
    m, n = g_Kmn.shape[-2:]
    if m > n:
        raise ValueError(f"got matrices of {m} x {n}, need rows <= columns; transpose them")
    x = g_Kmn / (jnp.linalg.norm(g_Kmn, axis=(-2, -1), keepdims=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = A * x + (B * s + C * s @ s) @ x
    return x


def shape_factor(rows: int, cols: int) -> float:
    """How much further a tall matrix is moved: sqrt(max(1, rows / cols)), of the matrix as declared."""
    return math.sqrt(max(1.0, rows / cols))


class MuonState(NamedTuple):
    """Running mean of the gradients, one array for each bank."""

    momentum: Any


def scale_by_muon(*, steps: int) -> optax.GradientTransformationExtraArgs:
    """m <- mu m + (1 - mu) g;  update = orthogonalize(mu m + (1 - mu) g). `momentum` (mu) is an extra argument."""

    def init(params: optax.Params) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: optax.Updates, state: MuonState, params: optax.Params | None = None, *, momentum: jax.Array, **_: Any
    ) -> tuple[optax.Updates, MuonState]:
        del params
        mix = lambda old, new: momentum * old + (1 - momentum) * new  # noqa: E731
        mean = jax.tree.map(mix, state.momentum, updates)
        nesterov = jax.tree.map(mix, mean, updates)
        return jax.tree.map(lambda g: orthogonalize(g, steps=steps), nesterov), MuonState(mean)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
