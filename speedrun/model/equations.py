"""Equations of a traced function, and how to evaluate them."""

from collections.abc import Callable, Sequence
from typing import Any

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


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the shape of a variable or literal."""
    return x.aval.shape


def dtype_of(x: Any) -> Any:
    """Return the dtype of a variable or literal."""
    return x.aval.dtype
