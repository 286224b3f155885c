"""Optimisers of recipes: a transformation of packed parameters for each group."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from speedrun.base.errors import UsageError
from speedrun.base.field_types import Momentum, Natural, Positive, Rate
from speedrun.science.inputs import Inputs
from speedrun.science.optim.orthogonal import scale_by_muon, shape_factor
from speedrun.science.params import Dtype, Layout, Member
from speedrun.science.rows import to_dense


def by_group(
    transforms: Mapping[str, optax.GradientTransformation], layout: Layout
) -> optax.GradientTransformationExtraArgs:
    """Apply the transformation of its group to each packed array; raise UsageError for a group without one."""
    if missing := sorted({*layout.groups.values()} - {*transforms}):
        raise UsageError(f"its optimizer has no transformation for group {missing[0]!r} of its table")
    inner = optax.partition({**transforms}, layout.groups)

    def update(grads: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
        return inner.update(jax.tree.map(to_dense, params, grads), state, params, **more)

    return optax.GradientTransformationExtraArgs(inner.init, update)  # pyright: ignore[reportArgumentType]


def scale_by_input(name: str) -> optax.GradientTransformationExtraArgs:
    """Multiply updates by a scheduled input."""

    def update(updates: Any, state: Any, params: Any = None, *, inputs: Inputs, **_: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda u: inputs[name] * u, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam without weight decay, computed in float32. Moments have the dtype of the parameter."""

    beta1: Momentum
    beta2: Momentum
    eps: Positive

    def at(self, lr: float) -> optax.GradientTransformation:
        """Return the transformation for a learning rate."""
        adam = in_float32(optax.scale_by_adam(self.beta1, self.beta2, self.eps))
        return optax.chain(adam, optax.scale(-lr))


def in_float32(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Compute a transformation in float32, and keep the dtype of its state."""

    def wide(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = transform.update(jax.tree.map(wide, updates), jax.tree.map(wide, state), params)
        return updates, optax.tree.cast_like(new, state)

    return optax.GradientTransformation(transform.init, update)


@dataclass(frozen=True, slots=True)
class MuonAndAdam:
    """Muon for group "matrix", Adam for the others. Learning rates are multiplied by the input `lr_scale`."""

    muon_lr: Rate
    muon_steps: Natural
    muon_dtype: Dtype  #: of the Newton-Schulz iteration
    head_lr: Rate
    adam: Adam
    embed_lr: Rate | None = None  #: None: the table has no such group
    scalar_lr: Rate | None = None
    factor_of: Callable[[Member], float] = shape_factor  #: of `muon_lr`

    def transform(self, layout: Layout) -> optax.GradientTransformationExtraArgs:
        """Return the transformation of packed parameters."""
        factors = partial(layout.per_matrix, self.factor_of)
        muon = scale_by_muon(factors, steps=self.muon_steps, dtype=self.muon_dtype)
        rates = {"embed": self.embed_lr, "head": self.head_lr, "scalar": self.scalar_lr}
        groups = {"matrix": optax.chain(muon, optax.scale(-self.muon_lr))}
        groups |= {name: self.adam.at(lr) for name, lr in rates.items() if lr is not None}
        return optax.chain(by_group(groups, layout), scale_by_input("lr_scale"))
