"""A causal function of tokens, evaluated one position at a time.

A recipe's `forward` maps all tokens of a sequence to all its states; to generate, only the newest state is needed. Its
jaxpr is read once. What depends on no token (weights, angles) is computed once. Of the rest, each equation is evaluated

    by row   if it acts on each position by itself: at the newest position only
    whole    if it mixes positions (a shift, a running sum): at all of them, with rows of the past from a cache

and attention for the newest query, on cached keys and values. So no model has a second form for generation, and a
recipe from outside needs none. The price: what is evaluated whole costs as much as in `forward`. In the ladder that is
little, but for the composed heads of record 89.

A row is an entry of the whole value. Rows of the past may be kept only if they do not depend on tokens that follow, and
a causal function need not compute them so: it may subtract a maximum over all positions, and add it again. No rule on
equations can know that. So it is tried: where sequences that begin alike have other rows, it is evaluated whole. Other
tokens may still do what those of the trial did not: `decode` compares the beginning of each text.

Legend: T positions, B sequences (one), H heads, K head width, S keys, D model.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from speedrun.science.kernels import attention as definition
from speedrun.science.kernels.attention import Sight
from speedrun.science.kernels.choose import Kernels
from speedrun.trained.alignment import RUNNING, Time, passage, shape_of, with_shapes_of_rows
from speedrun.trained.equations import Values, bind, needed, run, traced, variables


@dataclass(frozen=True, eq=False)
class DecodingKernels(Kernels):
    """The definitions of all operations, with attention as one equation that `Incremental` knows."""

    platform: str = "cpu"  #: where no operation is an opaque kernel
    compute_capability: str = ""

    def attention(self, q_BTHK: Any, k_BTHK: Any, v_BTHK: Any, sight: Sight, /, **more: Any) -> jax.Array:
        """Compute `kernels.attention`."""
        return jax.jit(_attention)(q_BTHK, k_BTHK, v_BTHK, sight.first_BT, jnp.float32(more["scale"]))


_ATTENTION = "speedrun_attention_of_decoding"


def _attention(q_BTHK: Any, k_BTHK: Any, v_BTHK: Any, first_BT: Any, scale: Any) -> jax.Array:
    return definition.attention(q_BTHK, k_BTHK, v_BTHK, Sight(first_BT, first_BT), scale=scale)


_attention.__name__ = _ATTENTION


def _attention_of_newest(
    q_BTHK: Any, k_BSHK: Any, v_BSHK: Any, first_BT: Any, scale: Any, start: Any
) -> jax.Array:
    """Compute `_attention` of the queries from position `start` on."""
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK, preferred_element_type=jnp.float32) * scale
    t_T, s_S = start + jnp.arange(q_BTHK.shape[1]), jnp.arange(k_BSHK.shape[1])
    seen_BTS = (s_S[None, None] <= t_T[None, :, None]) & (s_S[None, None] >= first_BT[:, :, None])
    weights_BHTS = jax.nn.softmax(jnp.where(seen_BTS[:, None], scores_BHTS, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights_BHTS.astype(v_BSHK.dtype), v_BSHK)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.aval.dtype, jnp.inexact)


def _is_attention(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("jit", "pjit") and eqn.params["name"] == _ATTENTION


class Row(NamedTuple):
    """A value at the newest position."""

    value: Any
    time: Time


class Whole(NamedTuple):
    """A value at all positions that depends on tokens; `time` is None if they are not known to lie along one axis."""

    value: Any
    time: Time | None


class _Position:
    """Evaluates equations at position `t`."""

    def __init__(self, t: jax.Array, past: Values | None, mixed: AbstractSet[Var]) -> None:
        self._t, self._past, self._mixed = t, past, mixed
        self.times: dict[Var, Time] = {}  #: of what is in the cache
        self.cache: Values = {}  #: what was needed at all positions, with the newest row

    def apply(self, eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """Evaluate an equation on values that are `Row`, `Whole`, or depend on no token."""
        if self._mixed & {*eqn.outvars}:
            return self._whole(eqn, values, None)
        if _is_attention(eqn) and isinstance(values[0], Row) and values[0].time.axis == 1:
            return [self._attend(eqn, values)]
        times = [x.time if isinstance(x, Row | Whole) else None for x in values]
        rows = [i for i, x in enumerate(values) if isinstance(x, Row)]
        wholes = [i for i, x in enumerate(values) if isinstance(x, Whole) and x.time is not None]
        for i in [*rows, *wholes]:
            way = passage(eqn, i, times)
            if way is not None and self._fits(values, way.operands):
                # Integers stay whole: they are cheap, and whole they need no cache.
                if not rows and not _is_float(eqn.outvars[0]):
                    alike = all(x.time == times[i] for x in values if isinstance(x, Whole))
                    return self._whole(eqn, values, way.out if alike else None)
                operands = zip(eqn.invars, values, way.operands, strict=True)
                params = with_shapes_of_rows(eqn, way.out)
                return [Row(y, way.out) for y in bind(eqn, [self._row(*x) for x in operands], params)]
        is_running = eqn.primitive.name in RUNNING and not eqn.params["reverse"]
        return self._whole(eqn, values, times[0] if is_running else None)

    def _fits(self, values: list[Any], times: Sequence[Time | None]) -> bool:
        """Return whether all rows lie where they are needed, or are needed whole."""
        return all(
            time in (None, x.time) for x, time in zip(values, times, strict=True) if isinstance(x, Row)
        )

    def _whole(self, eqn: JaxprEqn, values: list[Any], time: Time | None) -> list[Any]:
        found = bind(eqn, [self.whole(x, value) for x, value in zip(eqn.invars, values, strict=True)])
        return [Whole(y, time) for y in found]

    def whole(self, x: Any, value: Any) -> Any:
        """Return a value at all positions: a row with those of the past."""
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

    def _attend(self, eqn: JaxprEqn, values: list[Any]) -> Row:
        (q, time), *rest = values
        k, v, first, scale = (self.whole(x, value) for x, value in zip(eqn.invars[1:], rest, strict=True))
        first, start = self.newest(first, Time(1, time.per)), self._t * time.per
        return Row(_attention_of_newest(q, k, v, first, scale, start), time)


def probes(num_positions: int, *, vocab_size: int, document_token: int) -> np.ndarray:
    """Return sequences that agree in their first half, of several documents, and end very differently: i32 [5, T]."""
    rng, half = np.random.default_rng(0), num_positions // 2
    head_T = rng.integers(0, vocab_size, half)
    head_T[:: max(1, half // 3)] = document_token
    others = rng.integers(0, vocab_size, (2, num_positions))
    ends = (
        *others,
        np.resize(head_T, num_positions),
        np.full(num_positions, document_token),
        others[0] * 0 + head_T[-1],
    )
    return np.stack([np.concatenate([head_T, end_T[: num_positions - half]]) for end_T in ends]).astype(
        np.int32
    )


class Incremental:
    """A causal function (params, tokens_BT) -> x_BTD of one sequence: `fixed` and `start`, then `step` by step.

    All three are pure, and meant to be traced. They are made for one tree of parameters and one number of positions.
    """

    def __init__(
        self, function: Callable[[Any, jax.Array], jax.Array], params: Any, probes_RT: np.ndarray
    ) -> None:
        """Read a function, for sequences as long as the probes.

        Args:
            function: to evaluate.
            params: its parameters; with them, it is tried which rows may be kept.
            probes_RT: i32, tokens that agree in the first half, as `probes` makes them.
        """
        tokens = jax.ShapeDtypeStruct((1, probes_RT.shape[1]), jnp.int32)
        jaxpr, consts = traced(function, params, tokens, keep=_is_attention)
        *self._params, self._tokens = jaxpr.invars
        self._states: Any = jaxpr.outvars[0]
        self._consts = dict(zip(jaxpr.constvars, consts, strict=True))
        on_tokens: set[Any] = {self._tokens}
        self._eqns: list[JaxprEqn] = []  #: which depend on tokens
        self._fixed_eqns: list[JaxprEqn] = []
        for eqn in needed(jaxpr):
            depends = on_tokens & {*variables(eqn)}
            on_tokens |= {*eqn.outvars} if depends else set()
            (self._eqns if depends else self._fixed_eqns).append(eqn)
        self._fixed = [*dict.fromkeys(x for eqn in self._eqns for x in variables(eqn) if x not in on_tokens)]
        self._kept: dict[Var, Time] = {}  #: whose rows of the past are needed
        self._mixed: set[Var] = set()  #: evaluated whole, because their rows depend on tokens that follow
        self._find_kept(params)
        while changing := self._changing(params, probes_RT):
            self._mixed |= changing
            self._find_kept(params)

    def evaluate_whole(self, params: Any) -> None:
        """Keep nothing of past positions from now on: `step` costs as much as the function."""
        self._mixed = {x for eqn in self._eqns for x in eqn.outvars}
        self._find_kept(params)

    @property
    def cache_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of what is kept of past positions."""
        return [shape_of(x) for x in self._kept]

    def differences(
        self, cache: list[jax.Array], other: list[jax.Array], num_positions: jax.Array
    ) -> jax.Array:
        """Return by how much the rows of the first positions differ, as a share of the largest number: f32 []."""
        worst = jnp.float32(0)
        for x, y, time in zip(cache, other, self._kept.values(), strict=True):
            is_read = jnp.arange(x.shape[time.axis]) < num_positions * time.per
            is_read = jnp.expand_dims(is_read, [i for i in range(x.ndim) if i != time.axis])
            x, y = (jnp.where(is_read, one.astype(jnp.float32), 0) for one in (x, y))
            worst = jnp.maximum(worst, jnp.max(jnp.abs(x - y)) / jnp.maximum(jnp.max(jnp.abs(y)), 1e-30))
        return worst

    def _find_kept(self, params: Any) -> None:
        def first(params: Any, tokens_BT: jax.Array) -> None:
            position = _Position(jnp.int32(0), None, self._mixed)
            self._advance(position, self.fixed(params), tokens_BT)
            self._kept = position.times

        jax.eval_shape(first, params, self._tokens.aval)

    def _changing(self, params: Any, probes_RT: np.ndarray) -> set[Var]:
        """Return what is kept, but has other rows in the first half if the tokens of the second half are others."""
        half = probes_RT.shape[1] // 2

        @jax.jit
        def rows(params: Any, tokens_RT: jax.Array) -> list[jax.Array]:
            fixed = self.fixed(params)

            def of_one(tokens_T: jax.Array) -> list[jax.Array]:
                cache = zip(self.start(fixed, tokens_T[None])[1], self._kept.values(), strict=True)
                return [jax.lax.slice_in_dim(x, 0, half * time.per, axis=time.axis) for x, time in cache]

            return [jnp.all(x == x[:1]) for x in jax.lax.map(of_one, tokens_RT)]

        alike = rows(params, jnp.asarray(probes_RT))
        return {x for x, is_alike in zip(self._kept, alike, strict=True) if not is_alike}

    def fixed(self, params: Any) -> list[jax.Array]:
        """Return what depends on no token."""
        values: Values = {**self._consts, **dict(zip(self._params, jax.tree.leaves(params), strict=True))}
        run(self._fixed_eqns, values)
        return [values[x] for x in self._fixed]

    def start(self, fixed: list[jax.Array], tokens_BT: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Return the states of all positions [1, T, D], and the cache for those that follow."""
        values = self._values(fixed, tokens_BT)
        run(self._eqns, values)
        return values[self._states], [values[x] for x in self._kept]

    def step(
        self, fixed: list[jax.Array], cache: list[jax.Array], tokens_BT: jax.Array, t: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Return the state of position `t` [1, 1, D] and the new cache. `tokens_BT` holds all tokens up to it."""
        position = _Position(t, dict(zip(self._kept, cache, strict=True)), self._mixed)
        x_BTD = self._advance(position, fixed, tokens_BT)
        return x_BTD, [position.cache[x] for x in self._kept]

    def _advance(self, position: _Position, fixed: list[jax.Array], tokens_BT: jax.Array) -> jax.Array:
        values = self._values(fixed, Whole(tokens_BT, Time(1)))
        run(self._eqns, values, position.apply)
        x = values[self._states]
        return x.value if isinstance(x, Row) else position.newest(x.value, Time(1))

    def _values(self, fixed: list[jax.Array], tokens: Any) -> Values:
        return {**dict(zip(self._fixed, fixed, strict=True)), self._tokens: tokens}
