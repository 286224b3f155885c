"""Outer Nesterov momentum around any optimiser, with one worker. Source: Snoo; MuLoCo with K = 1; DiLoCo."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from speedrun.science.params import Layout


class OuterState(NamedTuple):
    """`anchor` (parameters at the start of the round) and `velocity` have the dtype and sharding of parameters."""

    inner: optax.OptState
    count: jax.Array
    anchor: Any
    velocity: Any


@dataclass(frozen=True, slots=True)
class Outer:
    """The inner optimiser's steps; at the end of every round of them, x becomes a - lr (g + momentum v).

    Here a is the anchor, g = a - x, and v <- momentum v + g. Lr 1 with momentum 0 is `inner` itself: an added zero
    would change last bits, since XLA rounds the last product of an update and its sum with the parameter once.
    """

    inner: Any  #: optimiser of a recipe
    every: int  #: steps of a round
    lr: float
    momentum: float

    def __post_init__(self) -> None:
        if self.every < 1 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"every is {self.every}, momentum {self.momentum:g}; need at least 1, and 0 to below 1"
            )

    def transform(self, layout: Layout) -> optax.GradientTransformationExtraArgs:
        """Return the transformation of packed parameters."""
        inner = self.inner.transform(layout)
        return (
            inner
            if (self.lr, self.momentum) == (1, 0)
            else outer_nesterov(inner, self.every, self.lr, self.momentum)
        )


def outer_nesterov(
    inner: optax.GradientTransformation, every: int, lr: float, momentum: float
) -> optax.GradientTransformationExtraArgs:
    """Return `inner` with a Nesterov step at the end of every round of `every` steps (`Outer`)."""
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> OuterState:
        anchor, velocity = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return OuterState(inner.init(params), jnp.zeros((), jnp.int32), anchor, velocity)

    def update(updates: Any, state: OuterState, params: Any, **extra: Any) -> tuple[Any, OuterState]:
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        is_first, is_last = (state.count % every == at for at in (0, every - 1))

        def velocity(g: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.where(is_last, momentum * v.astype(jnp.float32) + g, v).astype(v.dtype)

        def move(u: jax.Array, g: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.where(is_last, u + (1 - lr) * g - lr * momentum * v.astype(jnp.float32), u)

        anchor = jax.tree.map(lambda p, a: jnp.where(is_first, p, a), params, state.anchor)
        gone = jax.tree.map(lambda a, p, u: a - (p.astype(jnp.float32) + u), anchor, params, updates)
        velocities = jax.tree.map(velocity, gone, state.velocity)
        moves = jax.tree.map(move, updates, gone, velocities)
        return moves, OuterState(inner_state, state.count + 1, anchor, velocities)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
