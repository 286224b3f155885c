"""Averages of late weights, which replace the weights after the last step."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from speedrun.base.errors import UsageError
from speedrun.base.field_types import Rate
from speedrun.base.mesh import DATA
from speedrun.science.inputs import Inputs
from speedrun.science.params import Layout, Params


@dataclass(frozen=True, slots=True)
class Average:
    """A running mean of the weights of some groups."""

    groups: tuple[str, ...]
    input: str  #: that gives the weight of a step: 0 where it does not count, 1 where the mean begins
    share: Rate  #: of the mean in shipped weights


#: The running means, f32 by packed name.
Means = tuple[Params, ...]


def averages(
    given: tuple[Average, ...], rescaled: tuple[str, ...], layout: Layout
) -> optax.GradientTransformationExtraArgs:
    """Keep averages of the weights after each update, and ship them where `inputs["use_averages"]`, a static input.

    Averages replace their share of the weights one after the other, so one may mix with what an earlier one left. Then
    each group of `rescaled` gets the Frobenius norm that it had before. Raise UsageError for a group that has none.
    """
    known = {group for name, group in layout.groups.items() if name not in layout.reads}
    if others := {*rescaled, *(group for one in given for group in one.groups)} - known:
        found = f"no averages of {', '.join(sorted(others))}"
        raise UsageError(f"{found}; need some of {', '.join(sorted(known))}")
    names = [[name for name, group in layout.groups.items() if group in one.groups] for one in given]

    def init(params: Params) -> Means:
        return tuple({name: jnp.zeros_like(params[name], jnp.float32) for name in own} for own in names)

    @jax.named_scope("averages")
    def update(
        moves: Params, state: Means, params: Params, *, inputs: Inputs, **_: Any
    ) -> tuple[Params, Means]:
        def stored(p: jax.Array, move: jax.Array) -> jax.Array:
            return (p.astype(jnp.float32) + move).astype(p.dtype).astype(jnp.float32)

        weights = {name: stored(params[name], moves[name]) for own in names for name in own}
        means, shipped = [], dict(weights)
        for one, old in zip(given, state, strict=True):
            means.append(mean := {k: x + inputs[one.input] * (weights[k] - x) for k, x in old.items()})
            shipped |= {name: shipped[name] + one.share * (x - shipped[name]) for name, x in mean.items()}
        if not inputs["use_averages"]:
            return moves, tuple(means)
        for group in rescaled:
            own = [name for name in shipped if layout.groups[name] == group]
            factor = _norm(weights, own) / jnp.maximum(_norm(shipped, own), 1e-30)  # a warm-up ships zeros
            shipped |= {name: factor * shipped[name] for name in own}
        return moves | {k: x - params[k].astype(jnp.float32) for k, x in shipped.items()}, tuple(means)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _norm(arrays: Params, names: list[str]) -> jax.Array:
    """Return the Frobenius norm over all devices. Call it inside `shard_map`."""
    return jnp.sqrt(jax.lax.psum(sum(jnp.sum(arrays[name] * arrays[name]) for name in names), DATA))
