"""Exports the programs of a run for its record, before the clock starts: see `ledger.archive`.

Nothing is compiled, trained or scored here. A program is StableHLO, a pure function of arrays, without the names of
files, so that equal code gives equal bytes anywhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import NamedSharding

from speedrun.ledger.archive import Archive
from speedrun.science.inputs import Inputs, Static
from speedrun.science.params import Params
from speedrun.training.checkpoint import named
from speedrun.training.prepare import Ready
from speedrun.training.program import FOREIGN, StepShape

_FORWARD_TOKENS = 8192  #: of a forward pass, in one or more sequences
_CHUNK_TOKENS = 1024  #: rows of logits

#: JAX cannot vouch for custom calls of kernels; the examiner has its own list.
_ANY_CALL = [export.DisabledSafetyCheck.custom_call(name) for name in FOREIGN]


def exported(ready: Ready) -> Archive:
    """Return the programs of a run."""
    recipe, state, hidden = ready.recipe, _state(ready), _names_of_forward(ready)
    steps = range(recipe.num_steps)
    shapes = [ready.program.shape_at(step) for step in steps]
    names = {shape: f"train-{i}" for i, shape in enumerate(dict.fromkeys(shapes))}
    with _without_places():
        made = {**_training(ready, state, names), **_forward(ready, state.params, hidden)}
        programs = {name: bytes(one.serialize()) for name, one in made.items()}
    return Archive(
        leaves=tuple(named(state)),
        num_params=len(state.params),
        steps=tuple(names[shape] for shape in shapes),
        hidden=hidden,
        document_tokens=tuple(recipe.stages[recipe.stage_of(step)].document_tokens for step in steps),
        programs=programs,
    )


@contextmanager
def _without_places() -> Iterator[None]:
    """Leave out the files and lines of operations: they name folders of this machine."""
    before = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


def _state(ready: Ready) -> Any:
    """Return the shapes, dtypes and shardings of the state's leaves."""
    program = ready.program
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(program.init, jax.random.key(0)),
        program.shardings(program.specs),
    )


def _training(ready: Ready, state: Any, names: dict[StepShape, str]) -> dict[str, export.Exported]:
    """Lower the programs that make states: one for each shape of a step, with its name."""
    program = ready.program
    structure, schedule = jax.tree.structure(state), program.step.plan.schedule
    where = tuple(leaf.sharding for leaf in jax.tree.leaves(state))
    key = jax.ShapeDtypeStruct((2,), np.uint32)

    def init(data: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(program.init(jax.random.wrap_key_data(data))))

    def step(static: Static) -> Any:
        def train(*args: jax.Array) -> tuple[jax.Array, ...]:
            *leaves, tokens_BT, targets_BT = args
            before = jax.tree.unflatten(structure, leaves)
            after, metrics = program.train_step_for(static)(before, tokens_BT, targets_BT, schedule)
            return *jax.tree.leaves(after), jnp.sum(metrics.loss)

        return jax.jit(train)

    found = {"init": export.export(jax.jit(init, out_shardings=where))(key)}
    rows = NamedSharding(program.mesh, jax.sharding.PartitionSpec(program.axes))
    for shape, name in names.items():
        ids_BT = jax.ShapeDtypeStruct((shape.num_sequences, shape.seq_len), np.int32, sharding=rows)
        lower = export.export(step(shape.static), disabled_checks=_ANY_CALL)
        found[name] = lower(*jax.tree.leaves(state), ids_BT, ids_BT)
    return found


def _names_of_forward(ready: Ready) -> dict[int, str]:
    """Return the name of the forward pass of each validation, by its step; equal inputs share one."""
    num_steps, rows = ready.recipe.num_steps, ready.program.step.plan.rows
    validated = [*filter(ready.track.validates_at, range(num_steps)), num_steps]
    alike = {step: str([(k, np.asarray(v).tobytes()) for k, v in rows[step].items()]) for step in validated}
    first = {inputs: step for step, inputs in reversed(alike.items())}
    return {step: f"hidden-{first[inputs]}" for step, inputs in alike.items()}


def _forward(ready: Ready, params: Params, names: dict[int, str]) -> dict[str, export.Exported]:
    """Lower the programs that score, for one device: one forward pass for each of the names, and the head."""
    program, recipe = ready.program, ready.recipe
    kinds = recipe.table(recipe.config)
    packed = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
    structure = jax.tree.structure(packed)

    def view(leaves: Any) -> Any:
        """Return the parameters by name, in the compute dtype."""
        params = program.layout.unpack(jax.tree.unflatten(structure, leaves))
        return {
            name: x if kinds[name].packed == "vector" else x.astype(recipe.compute_dtype)
            for name, x in params.items()
        }

    def hidden(inputs: Inputs, *args: jax.Array) -> jax.Array:
        return program.forward(view(args[:-1]), args[-1], inputs)

    def logits(*args: jax.Array) -> jax.Array:
        return program.logits(view(args[:-1]), args[-1])

    num_sequences = max(1, _FORWARD_TOKENS // recipe.eval_seq_len)
    ids_BT = jax.ShapeDtypeStruct((num_sequences, recipe.eval_seq_len), np.int32)
    leaves = jax.tree.leaves(packed)
    steps, plan = {name: step for step, name in reversed(names.items())}, program.step.plan
    by_inputs = {
        name: partial(hidden, plan.at(step, plan.schedule, plan.static_at(step, integers=True)))
        for name, step in steps.items()
    }
    x_BTD = jax.eval_shape(next(iter(by_inputs.values())), *leaves, ids_BT)
    x_ND = jax.ShapeDtypeStruct((_CHUNK_TOKENS, x_BTD.shape[-1]), x_BTD.dtype)
    return {
        **{
            name: export.export(jax.jit(one), disabled_checks=_ANY_CALL)(*leaves, ids_BT)
            for name, one in by_inputs.items()
        },
        "logits": export.export(jax.jit(logits), disabled_checks=_ANY_CALL)(*leaves, x_ND),
    }
