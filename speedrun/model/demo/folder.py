"""The folder of the demonstration: a page, jax-js, a text, and for each preset its programs and JAX's losses.

    python -m speedrun.model.demo.folder OUT README.md docs/*.md    then: speedrun play OUT

The page trains on the bytes of these files, and jax-js differentiates the loss by itself. JAX's losses are those of a
run's training step on one device, on the same batches.
"""

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import safetensors.numpy

from speedrun import recipes
from speedrun.base.atomic_files import make_record
from speedrun.base.mesh import DATA, arranged, prepare
from speedrun.data.stream import rows_of
from speedrun.model import page_folder
from speedrun.model.decode import DecodingKernels
from speedrun.model.page_program import Constants, program
from speedrun.science.inputs import Inputs
from speedrun.science.recipe import Batch
from speedrun.train.program import Program

#: Settings of the small preset; the other one is the recipe itself.
TINY: dict[str, Any] = {"config.model_dim": 64, "config.num_heads": 2, "config.mlp_dim": 128}
TINY |= {"stages.0.num_steps": 100, "stages.0.num_sequences": 4, "stages.0.seq_len": 64}


def preset_files(one: Program, text_N: np.ndarray) -> dict[str, bytes]:
    """Train with JAX; return `facts.json` and `arrays.safetensors`: programs, schedule, first parameters, losses."""
    stage, constants, losses = one.recipe.stages[0], Constants({}), list[float]()
    state, train_step = one.init(jax.random.key(0)), one.train_step_for(one.static_at(0))
    first = {f"first.{name}": np.array(x) for name, x in state.params.items()}
    num_tokens = stage.num_sequences * stage.seq_len
    for step in range(stage.num_steps):
        start = step % ((len(text_N) - 1) // num_tokens) * num_tokens  # the text may begin again
        ids_N = text_N[start : start + num_tokens + 1].astype(np.int32)
        state, metrics = train_step(state, *rows_of(ids_N, stage.num_sequences), one.schedule)
        losses.append(float(metrics.loss))
    rows = [[str(x.dtype), x.tolist()] for _, x in sorted(one.step.plan.schedule.items())]
    facts = asdict(stage) | _programs(one, constants)
    facts |= {"first": sorted(first), "schedule": rows, "losses": losses}
    arrays = safetensors.numpy.save(constants.arrays | first)
    return {"facts.json": msgspec.json.encode(facts), "arrays.safetensors": arrays}


def _programs(one: Program, constants: Constants) -> dict[str, Any]:
    """Return the programs of packed parameters by name. Scheduled inputs are a row of the schedule."""
    recipe, plan, kernels, stage = one.recipe, one.step.plan, DecodingKernels(), one.recipe.stages[0]

    def loss(_: Any, packed: Any, tokens_BT: jax.Array, targets_BT: jax.Array, row: Any) -> Any:
        params, inputs = recipe.read(one.layout.unpack(packed), tokens_BT), Inputs(row, plan.spans)
        x_BTD = recipe.forward(params, tokens_BT, inputs, recipe.config, kernels)

        # The page lacks loops, as the head has over parts of a batch.
        def of_row(at: slice) -> jax.Array:
            batch = Batch(tokens_BT[at], targets_BT[at], {}, jnp.arange(1))
            return recipe.loss(params, batch, inputs, recipe.config, kernels, lambda *_: x_BTD[at]).objective

        return sum(of_row(slice(i, i + 1)) for i in range(len(tokens_BT))) / len(tokens_BT)

    def update(_: Any, grads: Any, opt_state: Any, packed: Any, row: Any) -> Any:
        inputs = Inputs(row, plan.spans)
        moved = partial(one.step.transform.update, state=opt_state, params=packed, inputs=inputs)
        # Optimisers use the axis of devices, which has one here.
        found = jax.vmap(moved, in_axes=None, axis_name=DATA, axis_size=1)(grads)
        moves, new = jax.tree.map(lambda x: x[0], found)
        return jax.tree.map(jnp.add, packed, moves), new

    def logits(_: Any, packed: Any, tokens_BT: jax.Array) -> jax.Array:
        params, last = one.layout.unpack(packed), plan.at(-1, plan.schedule, one.static_at(0))
        x_BTD = recipe.forward(recipe.read(params, tokens_BT), tokens_BT, last, recipe.config, kernels)
        return recipe.logits(params, x_BTD[0], last, recipe.config)

    state = jax.eval_shape(one.step.init, jax.random.key(0))
    row = {name: x[0] for name, x in plan.schedule.items()}
    ids, text = (jax.ShapeDtypeStruct((n, stage.seq_len), jnp.int32) for n in (stage.num_sequences, 1))
    return {
        "loss": program(loss, {}, [state.params, ids, ids, row], constants),
        "update": program(update, {}, [state.params, state.opt_state, state.params, row], constants),
        "logits": program(logits, {}, [state.params, text], constants),
    }


def write(out: Path, text_N: np.ndarray, presets: dict[str, Program]) -> list[Path]:
    """Write the page, with presets by name and a text in bytes, into a new or empty folder; return the files."""
    files, here = page_folder.site({}) | {"text.bin": text_N.tobytes()}, Path(__file__).parent
    watch = here.parent / "watch_page"
    for file in (*here.glob("*.[hcj]*"), watch / "chart.js", watch / "text.js"):
        files[file.name] = file.read_bytes()
    for name, one in presets.items():
        files |= {f"presets/{name}/{file}": raw for file, raw in preset_files(one, text_N).items()}
    return make_record(out, files)


if __name__ == "__main__":
    prepare("cpu")
    # A 0, the document token, begins each file.
    text = np.frombuffer(b"".join(b"\0" + Path(file).read_bytes() for file in sys.argv[2:]), np.uint8)
    smoke, mesh = recipes.load("smoke"), arranged(jax.devices("cpu")[:1], 1)
    both = {"tiny": smoke.override(TINY), "smoke": smoke}
    write(Path(sys.argv[1]), text, {name: Program(recipe, mesh, 1) for name, recipe in both.items()})
