"""Checks a recipe before compilation: traces its functions, and compares what the track fixes.

Legend: B sequences, T time, D model.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from speedrun import recipes
from speedrun.base.errors import UsageError
from speedrun.base.track import Track
from speedrun.science.inputs import InputPlan
from speedrun.science.recipe import IDENTITY, Loss, Recipe, describe
from speedrun.science.rows import Rows
from speedrun.train.checkpoint import differences, named, spec
from speedrun.train.program import Program

MOST_COMPILED = 32  #: executables for an input that is compiled in


def checked(program: Program) -> Program:
    """Return a program with checks inside, traced; raise UsageError for a mistake of the recipe."""
    recipe = program.recipe
    try:
        describe(recipe)
        _check_functions(recipe)
        program = replace(program, recipe=_checked(recipe))
        _check_schedule(program.step.plan)
        _check_reads(program)
        program.traced_score(program.eval_shape_at(recipe.num_steps))
        for shape in dict.fromkeys(map(program.shape_at, range(recipe.num_steps))):
            program.traced_step(shape)
    except UsageError as error:
        raise UsageError(f"recipe {recipe.name}: {error}") from None
    return program


#: Arguments of a recipe's functions.
_TAKES = {
    "forward": ("params", "tokens_BT", "inputs", "config", "kernels"),
    "logits": ("params", "x_ND", "inputs", "config"),
    "loss": ("params", "batch", "inputs", "config", "kernels", "forward"),
}


def _check_functions(recipe: Recipe) -> None:
    for name, given in _TAKES.items():
        try:
            inspect.signature(getattr(recipe, name)).bind(*given)
        except (TypeError, ValueError) as error:
            raise UsageError(f"its {name}: {error}; need {name}({', '.join(given)})") from None


def _check_schedule(plan: InputPlan) -> None:
    """Check that no input would be compiled into too many executables."""
    for name in sorted({*plan.rows[0]} - {*plan.schedule}):
        if (found := len({row[name] for row in plan.rows})) > MOST_COMPILED:
            each = f"{found} Python values, and compiles an executable for each"
            hint = f"need at most {MOST_COMPILED}; give a NumPy value, which is traced"
            raise UsageError(f"its schedule gives {name!r} as {each}; {hint}")


def _check_reads(program: Program) -> None:
    """Check the ids of rows that tokens read."""
    tokens_BT = program.ids(program.shape_at(0))[0]
    for name, ids_of in program.layout.reads.items():
        ids = jax.eval_shape(ids_of, tokens_BT)
        if getattr(ids, "dtype", None) != np.int32 or ids.shape[:-1] != tokens_BT.shape[:1]:
            raise UsageError(f"its table reads {spec(ids)} of {name!r}; need int32 [{tokens_BT.shape[0]}, N]")


def _checked(recipe: Recipe) -> Recipe:
    """Return the recipe with functions that check their results."""
    scalar: Any = jax.ShapeDtypeStruct((), np.float32)

    def forward(params: Any, tokens_BT: jax.Array, *given: Any) -> jax.Array:
        x_BTD = recipe.forward(params, tokens_BT, *given)
        shape = getattr(x_BTD, "shape", ())
        if len(shape) != 3 or shape[:2] != tokens_BT.shape:
            need = f"hidden states [{', '.join(map(str, tokens_BT.shape))}, D]"
            raise UsageError(f"its forward returns {spec(x_BTD)} for {spec(tokens_BT)}; need {need}")
        return x_BTD

    def loss(params: Any, batch: Any, *given: Any) -> Loss:
        found = recipe.loss(params, batch, *given)
        if not isinstance(found, Loss):
            raise UsageError(f"its loss returns a {type(found).__name__}; need a Loss")
        _require("its loss returns", found, Loss(scalar, scalar, batch.carry))
        return found

    def transform(layout: Any) -> Any:
        inner = recipe.optimizer.transform(layout)

        def update(grads: Any, state: Any, params: Any, **more: Any) -> tuple[Any, Any]:
            updates, new = inner.update(grads, state, params, **more)
            whole = {k: params[k] if isinstance(u, Rows) else u for k, u in updates.items()}
            _require("its optimizer updates", whole, params, lambda x: str([*np.shape(x)]))
            _require("its optimizer's update returns the state", new, state)
            return updates, new

        return inner._replace(update=update)

    return replace(recipe, forward=forward, loss=loss, optimizer=SimpleNamespace(transform=transform))


def _require(what: str, got: Any, need: Any, shown: Callable[[Any], str] = spec) -> None:
    """Check that two trees have the same arrays in the same containers."""
    for difference in differences(named(got), named(need), shown):
        raise UsageError(f"{what}: {difference}")
    if jax.tree.structure(got) != jax.tree.structure(need):
        raise UsageError(f"{what}: the arrays of init in other containers; keep those")


def check_fixed(recipe: Recipe, rows: Sequence[Mapping[str, Any]], track: Track) -> None:
    """Check that a recipe has the objects and inputs of the track's own recipe where the track fixes them.

    `rows` has the compiled inputs of each step and of the last validation: a schedule may return others when it is
    called again.
    """
    if track.fixed is None:
        return
    own, num_steps = recipes.load(track.recipe), recipe.num_steps
    names = {one.name for one in fields(own) if one.compare} - {*IDENTITY, "optimizer", "schedule", "stages"}
    differs = [name for name in sorted(names) if getattr(recipe, name) is not getattr(own, name)]
    differs += ["stages"] if _sizes(recipe) != _sizes(own) else []
    wanted = [track.fixed.inputs_at(step, num_steps) for step in range(num_steps + 1)]
    pairs = list(zip(wanted, rows, strict=True))
    differs += [k for k in track.fixed.inputs if not all(_is_traced(b.get(k), a[k]) for a, b in pairs)]
    if differs:
        hint = "change only optimizer, schedule and numbers of steps, or choose another track"
        raise UsageError(f"recipe {recipe.name} changes {', '.join(differs)}, which {track.id} fixes; {hint}")


def _sizes(recipe: Recipe) -> list[tuple[type, int]]:
    """Return the sizes of all stages with their types, since an object could claim to be equal."""
    sizes = [x for one in recipe.stages for x in (one.num_sequences, one.seq_len, one.document_tokens)]
    return [(type(x), x) for x in sizes]


def _is_traced(value: Any, number: int) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.int32 and np.array_equal(value, number)
