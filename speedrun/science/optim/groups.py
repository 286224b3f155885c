"""Optimisers as values of a recipe: one transformation per group of parameters.

Learning rates are peak values; the training step multiplies every update by the schedule's `lr_scale`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from speedrun.science.optim.muon import scale_by_muon
from speedrun.science.params import Dtype, Group

Transforms = dict[Group, optax.GradientTransformation]


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam with bias correction and without weight decay, in float32. Moments have the dtype of the parameter."""

    beta1: float
    beta2: float
    eps: float

    def at(self, lr: float) -> optax.GradientTransformation:
        """Return the transformation for a learning rate."""
        adam = in_float32(optax.scale_by_adam(self.beta1, self.beta2, self.eps))
        return optax.chain(adam, optax.scale(-lr))


def in_float32(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Make a transformation compute in float32 and keep the dtype of its state."""

    def cast(tree: Any, like: Any) -> Any:
        return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)

    def widen(tree: Any) -> Any:
        def wide(x: jax.Array) -> jax.Array:
            return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree.map(wide, tree)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = transform.update(widen(updates), widen(state), params)
        return updates, cast(new, state)

    return optax.GradientTransformation(transform.init, update)


@dataclass(frozen=True, slots=True)
class MuonAndAdam:
    """Muon for the matrices inside blocks, Adam for tables, head and scalars (record 21)."""

    muon_lr: float
    muon_steps: int
    muon_dtype: Dtype  #: of the Newton-Schulz iteration
    embed_lr: float
    head_lr: float
    scalar_lr: float
    adam: Adam

    def transforms(self) -> Transforms:
        """Return one transformation per group."""
        muon = scale_by_muon(steps=self.muon_steps, dtype=self.muon_dtype)
        return {
            "matrix": optax.chain(muon, optax.scale(-self.muon_lr)),
            "embed": self.adam.at(self.embed_lr),
            "head": self.adam.at(self.head_lr),
            "scalar": self.adam.at(self.scalar_lr),
        }
