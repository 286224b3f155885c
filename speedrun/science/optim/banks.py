"""Functions of banks of matrices: [K, m, n] with m <= n."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp


def quintics(x: jax.Array, coefficients: Sequence[tuple[float, float, float]]) -> jax.Array:
    """For each (a, b, c): x <- a x + (b s + c s^2) x with s = x x^T. The square s is the smaller one, as m <= n."""
    for a, b, c in coefficients:
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x


def in_stacks(banks: list[jax.Array], function: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
    """Apply a function of matrices to every bank. Banks of equal shape are stacked, as small ones do not fill a GPU."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, x_Kmn in enumerate(banks):
        alike.setdefault(x_Kmn.shape, []).append(i)
    done: dict[int, jax.Array] = {}
    for places in alike.values():
        stack = function(jnp.concatenate([banks[i] for i in places]))
        done |= dict(zip(places, jnp.split(stack, len(places)), strict=True))
    return [done[i] for i in range(len(banks))]
