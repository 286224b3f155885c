"""Which way the positions of a sequence go through an equation of a jaxpr. See `incremental`.

An equation acts on each position by itself if entry t of its output, along some axis, depends only on entry t of its
operands, and on operands without positions. Then it can be evaluated on entry t.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

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
    """Where a value has its positions: entries [t * per, (t + 1) * per) along `axis` are those of position t."""

    axis: int
    per: int = 1


class Passage(NamedTuple):
    """How positions go through an equation that acts on each by itself."""

    out: Time  #: of its outputs
    operands: Sequence[Time | None]  #: where each has its positions; None: it has none, or is needed whole


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the shape of a variable or literal of a jaxpr."""
    return x.aval.shape


def dtype_of(x: Any) -> Any:
    """Return the dtype of a variable or literal of a jaxpr."""
    return x.aval.dtype


def passage(eqn: JaxprEqn, i: int, time: Time) -> Passage | None:
    """Return how positions get from operand `i`, where they lie at `time`, to the output.

    None if the equation mixes them, or is unknown.
    """
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
    """Positions stay apart if an axis of the output counts them, alone or with what lies within each."""
    if eqn.params["dimensions"] is not None:  # transposes first
        return None
    shape, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    before, num_positions = math.prod(shape[: time.axis]), shape[time.axis] // time.per
    axes = (
        a for a, size in enumerate(new) if math.prod(new[:a]) == before and size % num_positions == 0 < size
    )
    axis = next(axes, None)
    return None if axis is None else Time(axis, new[axis] // num_positions)


def _without(dropped: Sequence[int], time: Time) -> Time | None:
    return (
        None if time.axis in dropped else time._replace(axis=time.axis - sum(d < time.axis for d in dropped))
    )


#: Where the first operand's positions are in the output, by primitive.
_OF_FIRST_OPERAND: Mapping[str, Callable[[JaxprEqn, Time], Time | None]] = MappingProxyType(
    {
        "broadcast_in_dim": lambda eqn, time: time._replace(
            axis=eqn.params["broadcast_dimensions"][time.axis]
        ),
        "transpose": lambda eqn, time: time._replace(axis=eqn.params["permutation"].index(time.axis)),
        "reshape": _reshape,
        "squeeze": lambda eqn, time: _without(eqn.params["dimensions"], time),
        "split": lambda eqn, time: time if eqn.params["axis"] != time.axis else None,
        "pad": lambda eqn, time: time if eqn.params["padding_config"][time.axis] == (0, 0, 0) else None,
        "slice": lambda eqn, time: (
            time if shape_of(eqn.outvars[0])[time.axis] == shape_of(eqn.invars[0])[time.axis] else None
        ),
        **dict.fromkeys(REDUCTIONS, lambda eqn, time: _without(eqn.params["axes"], time)),
        **dict.fromkeys(RUNNING, lambda eqn, time: time if eqn.params["axis"] != time.axis else None),
    }
)


def _of_product(eqn: JaxprEqn, i: int, time: Time) -> Passage | None:
    """A product leaves positions apart unless it sums over them.

    It may pair each with each, as queries with keys. Then a row has entries for keys that follow, which a causal
    function masks.
    """
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
    """What is looked up in a table has the positions of its indices."""
    dims, shape = eqn.params["dimension_numbers"], shape_of(eqn.invars[1])
    if dims.operand_batching_dims or time.axis == len(shape) - 1:
        return None
    places = [d for d in range(len(shape_of(eqn.outvars[0]))) if d not in dims.offset_dims]
    return Passage(time._replace(axis=places[time.axis]), [None, time])


def with_shapes_of_rows(eqn: JaxprEqn, out: Time) -> dict[str, Any]:
    """Return the parameters of an equation for one position: some hold shapes of whole values."""

    def of_row(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(out.per if d == out.axis else n for d, n in enumerate(sizes))

    sizes = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "slice": "limit_indices"}.get(
        eqn.primitive.name
    )
    return {**eqn.params, sizes: of_row(eqn.params[sizes])} if sizes else eqn.params
