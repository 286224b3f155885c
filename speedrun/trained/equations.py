"""The equations of a traced function: read, and evaluated one after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

#: Equations that call a function once, and the parameter that holds it.
_CALLED = {
    **dict.fromkeys(("jit", "pjit", "checkpoint", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}

Values = dict[Var, Any]
Apply = Callable[[JaxprEqn, list[Any]], Sequence[Any]]  #: (equation, its operands) -> its outputs


def bind(eqn: JaxprEqn, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Evaluate an equation, with other parameters if some are given."""
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
    """Trace a function of the leaves of `args`: its jaxpr and constants. It calls no other function."""
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
        if hasattr(inner, "consts"):  # a closed one
            return _entered(inner.jaxpr, inner.consts, values)
        return _entered(inner, [], values)

    values: Values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    run(jaxpr.eqns, values, apply)
    return [_value(x, values) for x in jaxpr.outvars]


def _value(x: Any, values: Values) -> Any:
    return x.val if isinstance(x, Literal) else values[x]
