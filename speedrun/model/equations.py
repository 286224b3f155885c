"""Equations of a traced function: how to evaluate them, and how the positions of a sequence pass through them.

An equation acts on each position by itself if entry t of its output, along some axis, depends only on entry t of its
operands, and on operands without positions. `incremental` evaluates it on entry t only.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

#: Primitives that call a function once, and the parameter that holds it.
_CALLED = {
    **dict.fromkeys(("jit", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}

Values = dict[Var, Any]
Apply = Callable[[JaxprEqn, list[Any]], Sequence[Any]]  #: (equation, its operands) -> its outputs


def bind(eqn: JaxprEqn, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Evaluate an equation, with `params` in place of its own if given."""
    found = eqn.primitive.bind(*values, **(params or eqn.params))
    return found if eqn.primitive.multiple_results else [found]


def run(eqns: Sequence[JaxprEqn], values: Values, apply: Apply = bind) -> None:
    """Evaluate equations in order, and add their outputs to `values`."""
    for eqn in eqns:
        values.update(zip(eqn.outvars, apply(eqn, [_value(x, values) for x in eqn.invars]), strict=True))


def variables(eqn: JaxprEqn) -> list[Var]:
    """Return the operands that are no literals."""
    return [x for x in eqn.invars if isinstance(x, Var)]


def traced(function: Callable[..., Any], *args: Any) -> tuple[Jaxpr, list[Any]]:
    """Trace a function of the leaves of `args`; return its jaxpr, with inner functions inlined, and its constants."""
    outer = jax.make_jaxpr(function)(*args)
    entered = jax.make_jaxpr(lambda *leaves: _entered(outer.jaxpr, outer.consts, leaves))
    closed = entered(*jax.tree.leaves(args))
    return closed.jaxpr, closed.consts


def needed(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Return the equations that the outputs depend on."""
    wanted, found = {*jaxpr.outvars}, []
    for eqn in reversed(jaxpr.eqns):
        if wanted & {*eqn.outvars}:
            wanted |= {*variables(eqn)}
            found.append(eqn)
    return found[::-1]


def _entered(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    def apply(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        inner = eqn.params.get(_CALLED.get(eqn.primitive.name, ""))
        if inner is None:
            return bind(eqn, values)
        return _entered(getattr(inner, "jaxpr", inner), getattr(inner, "consts", []), values)

    values: Values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    run(jaxpr.eqns, values, apply)
    return [_value(x, values) for x in jaxpr.outvars]


def _value(x: Any, values: Values) -> Any:
    return x.val if isinstance(x, Literal) else values[x]


# --- positions

_ELEMENTWISE = """
abs add and atan2 cbrt ceil clamp convert_element_type copy cos cosh div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
integer_pow is_finite le log log1p logistic lt max min mul ne neg not optimization_barrier or pow reduce_precision rem
round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub
tan tanh xor
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
REDUCTIONS = frozenset(
    {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"}
)
#: Entry t depends on entries up to t.
RUNNING = frozenset({"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"})


class Time(NamedTuple):
    """Positions of a value: entries [t * per, (t + 1) * per) along `axis` belong to position t."""

    axis: int
    per: int = 1


class Passage(NamedTuple):
    """Positions in an equation that acts on each by itself."""

    out: Time
    operands: Sequence[Time | None]  #: None: an operand has no positions, or is needed whole


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the shape of a variable or literal."""
    return x.aval.shape


def dtype_of(x: Any) -> Any:
    """Return the dtype of a variable or literal."""
    return x.aval.dtype


def passage(eqn: JaxprEqn, i: int, time: Time) -> Passage | None:
    """Return how positions pass from `time` in operand `i` to the output; None if the equation mixes them."""
    name = eqn.primitive.name
    if name in ELEMENTWISE or (name == "concatenate" and time.axis != eqn.params["dimension"]):
        return Passage(time, [time if shape_of(x) else None for x in eqn.invars])
    if name == "dot_general":
        return _of_product(eqn, i, time)
    if name == "gather":
        return _of_lookup(eqn, time) if i == 1 else None
    out = _OF_FIRST_OPERAND[name](eqn, time) if i == 0 and name in _OF_FIRST_OPERAND else None
    return out and Passage(out, [time, *[None] * (len(eqn.invars) - 1)])


def _reshape(eqn: JaxprEqn, time: Time) -> Time | None:
    """Positions stay apart if they begin an axis of the output."""
    if eqn.params["dimensions"] is not None:  # transposes first
        return None
    shape, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    before, num_positions = math.prod(shape[: time.axis]), shape[time.axis] // time.per
    for axis, size in enumerate(new):
        if math.prod(new[:axis]) == before and size % num_positions == 0 < size:
            return Time(axis, size // num_positions)
    return None


def _without(dropped: Sequence[int], time: Time) -> Time | None:
    axis = time.axis - sum(d < time.axis for d in dropped)
    return None if time.axis in dropped else time._replace(axis=axis)


def _size(xs: Sequence[Any], time: Time) -> int:
    return shape_of(xs[0])[time.axis]


#: Where the first operand's positions are in the output, by primitive.
_OF_FIRST_OPERAND: dict[str, Callable[[JaxprEqn, Time], Time | None]] = {
    "broadcast_in_dim": lambda eqn, time: time._replace(axis=eqn.params["broadcast_dimensions"][time.axis]),
    "transpose": lambda eqn, time: time._replace(axis=eqn.params["permutation"].index(time.axis)),
    "reshape": _reshape,
    "squeeze": lambda eqn, time: _without(eqn.params["dimensions"], time),
    "pad": lambda eqn, time: time if eqn.params["padding_config"][time.axis] == (0, 0, 0) else None,
    "slice": lambda eqn, time: time if _size(eqn.outvars, time) == _size(eqn.invars, time) else None,
    **dict.fromkeys(REDUCTIONS, lambda eqn, time: _without(eqn.params["axes"], time)),
    **dict.fromkeys({"split", *RUNNING}, lambda eqn, time: time if eqn.params["axis"] != time.axis else None),
}


def _of_product(eqn: JaxprEqn, i: int, time: Time) -> Passage | None:
    """A product leaves positions apart unless it sums over them. A causal function masks pairs with later keys."""
    contracted, batch = eqn.params["dimension_numbers"]
    if time.axis in contracted[i]:
        return None
    if time.axis in batch[i]:
        place = batch[i].index(time.axis)
        other = time._replace(axis=batch[1 - i][place])
        return Passage(time._replace(axis=place), [time, other] if i == 0 else [other, time])
    free = [
        [d for d in range(len(shape_of(x))) if d not in (*contracted[j], *batch[j])]
        for j, x in enumerate(eqn.invars)
    ]
    axis = len(batch[0]) + (len(free[0]) if i else 0) + free[i].index(time.axis)
    return Passage(time._replace(axis=axis), [time, None] if i == 0 else [None, time])


def _of_lookup(eqn: JaxprEqn, time: Time) -> Passage | None:
    """Looked-up rows have the positions of their indices."""
    dims, shape = eqn.params["dimension_numbers"], shape_of(eqn.invars[1])
    if dims.operand_batching_dims or time.axis == len(shape) - 1:
        return None
    places = [d for d in range(len(shape_of(eqn.outvars[0]))) if d not in dims.offset_dims]
    return Passage(time._replace(axis=places[time.axis]), [None, time])


def with_shapes_of_rows(eqn: JaxprEqn, out: Time) -> dict[str, Any]:
    """Return the parameters of an equation for one position: some contain shapes."""
    named = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "slice": "limit_indices"}
    sizes = named.get(eqn.primitive.name)
    if sizes is None:
        return eqn.params
    of_row = (out.per if d == out.axis else n for d, n in enumerate(eqn.params[sizes]))
    return {**eqn.params, sizes: tuple(of_row)}
