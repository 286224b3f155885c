"""*Try the recipe*: a tiny preset of a recipe that trains in a page, and the trace of JAX's own training step.

The page gets two programs (`page_program.py`): the loss of packed parameters, which jax-js differentiates, and the
update of the recipe's optimiser. So its gradients come from another differentiation than JAX's. The trace is of the
training step that `speedrun run` takes, on one device in float32, on the same batches.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import safetensors.numpy
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
#: What makes a recipe tiny, of the settings that it has; "size" comes first, where it knows one.
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
#: The step whose gradients and update are compared. At the first, most gradients are zero, as projections start so.
CHECKED_STEP = 10


def tiny(recipe: Recipe) -> tuple[Recipe, dict[str, Any]]:
    """Return the preset of a recipe, and the settings that differ.

    Raises:
        UsageError: if the recipe is for other data, or its training has several stages.
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
    """Return the first batches of the track's synthetic stream, i32 [B, T]: those that a run of this shape reads."""
    source = Source(**(track.load(TRACK).synthetic or {}))
    num_tokens = num_sequences * seq_len
    num_lines = num_steps * num_tokens // source.line_tokens + 1
    tokens = generate(source, 1, num_lines)
    starts = range(0, num_steps * num_tokens, num_tokens)
    return [rows_of(tokens[at : at + num_tokens + 1], num_sequences) for at in starts]


def traced(one: Program, data: list[Tokens]) -> tuple[dict[str, list[float]], dict[str, np.ndarray]]:
    """Train with JAX; return all losses, and arrays: the first state, those around the compared step, its gradients.

    The losses are also those with each starting value moved to a neighbouring number: how far rounding carries.
    """
    first = _copied(one.init(jax.random.key(0)))
    before, after = [state for _, state in _losses(one, first, data[: CHECKED_STEP + 1])][-2:]
    placed = jax.device_put(before, one.shardings(one.specs))
    grads = _copied(_gradients(one)(placed, *data[CHECKED_STEP], one.schedule))
    arrays = {f"grads.{name}": x for name, x in grads.items()}
    for when, state in (("first", first), ("before", before), ("after", after)):
        arrays |= {f"{when}.params.{name}": x for name, x in state.params.items()}
        arrays |= {f"{when}.state.{i}": x for i, x in enumerate(jax.tree.leaves(state.opt_state))}
    rng = np.random.default_rng(0)

    def nudged(x: np.ndarray) -> np.ndarray:
        way = rng.choice(np.array([-np.inf, np.inf], np.float32), x.shape)
        return np.where(x == 0, x, np.nextafter(x, way))

    other = first._replace(params={name: nudged(x) for name, x in first.params.items()})
    starts = {"losses": first, "nudged": other}
    losses = {name: [loss for loss, _ in _losses(one, start, data)] for name, start in starts.items()}
    return losses, arrays


def _losses(one: Program, start: TrainState, data: list[Tokens]) -> Iterator[tuple[float, TrainState]]:
    """Yield the loss of each step, and a copy of the state after it."""
    state = jax.device_put(start, one.shardings(one.specs))
    for tokens_BT, targets_BT in data:
        state, metrics = one.train_step(state, tokens_BT, targets_BT, one.schedule)
        yield float(metrics.loss), _copied(state)


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
    """Write the page that trains a recipe's preset into a new folder, which `serve` takes.

    Raises:
        UsageError: if the recipe does not fit, or the page lacks an operation of it.
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
        **losses,
        **programs,
    }
    arrays |= constants.arrays
    arrays["tokens"] = np.concatenate([*(x.tokens_BT.ravel() for x in data), data[-1].targets_BT[-1, -1:]])
    raw = safetensors.numpy.save({name: np.asarray(x, order="C") for name, x in arrays.items()})
    return {"training.json": msgspec.json.encode(facts), "arrays.safetensors": raw}


def _loss(one: Program, state: TrainState, data: Tokens, constants: Constants) -> dict[str, Any]:
    """Return the objective of packed parameters, tokens, targets and scheduled inputs, as a program."""
    recipe = one.recipe

    def loss(_: Any, packed: Params, tokens_BT: jax.Array, targets_BT: jax.Array, row: Params) -> jax.Array:
        params = one.layout.unpack(packed)
        batch = Batch(tokens_BT, targets_BT, {}, jnp.arange(len(tokens_BT)))
        inputs, kernels = _inputs(one, row), DecodingKernels()
        return recipe.loss(params, batch, inputs, recipe.config, kernels, recipe.forward).objective

    return program(loss, {}, [state.params, *data, _row(one)], constants)


def _update(one: Program, state: TrainState, constants: Constants) -> dict[str, Any]:
    """Return new parameters, then a new state, of gradients, state, parameters and inputs, as a program."""

    def update(_: Any, grads: Params, opt_state: Any, packed: Params, row: Params) -> Any:
        def alone(grads: Params) -> Any:
            moves, new = one.step.transform.update(grads, opt_state, packed, inputs=_inputs(one, row))
            return jax.tree.map(jnp.add, packed, moves), new

        # An axis of one device: what an optimiser asks of the mesh is known, and there is nobody to communicate with.
        found = jax.vmap(alone, in_axes=None, axis_name=DATA, axis_size=1)(grads)
        return jax.tree.map(lambda x: x[0], found)

    return program(update, {}, [state.params, state.opt_state, state.params, _row(one)], constants)


def _row(one: Program) -> Params:
    return {name: x[0] for name, x in one.step.plan.schedule.items()}


def _inputs(one: Program, row: Params) -> Inputs:
    return one.step.plan.at(0, {name: x[None] for name, x in row.items()}, one.static_at(0))


def _copied(tree: Any) -> Any:
    """Return a tree of NumPy arrays. The step gives the memory of its state to the next one."""
    return jax.tree.map(np.array, tree)
