"""*Try the recipe*: a page that trains a tiny preset of a recipe, and the trace of JAX's own training step.

The page gets two programs (`page_program.py`): the loss of packed parameters, and the update of the optimiser. jax-js
differentiates the loss, so its gradients are independent of JAX's. The trace is of the training step of a run, on one
device in float32, on the same batches.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import PartitionSpec

from speedrun.base import track
from speedrun.base.errors import UsageError
from speedrun.base.mesh import DATA, arranged
from speedrun.base.wholefile import make_folder
from speedrun.data.stream import Batch as Tokens
from speedrun.data.stream import rows_of
from speedrun.data.synthetic import Source, generate
from speedrun.model import page_folder
from speedrun.model.incremental import DecodingKernels
from speedrun.model.page_program import Constants, program
from speedrun.science.inputs import Inputs
from speedrun.science.params import Params, count
from speedrun.science.recipe import Batch, Recipe, settings
from speedrun.science.step import TrainState
from speedrun.train.program import Program

FORMAT = "speedrun.web.training/1"
TRACK = "smoke-cpu"
#: Settings that make a recipe tiny, if it has them.
TINY: dict[str, str | float] = {
    "config.model_dim": 64,
    "config.num_heads": 2,
    "config.head_dim": 32,
    "config.mlp_dim": 128,
    "config.table_dtype": "float32",
    "optimizer.muon_dtype": "float32",
    "compute_dtype": "float32",
    "stages.0.num_steps": 100,
    "stages.0.num_sequences": 4,
    "stages.0.seq_len": 64,
}
#: The step whose gradients and update are compared. At the first one, most gradients are zero.
CHECKED_STEP = 10


def tiny(recipe: Recipe) -> tuple[Recipe, dict[str, Any]]:
    """Return the preset of a recipe, and the settings that differ.

    Raises:
        UsageError: if the recipe has another vocabulary, or several stages.
    """
    sized: dict[str, Any] = {"size": "smoke"} if settings(recipe).get("config.model_dim") == 768 else {}
    known = settings(recipe.override(sized))
    changes = sized | {key: value for key, value in TINY.items() if key in known and known[key] != value}
    preset, vocab_size = recipe.override(changes), track.load(TRACK).data.vocab_size
    if preset.config.vocab_size != vocab_size or len(preset.stages) > 1:
        raise UsageError(
            f"recipe {recipe.name} has {preset.config.vocab_size:,} ids and {len(preset.stages)} stages; the page "
            f"needs {vocab_size} ids, those of {TRACK}, and one stage; choose another, such as smoke"
        )
    return preset, changes


def batches(num_steps: int, num_sequences: int, seq_len: int) -> list[Tokens]:
    """Return the first batches, i32 [B, T], that a run of this shape reads from the track's synthetic stream."""
    source = Source(**(track.load(TRACK).synthetic or {}))
    num_tokens = num_sequences * seq_len
    num_lines = num_steps * num_tokens // source.line_tokens + 1
    tokens = generate(source, 1, num_lines)
    starts = range(0, num_steps * num_tokens, num_tokens)
    return [rows_of(tokens[at : at + num_tokens + 1], num_sequences) for at in starts]


def traced(one: Program, data: list[Tokens]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train with JAX; return all losses, and arrays: the first state, those around the compared step, its gradients."""
    state = one.init(jax.random.key(0))
    states, losses, grads = {"first": _copied(state)}, list[float](), {}
    for step, batch in enumerate(data):
        if step == CHECKED_STEP:
            states["before"] = _copied(state)
            grads = _copied(_gradients(one)(state, *batch, one.schedule))
        state, metrics = one.train_step(state, *batch, one.schedule)
        if step == CHECKED_STEP:
            states["after"] = _copied(state)
        losses.append(float(metrics.loss))
    arrays = {f"grads.{name}": x for name, x in grads.items()}
    for when, kept in states.items():
        arrays |= {f"{when}.params.{name}": x for name, x in kept.params.items()}
        arrays |= {f"{when}.state.{i}": x for i, x in enumerate(jax.tree.leaves(kept.opt_state))}
    return losses, arrays


def _gradients(one: Program) -> Callable[..., Params]:
    """Return the gradients of a training step: (state, tokens_BT, targets_BT, schedule) -> packed."""
    rows = PartitionSpec(one.mesh.axis_names)
    specs = one.specs, rows, rows, PartitionSpec()

    @jax.jit
    @partial(jax.shard_map, mesh=one.mesh, in_specs=specs, out_specs=one.layout.specs)
    def gradients(state: TrainState, tokens_BT: jax.Array, targets_BT: jax.Array, schedule: Params) -> Params:
        inputs = one.step.plan.at(state.step, schedule, one.static_at(0))
        batch = Batch(tokens_BT, targets_BT, state.carry, jnp.arange(len(tokens_BT)))
        return one.step.loss_and_grads(state.params, batch, inputs)[1]

    return gradients


def write(recipe: Recipe, out: Path) -> None:
    """Write the page that trains a recipe's preset into a new folder.

    Raises:
        UsageError: if the recipe does not fit, or the page lacks one of its operations.
    """
    ours = {f"training/{name}": raw for name, raw in _files(recipe).items()}
    of_watch = page_folder.page("watch_page")
    charts = {name: of_watch[name] for name in ("chart.js", "text.js")}
    make_folder(out, page_folder.site({}) | page_folder.page("trainer") | charts | ours)


def _files(recipe: Recipe) -> dict[str, bytes]:
    """Return `training.json` and `arrays.safetensors` of a recipe's preset: programs, batches and JAX's trace."""
    preset, changes = tiny(recipe)
    (stage,) = preset.stages
    one = Program(preset, arranged(jax.devices("cpu")[:1], 1), 1)
    plan = one.step.plan
    if one.specs.carry or plan.constants or len({*map(one.static_at, range(stage.num_steps))}) > 1:
        raise UsageError(
            f"recipe {recipe.name} carries values from step to step, has constants, or compiles inputs in; the page "
            "needs one whose inputs are scheduled numbers; choose another, such as smoke"
        )
    data = batches(stage.num_steps, stage.num_sequences, stage.seq_len)
    constants, state = Constants({}), jax.eval_shape(one.step.init, jax.random.key(0))
    programs = {"loss": _loss(one, state, data[0], constants), "update": _update(one, state, constants)}
    losses, arrays = traced(one, data)
    facts = {
        "format": FORMAT,
        "recipe": preset.name,
        "track": TRACK,
        "settings": changes,
        "num_steps": stage.num_steps,
        "num_sequences": stage.num_sequences,
        "seq_len": stage.seq_len,
        "num_params": count(one.layout.table),
        "params": sorted(state.params),
        "num_state": len(jax.tree.leaves(state.opt_state)),
        "schedule": [{"dtype": str(x.dtype), "values": x.tolist()} for _, x in sorted(plan.schedule.items())],
        "checked_step": CHECKED_STEP,
        "losses": losses,
        **programs,
    }
    arrays |= constants.arrays
    arrays["tokens"] = np.concatenate([*(x.tokens_BT.ravel() for x in data), data[-1].targets_BT[-1, -1:]])
    return {"training.json": msgspec.json.encode(facts), "arrays.safetensors": page_folder.saved(arrays)}


def _loss(one: Program, state: TrainState, data: Tokens, constants: Constants) -> dict[str, Any]:
    """Return the program from packed parameters, tokens, targets and scheduled inputs to the objective."""
    recipe = one.recipe

    def loss(_: Any, packed: Params, tokens_BT: jax.Array, targets_BT: jax.Array, row: Params) -> jax.Array:
        params = recipe.read(one.layout.unpack(packed), tokens_BT)
        batch = Batch(tokens_BT, targets_BT, {}, jnp.arange(len(tokens_BT)))
        inputs, kernels = _inputs(one, row), DecodingKernels()
        return recipe.loss(params, batch, inputs, recipe.config, kernels, recipe.forward).objective

    return program(loss, {}, [state.params, *data, _row(one)], constants)


def _update(one: Program, state: TrainState, constants: Constants) -> dict[str, Any]:
    """Return the program from gradients, state, parameters and inputs to new parameters and a new state."""

    def update(_: Any, grads: Params, opt_state: Any, packed: Params, row: Params) -> Any:
        def alone(grads: Params) -> Any:
            moves, new = one.step.transform.update(grads, opt_state, packed, inputs=_inputs(one, row))
            return jax.tree.map(jnp.add, packed, moves), new

        # Optimisers use the axis of devices, which has one here.
        found = jax.vmap(alone, in_axes=None, axis_name=DATA, axis_size=1)(grads)
        return jax.tree.map(lambda x: x[0], found)

    return program(update, {}, [state.params, state.opt_state, state.params, _row(one)], constants)


def _row(one: Program) -> Params:
    return {name: x[0] for name, x in one.step.plan.schedule.items()}


def _inputs(one: Program, row: Params) -> Inputs:
    return one.step.plan.at(0, {name: x[None] for name, x in row.items()}, one.static_at(0))


def _copied(tree: Any) -> Any:
    """Return a copy in NumPy arrays: a step donates its state."""
    return jax.tree.map(np.array, tree)
