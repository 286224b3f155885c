"""Evaluates a causal function of tokens one position at a time.

A recipe's `forward` maps all tokens of a sequence to all states; generation needs only the newest. `Incremental` traces
`forward` once. It computes what does not depend on tokens (weights, angles) once, and evaluates each other equation

    by row   if it acts on each position separately: at the newest position only
    whole    if it mixes positions (a shift, a running sum): at all positions, with past rows from a cache

Products of the newest query with keys, and of its weights with values, take both from the cache. A cached row must not
depend on later tokens. A causal function can violate this: it may subtract a maximum over all positions and add it
again. `decode` detects this by comparing rows under two continuations.

Legend: T positions, B sequences (one), H heads, K head width, D model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from speedrun.model import equations
from speedrun.model.equations import Time, Values, bind, run, variables
from speedrun.science.kernels import attention as definition
from speedrun.science.kernels.choose import Kernels


@dataclass(frozen=True, eq=False)
class DecodingKernels(Kernels):
    """The reference implementations of all operations, without opaque kernels or limits on sequence length."""

    platform: str = "cpu"
    compute_capability: str = ""

    def attention(
        self, q_BTHK: Any, k_BTHK: Any, v_BTHK: Any, first_BT: jax.Array, /, **more: Any
    ) -> jax.Array:
        """Compute `Kernels.attention`."""
        if more.get("angles"):
            q_BTHK, k_BTHK = self.qk_norm(q_BTHK, k_BTHK, more["angles"])
        return definition.attention(q_BTHK, k_BTHK, v_BTHK, first_BT, scale=more["scale"])


class Row(NamedTuple):
    """A value at the newest position."""

    value: Any
    time: Time


class Whole(NamedTuple):
    """A value at all positions that depends on tokens; `time` is None if no axis is known to hold positions."""

    value: Any
    time: Time | None


class _Position:
    """Evaluates equations at position `t`."""

    def __init__(self, t: jax.Array, past: Values | None) -> None:
        self._t, self._past = t, past
        self.times: dict[Var, Time] = {}  #: position axes of the cached values
        self.cache: Values = {}  #: values needed at all positions, including the newest row

    def apply(self, eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """Evaluate an equation on values that are `Row`, `Whole`, or independent of tokens."""
        times = [x.time if isinstance(x, Row | Whole) else None for x in values]
        rows = [i for i, x in enumerate(values) if isinstance(x, Row)]
        wholes = [i for i, x in enumerate(values) if isinstance(x, Whole) and x.time is not None]
        for i in [*rows, *wholes]:
            way = equations.passage(eqn, i, values[i].time)
            if way is not None and self._fits(values, way.operands):
                # Keep integers whole: they are cheap, and then need no cache.
                if not rows and not jnp.issubdtype(equations.dtype_of(eqn.outvars[0]), jnp.inexact):
                    alike = all(x.time == times[i] for x in values if isinstance(x, Whole))
                    return self._whole(eqn, values, way.out if alike else None)
                operands = zip(eqn.invars, values, way.operands, strict=True)
                params = equations.with_shapes_of_rows(eqn, way.out)
                return [Row(y, way.out) for y in bind(eqn, [self._row(*x) for x in operands], params)]
        is_running = eqn.primitive.name in equations.RUNNING and not eqn.params["reverse"]
        return self._whole(eqn, values, times[0] if is_running else None)

    def _fits(self, xs: list[Any], times: Sequence[Time | None]) -> bool:
        """Return whether each row has its positions on the needed axis, or is needed whole."""
        return all(time in (None, x.time) for x, time in zip(xs, times, strict=True) if isinstance(x, Row))

    def _whole(self, eqn: JaxprEqn, values: list[Any], time: Time | None) -> list[Any]:
        found = bind(eqn, [self.whole(x, value) for x, value in zip(eqn.invars, values, strict=True)])
        return [Whole(y, time) for y in found]

    def whole(self, x: Any, value: Any) -> Any:
        """Return a value at all positions; for a row, take the past rows from the cache."""
        if not isinstance(value, Row):
            return value.value if isinstance(value, Whole) else value
        if x not in self.cache:
            past = jnp.zeros_like(x.aval) if self._past is None else self._past[x]
            self.times[x], start = value.time, self._t * value.time.per
            self.cache[x] = jax.lax.dynamic_update_slice_in_dim(past, value.value, start, value.time.axis)
        return self.cache[x]

    def _row(self, x: Any, value: Any, time: Time | None) -> Any:
        """Return a value at the newest position, or whole if `time` is None."""
        if isinstance(value, Row) and time is not None:
            return value.value
        return self.whole(x, value) if time is None else self.newest(self.whole(x, value), time)

    def newest(self, value: Any, time: Time) -> Any:
        """Return the entries of the newest position."""
        return jax.lax.dynamic_slice_in_dim(value, self._t * time.per, time.per, time.axis)


class Incremental:
    """A causal function (params, tokens_BT) -> x_BTD of one sequence: call `fixed` and `start`, then `step` repeatedly.

    All three are pure.
    """

    def __init__(
        self,
        function: Callable[[Any, jax.Array], jax.Array],
        params: Any,
        num_positions: int,
    ) -> None:
        """Trace a function of one sequence of `num_positions` tokens."""
        tokens = jax.ShapeDtypeStruct((1, num_positions), jnp.int32)
        jaxpr, consts = equations.traced(function, params, tokens)
        *self._params, self._tokens = jaxpr.invars
        self._states: Any = jaxpr.outvars[0]
        self._consts = dict(zip(jaxpr.constvars, consts, strict=True))
        on_tokens: set[Any] = {self._tokens}
        self._eqns: list[JaxprEqn] = []  #: those that depend on tokens
        self._fixed_eqns: list[JaxprEqn] = []
        for eqn in equations.needed(jaxpr):
            depends = on_tokens & {*variables(eqn)}
            on_tokens |= {*eqn.outvars} if depends else set()
            (self._eqns if depends else self._fixed_eqns).append(eqn)
        self._fixed = [*dict.fromkeys(x for eqn in self._eqns for x in variables(eqn) if x not in on_tokens)]
        self.kept: dict[Var, Time] = {}  #: variables whose past rows are needed

        def first(params: Any, tokens_BT: jax.Array) -> None:
            position = _Position(jnp.int32(0), None)
            self._advance(position, self.fixed(params), tokens_BT)
            self.kept = position.times

        jax.eval_shape(first, params, tokens)

    def differences(
        self, cache: list[jax.Array], other: list[jax.Array], num_positions: jax.Array
    ) -> jax.Array:
        """Return the maximum difference of the first rows, relative to the largest number: f32 []."""
        worst = jnp.float32(0)
        for x, y, time in zip(cache, other, self.kept.values(), strict=True):
            is_read = jnp.arange(x.shape[time.axis]) < num_positions * time.per
            is_read = jnp.expand_dims(is_read, [i for i in range(x.ndim) if i != time.axis])
            x, y = (jnp.where(is_read, one.astype(jnp.float32), 0) for one in (x, y))
            worst = jnp.maximum(worst, jnp.max(jnp.abs(x - y)) / jnp.maximum(jnp.max(jnp.abs(y)), 1e-30))
        return worst

    def fixed(self, params: Any) -> list[jax.Array]:
        """Return the values that do not depend on tokens."""
        values: Values = {**self._consts, **dict(zip(self._params, jax.tree.leaves(params), strict=True))}
        run(self._fixed_eqns, values)
        return [values[x] for x in self._fixed]

    def start(self, fixed: list[jax.Array], tokens_BT: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Return the states of all positions [1, T, D], and the cache for later steps."""
        values = self._values(fixed, tokens_BT)
        run(self._eqns, values)
        return values[self._states], [values[x] for x in self.kept]

    def step(
        self, fixed: list[jax.Array], cache: list[jax.Array], tokens_BT: jax.Array, t: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Return the state [1, 1, D] at position `t` and the new cache. `tokens_BT` holds all tokens up to `t`."""
        position = _Position(t, dict(zip(self.kept, cache, strict=True)))
        x_BTD = self._advance(position, fixed, tokens_BT)
        return x_BTD, [position.cache[x] for x in self.kept]

    def _advance(self, position: _Position, fixed: list[jax.Array], tokens_BT: jax.Array) -> jax.Array:
        values = self._values(fixed, Whole(tokens_BT, Time(1)))
        run(self._eqns, values, position.apply)
        x = values[self._states]
        return x.value if isinstance(x, Row) else position.newest(x.value, Time(1))

    def _values(self, fixed: list[jax.Array], tokens: Any) -> Values:
        return {**dict(zip(self._fixed, fixed, strict=True)), self._tokens: tokens}
