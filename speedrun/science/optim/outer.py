"""Outer Nesterov momentum around any optimiser, with one worker. Source: Snoo; MuLoCo with K = 1; DiLoCo."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from speedrun.ground.limits import Count, Momentum, Rate
from speedrun.science.params import Layout


class OuterState(NamedTuple):
    """`anchor` (parameters at the start of the round) and `velocity` have dtype and sharding of the parameters."""

    inner: optax.OptState
    step: jax.Array
    anchor: Any
    velocity: Any


def outer_nesterov(
    inner: optax.GradientTransformation, every: int, lr: float, momentum: float
) -> optax.GradientTransformationExtraArgs:
    """Return `inner` with a Nesterov step at the end of each round of `every` steps (`Outer`)."""
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> OuterState:
        anchor, velocity = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return OuterState(inner.init(params), jnp.zeros((), jnp.int32), anchor, velocity)

    def update(updates: Any, state: OuterState, params: Any, **extra: Any) -> tuple[Any, OuterState]:
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        is_first, is_last = (state.step % every == at for at in (0, every - 1))
        anchor = jax.tree.map(lambda p, a: jnp.where(is_first, p, a), params, state.anchor)
        gone = jax.tree.map(lambda a, p, u: a - (p.astype(jnp.float32) + u), anchor, params, updates)
        v = jax.tree.map(
            lambda g, v: jnp.where(is_last, jnp.float32(momentum) * v + g, v), gone, state.velocity
        )
        moves = jax.tree.map(
            lambda u, g, v: jnp.where(is_last, u + (1 - lr) * g - lr * momentum * v, u), updates, gone, v
        )
        velocity = jax.tree.map(lambda v, old: v.astype(old.dtype), v, state.velocity)
        return moves, OuterState(inner_state, state.step + 1, anchor, velocity)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class Outer:
    """At the end of each round of the inner optimiser's steps, x becomes a - lr (g + momentum v).

    Here a is x at the start of the round, g = a - x, and v <- momentum v + g. With lr 1 and momentum 0 it is `inner`
    itself: adding zeros would change last bits, since XLA contracts an update's last product with the step's sum.
    """

    inner: Any  #: the optimiser of a recipe
    every: Count  #: steps of a round
    lr: Rate
    momentum: Momentum

    def transform(self, layout: Layout) -> optax.GradientTransformationExtraArgs:
        """Return the transformation of packed parameters."""
        inner = self.inner.transform(layout)
        is_identity = (self.lr, self.momentum) == (1, 0)
        return inner if is_identity else outer_nesterov(inner, self.every, self.lr, self.momentum)
