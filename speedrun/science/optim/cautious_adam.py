"""Adam as in record 89: sums of gradients over several steps, cautious decay, and two tables that begin as one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from speedrun.ground.limits import Momentum, Rate
from speedrun.science.inputs import Inputs
from speedrun.science.params import Params


@dataclass(frozen=True, slots=True)
class AdamGroup:
    """Settings of a group of parameters."""

    name: str
    lr: Rate  #: times the learning rate of all
    beta1: Momentum
    beta2: Momentum
    decay: Rate  #: times the decay of all


class AdamState(NamedTuple):
    """State by packed name."""

    num_updates: jax.Array  #: the same for each array
    waiting: Params  #: sum of gradients since the last update, in the dtype of the parameter
    mean: Params  #: running mean of the sums: f32
    square: Params  #: and of their squares: f32


def cautious_adam(
    groups: Mapping[str, AdamGroup], tied: tuple[str, str], lr: float, *, eps: float, decay: float
) -> optax.GradientTransformationExtraArgs:
    """Adam for the arrays of `groups` at steps with `inputs["adam"]`; the gradients of other arrays pass unchanged.

    a = lr * group.lr * lr_scale;  u = a sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps).
    Update: -(u + a^2 decay * group.decay W [u W > 0]).

    While `inputs["tied"]`, each of the two `tied` arrays gets the sum of both gradients, so equal arrays stay equal,
    with equal moments: at the end nothing needs to be copied. "adam" is compiled in; "tied" is traced.
    """

    def init(params: Params) -> AdamState:
        own = {name: params[name] for name in groups}
        mean, square = (jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), own) for _ in range(2))
        return AdamState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, own), mean, square)

    @jax.named_scope("adam")
    def update(
        grads: Params, state: AdamState, params: Params, *, inputs: Inputs, **_: Any
    ) -> tuple[Params, AdamState]:
        total = {name: waiting + grads[name].astype(waiting.dtype) for name, waiting in state.waiting.items()}
        if not inputs["adam"]:
            rest = {name: jnp.zeros_like(x) for name, x in state.mean.items()}
            return {**grads, **rest}, state._replace(waiting=total)
        both = total[tied[0]] + total[tied[1]]
        count, moves, mean, square = state.num_updates + 1, {**grads}, {}, {}
        for name, group in groups.items():
            sums = jnp.where(inputs["tied"], both, total[name]) if name in tied else total[name]
            g, w = sums.astype(jnp.float32), params[name].astype(jnp.float32)
            m = mean[name] = group.beta1 * state.mean[name] + (1 - group.beta1) * g
            v = square[name] = group.beta2 * state.square[name] + (1 - group.beta2) * g * g
            a = lr * group.lr * inputs["lr_scale"]
            corrected = a * jnp.sqrt(_since(group.beta2, count)) / _since(group.beta1, count)
            u = corrected * m / (jnp.sqrt(v) + eps)
            moves[name] = -(u + a * a * decay * group.decay * jnp.where(u * w > 0, w, 0.0))
        return moves, AdamState(count, jax.tree.map(jnp.zeros_like, total), mean, square)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _since(beta: float, count: jax.Array) -> jax.Array:
    """Return 1 - beta^count. In float32 the difference itself would lose six bits of 1 - 0.99."""
    return -jnp.expm1(count * jnp.float32(math.log(beta)))
