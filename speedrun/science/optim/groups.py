"""Optimisers as values of a recipe: one transformation of packed parameters, made of one per group."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from speedrun.ground.errors import UsageError
from speedrun.ground.limits import Momentum, Natural, Positive, Rate
from speedrun.science.inputs import Inputs
from speedrun.science.optim.muon import scale_by_muon, shape_factor
from speedrun.science.params import Dtype, Layout


def by_group(
    transforms: Mapping[str, optax.GradientTransformation], layout: Layout
) -> optax.GradientTransformationExtraArgs:
    """Apply to each packed array the transformation of its group; raise UsageError for a group without one."""
    if missing := sorted({*layout.groups.values()} - {*transforms}):
        raise UsageError(f"its optimizer has no transformation for group {missing[0]!r} of its table")
    return optax.partition({**transforms}, layout.groups)


def scale_by_input(name: str) -> optax.GradientTransformationExtraArgs:
    """Multiply updates by a scheduled input."""

    def update(updates: Any, state: Any, params: Any = None, *, inputs: Inputs, **_: Any) -> tuple[Any, Any]:
        del params
        return jax.tree.map(lambda u: inputs[name] * u, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam with bias correction and without weight decay, in float32. Moments have the dtype of the parameter."""

    beta1: Momentum
    beta2: Momentum
    eps: Positive

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
    """Muon for the matrices inside blocks, Adam for tables, head and scalars (record 21).

    Learning rates are peak values, multiplied by the input `lr_scale`.
    """

    muon_lr: Rate
    muon_steps: Natural
    muon_dtype: Dtype  #: of the Newton-Schulz iteration
    embed_lr: Rate
    head_lr: Rate
    scalar_lr: Rate
    adam: Adam

    def transform(self, layout: Layout) -> optax.GradientTransformationExtraArgs:
        """Return the transformation of packed parameters."""
        factors = partial(layout.per_matrix, shape_factor)
        muon = scale_by_muon(factors, steps=self.muon_steps, dtype=self.muon_dtype)
        groups = {
            "matrix": optax.chain(muon, optax.scale(-self.muon_lr)),
            "embed": self.adam.at(self.embed_lr),
            "head": self.adam.at(self.head_lr),
            "scalar": self.adam.at(self.scalar_lr),
        }
        return optax.chain(by_group(groups, layout), scale_by_input("lr_scale"))
