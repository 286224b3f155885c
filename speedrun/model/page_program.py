"""Writes a traced function as JSON for `page/jaxpr.js`, and its constants as arrays.

Equations that depend on no token are evaluated here, unless their value is only a large broadcast, such as a mask of
all pairs of positions. The others are rewritten in a few operations with one output each.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from speedrun.base.errors import UsageError

_ELEMENTWISE = """
abs add and ceil cos div eq erf erfc exp expm1 floor ge gt le log log1p logistic lt max min mul ne neg not or pow rem
rsqrt select_n sign sin sqrt stop_gradient sub tan tanh xor
"""
#: Operations of the page with the name of the primitive, on arrays of one shape, or scalars.
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
#: Identities on the page.
_NOTHING = frozenset({"copy", "copy_p", "optimization_barrier"})
_REDUCTIONS = frozenset({"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"})
#: Operations along one axis, and the parameter with its number.
_ALONG = {"concatenate": "dimension", "iota": "dimension", "stack": "axis"}
_ALONG |= dict.fromkeys(("cummax", "cummin", "cumsum"), "axis")
_MOVING = frozenset({"broadcast_in_dim", "concatenate", "pad", "reshape", "stack", "tile"})
_DTYPES = frozenset({"bool", "float32", "int32", "uint32"})
_SMALL = 1 << 17  #: elements up to which a value is evaluated although it is larger than its operands
_FEW = 1 << 10  #: the same for a broadcast number

#: Primitives that call a function once, and the parameter that holds it.
_CALLED = {
    **dict.fromkeys(("jit", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}
Operand = int | dict[str, Any]  #: number of a value, or {"value", "dtype"} of a literal


class Constants:
    """Arrays by name, without duplicates."""

    def __init__(self, named: dict[str, Any]) -> None:
        """Take names of parameters, which are stored when a program uses them."""
        self.arrays: dict[str, np.ndarray] = {}
        self._names = {_digest(np.asarray(x)): name for name, x in reversed(named.items())}

    def name_of(self, array: np.ndarray) -> str:
        """Store an array; return its name."""
        name = self._names.setdefault(_digest(array), f"constant.{len(self._names)}")
        self.arrays[name] = np.asarray(array, order="C")  # safetensors writes memory, whatever its strides
        return name


def program(function: Callable[..., Any], params: Any, inputs: Sequence[Any], constants: Constants) -> dict:
    """Return `function(params, *inputs)` as JSON, and add its arrays to `constants`.

    Trees of inputs and outputs are flattened.

    Returns:
        `values`: [dtype, shape] of each value. `inputs` and `outputs`: numbers of values. `constants`: names of arrays
        by number. `equations`: [operation, operands, number of the output, parameters].

    Raises:
        UsageError: if the page lacks an operation.
    """
    jaxpr, consts = _traced(function, params, *inputs)
    return _Writer(jaxpr, [*consts, *jax.tree.leaves(params)], constants).json


class _Writer:
    def __init__(self, jaxpr: Any, given: Sequence[Any], constants: Constants) -> None:
        self._constants = constants
        variables = [*jaxpr.constvars, *jaxpr.invars]
        # Values of the variables that depend on no input, and operands of the others.
        self._known, self._alias = dict(zip(variables, given, strict=False)), dict[Any, Operand]()
        self._named: dict[str, int] = {}
        self.json: dict[str, Any] = {"values": [], "inputs": [], "constants": {}, "equations": []}
        for x in variables[len(given) :]:
            self._alias[x] = self._value(dtype_of(x), shape_of(x))
            self.json["inputs"].append(self._alias[x])
        for eqn in _needed(jaxpr):
            if self._is_foldable(eqn):
                _evaluate(eqn, self._known)
            else:
                self._equation(eqn)
        self.json["outputs"] = [self._operand(x) for x in jaxpr.outvars]

    def _is_foldable(self, eqn: JaxprEqn) -> bool:
        operands = [x for x in eqn.invars if not isinstance(x, Literal)]
        if not all(x in self._known for x in operands):
            return False
        sizes = [np.prod(shape_of(x), dtype=int) for x in operands]
        made = sum(np.prod(shape_of(x), dtype=int) for x in eqn.outvars)
        if eqn.primitive.name == "broadcast_in_dim" and max(sizes, default=1) == 1:
            return made <= _FEW
        return made <= max([_SMALL, *sizes])

    def _value(self, dtype: Any, shape: Sequence[int]) -> int:
        if str(dtype) not in _DTYPES:
            raise UsageError(f"the model computes with {dtype}; need one of {', '.join(sorted(_DTYPES))}")
        self.json["values"].append([str(dtype), [int(n) for n in shape]])
        return len(self.json["values"]) - 1

    def _operand(self, x: Any, *, is_moved: bool = False) -> Operand:
        if isinstance(x, Literal) and not is_moved:
            value = np.asarray(x.val).item()
            # JSON has no infinity.
            value = value if not isinstance(value, float) or np.isfinite(value) else str(value)
            return {"value": value, "dtype": str(dtype_of(x))}
        if not isinstance(x, Literal) and x in self._alias:
            return self._alias[x]
        array = np.asarray(x.val if isinstance(x, Literal) else self._known[x], dtype_of(x))
        name = self._constants.name_of(array)
        if name not in self._named:
            self._named[name] = self._value(array.dtype, array.shape)
            self.json["constants"][self._named[name]] = name
        return self._named[name]

    def _emit(self, name: str, operands: Sequence[Operand], out: Any, **params: Any) -> int:
        number = self._value(dtype_of(out), shape_of(out))
        self.json["equations"].append([name, list(operands), number, params])
        return number

    def _equation(self, eqn: JaxprEqn) -> None:
        name, params, (out, *_) = eqn.primitive.name, eqn.params, eqn.outvars
        if name in _NOTHING:
            self._alias.update(zip(eqn.outvars, map(self._operand, eqn.invars), strict=True))
            return
        # A bug of jax-js 0.1.25: a compiled function adds a literal to all parts of a concatenation.
        xs = [self._operand(x, is_moved=name in _MOVING) for x in eqn.invars]
        if name in ("split", "unstack"):  # the second from JAX 0.12 on
            self._alias.update(self._split(eqn, xs))
        elif name == "square":
            self._alias[out] = self._emit("mul", xs * 2, out)
        elif name == "integer_pow" and params["y"] > 0:
            self._alias[out] = self._power(xs[0], params["y"], out)
        elif name in ELEMENTWISE and (name != "select_n" or str(dtype_of(eqn.invars[0])) == "bool"):
            self._alias[out] = self._emit(name, xs, out)
        elif (taken := _taken(eqn)) is not None:
            self._alias[out] = self._emit(taken[0], xs, out, **taken[1])
        else:
            shapes = ", ".join(str(x.aval) for x in eqn.invars)
            found = f"the model uses {name} of {shapes}, which the page lacks"
            raise UsageError(f"{found}; choose another recipe")

    def _split(self, eqn: JaxprEqn, xs: list[Operand]) -> dict[Any, Operand]:
        """Rewrite a split as slices; the parts of an unstack also lose the axis."""
        shape, axis, found = shape_of(eqn.invars[0]), eqn.params["axis"], {}
        sizes = [int(n) for n in eqn.params.get("sizes", (1,) * shape[axis])]
        for out, end, size in zip(eqn.outvars, np.cumsum(sizes).tolist(), sizes, strict=True):
            bounds = [[0, n] for n in shape]
            bounds[axis] = [end - size, end]
            found[out] = self._value(dtype_of(out), (*shape[:axis], size, *shape[axis + 1 :]))
            self.json["equations"].append(["slice", xs, found[out], {"bounds": bounds}])
            if len(shape_of(out)) < len(shape):
                found[out] = self._emit("reshape", [found[out]], out, shape=list(shape_of(out)))
        return found

    def _power(self, x: Operand, exponent: int, out: Any) -> Operand:
        if exponent == 1:
            return x
        half = self._power(x, exponent // 2, out)
        whole = self._emit("mul", [half, half], out)
        return self._emit("mul", [whole, x], out) if exponent % 2 else whole


def _taken(eqn: JaxprEqn) -> tuple[str, dict[str, Any]] | None:
    """Return operation and parameters for a primitive that moves or adds entries; None if the page lacks it."""
    name, params = eqn.primitive.name, eqn.params
    shape = shape_of(eqn.outvars[0])
    if name in _REDUCTIONS:
        return name, {"axes": list(params["axes"])}
    if name in _ALONG and not params.get("reverse"):
        return name, {"axis": params[_ALONG[name]]}
    match name:
        case "reshape" | "squeeze" | "expand_dims" if params.get("dimensions") is None or name != "reshape":
            return "reshape", {"shape": list(shape)}
        case "broadcast_in_dim":
            inner = [1] * len(shape)
            for i, axis in enumerate(params["broadcast_dimensions"]):
                inner[axis] = shape_of(eqn.invars[0])[i]
            return "broadcast", {"inner": inner, "shape": list(shape)}
        case "transpose":
            return name, {"permutation": list(params["permutation"])}
        case "slice" if set(params["strides"] or [1]) == {1}:
            ends = zip(params["start_indices"], params["limit_indices"], strict=True)
            return name, {"bounds": [list(bounds) for bounds in ends]}
        case "pad" if all(min(low, high) >= 0 == inner for low, high, inner in params["padding_config"]):
            return name, {"widths": [[int(low), int(high)] for low, high, _ in params["padding_config"]]}
        case "tile":
            return name, {"reps": [int(n) for n in params["reps"]]}
        case "convert_element_type":
            return "convert", {}
        case "dot_general":
            (left, right), (batch_left, batch_right) = params["dimension_numbers"]
            axes = {"left": left, "right": right, "batch_left": batch_left, "batch_right": batch_right}
            return "dot", {key: [int(i) for i in value] for key, value in axes.items()}
        case "gather" if _is_row(eqn):
            return "rows", {}
    return None


def _is_row(eqn: JaxprEqn) -> bool:
    """Return whether a gather takes whole rows of a table."""
    numbers, (table, indices) = eqn.params["dimension_numbers"], eqn.invars
    rest, leading = shape_of(table)[1:], len(shape_of(indices)) - 1
    return (
        numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and tuple(eqn.params["slice_sizes"]) == (1, *rest)
        and numbers.offset_dims == tuple(range(leading, leading + len(rest)))
        and str(eqn.params["mode"]) in ("GatherScatterMode.PROMISE_IN_BOUNDS", "GatherScatterMode.CLIP", "1")
    )


def _digest(array: np.ndarray) -> str:
    head = f"{array.dtype} {array.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def _traced(function: Callable[..., Any], *args: Any) -> tuple[Jaxpr, list[Any]]:
    """Trace a function of the leaves of `args`; return its jaxpr, with inner functions inlined, and its constants."""
    outer = jax.make_jaxpr(function)(*args)
    entered = jax.make_jaxpr(lambda *leaves: _entered(outer.jaxpr, outer.consts, leaves))
    closed = entered(*jax.tree.leaves(args))
    return closed.jaxpr, closed.consts


def _entered(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values = dict[Var, Any](zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        inner = eqn.params.get(_CALLED.get(eqn.primitive.name, ""))
        if inner is None:
            _evaluate(eqn, values)
        else:
            called = getattr(inner, "jaxpr", inner), getattr(inner, "consts", [])
            found = _entered(*called, [_known(x, values) for x in eqn.invars])
            values.update(zip(eqn.outvars, found, strict=True))
    return [_known(x, values) for x in jaxpr.outvars]


def _evaluate(eqn: JaxprEqn, values: dict[Var, Any]) -> None:
    """Evaluate an equation, and add its outputs to `values`."""
    found = eqn.primitive.bind(*(_known(x, values) for x in eqn.invars), **eqn.params)
    values.update(zip(eqn.outvars, found if eqn.primitive.multiple_results else [found], strict=True))


def _known(x: Any, values: dict[Var, Any]) -> Any:
    return x.val if isinstance(x, Literal) else values[x]


def _needed(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Return the equations that the outputs depend on."""
    wanted, found = {*jaxpr.outvars}, []
    for eqn in reversed(jaxpr.eqns):
        if wanted & {*eqn.outvars}:
            wanted |= {x for x in eqn.invars if isinstance(x, Var)}
            found.append(eqn)
    return found[::-1]


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the shape of a variable or literal."""
    return x.aval.shape


def dtype_of(x: Any) -> Any:
    """Return the dtype of a variable or literal."""
    return x.aval.dtype
