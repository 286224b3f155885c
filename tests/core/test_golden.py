"""Record 21 against an independent implementation: losses, gradients and weights of short float32 runs.

Sizes, lengths and schedules come from the file.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from golden_files import OPTIMISED, File, fixture, leaves, probe

from speedrun import recipes
from speedrun.base import mesh
from speedrun.science.params import Params
from speedrun.science.recipe import Recipe, Stage
from speedrun.science.step import TrainState
from speedrun.train.program import Program

golden = fixture("record21_*.npz", partial(File, made_by="golden.py"))


def recipe_of(config: Mapping[str, Any]) -> Recipe:
    record = recipes.load("record21")
    sizes = {
        "model_dim": config["model_dim"],
        "num_heads": config["num_heads"],
        "head_dim": config["head_dim"],
        "mlp_dim": 4 * config["model_dim"],
        "vocab_size": config["vocab_size"],
        "padded_vocab_size": config["vocab_size"],
        "document_token": config["document_token"],
        "table_dtype": "float32",
        "head_fp8": None,
    }
    recipe = dataclasses.replace(
        record,
        config=dataclasses.replace(record.config, **sizes),
        stages=(Stage(config["steps"], num_sequences=1, seq_len=config["seq_len"]),),
        compute_dtype="float32",
    )
    return recipe.override({"optimizer.muon_dtype": "float32"})


class Run:
    """A file's run by our program on some devices: every device is given the same sequence."""

    def __init__(self, golden: File, num_devices: int) -> None:
        recipe = recipe_of(golden.config)
        stage = dataclasses.replace(recipe.stages[0], num_sequences=num_devices)
        recipe = dataclasses.replace(recipe, stages=(stage,), eval_sequences=8)
        self.program = Program(recipe, mesh.make_mesh(num_devices), microbatches=num_devices)
        self.file, self.golden = golden, golden.arrays

    def named(self, packed: Params) -> dict[str, np.ndarray]:
        return jax.tree.map(np.asarray, self.program.layout.unpack(jax.device_get(packed)))

    def start(self) -> TrainState:
        state = self.program.init(jax.random.key(0))
        packed = self.program.layout.pack(jax.tree.map(jax.numpy.asarray, self.file.starts))
        shardings = self.program.shardings(self.program.specs)
        return state._replace(params=jax.device_put(packed, shardings.params))

    def batch(self, step: int) -> list[jax.Array]:
        length = self.file.config["seq_len"]
        ids = self.golden["tokens"][step * length : (step + 1) * length + 1].astype(np.int32)
        rows = np.tile(ids, (self.program.num_devices, 1))
        return [mesh.shard(x, self.program.mesh) for x in (rows[:, :-1], rows[:, 1:])]


def train(run: Run, num_steps: int) -> TrainState:
    state, batch, program = run.start(), run.batch(0), run.program
    lowered = program.train_step_for(program.static_at(0)).lower(state, *batch, program.schedule)
    train_step = lowered.compile(compiler_options=OPTIMISED if num_steps > 2 else None)
    losses = []
    for step in range(num_steps):
        state, metrics = train_step(state, *run.batch(step), program.schedule)
        losses.append(float(metrics.loss))
        if step == 0:
            np.testing.assert_allclose(losses, run.golden["losses"][:1], rtol=1e-5)
            assert_first_gradients_agree(run, state)
    np.testing.assert_allclose(losses, run.golden["losses"][:num_steps], atol=5e-5)
    return state


def assert_first_gradients_agree(run: Run, state: TrainState) -> None:
    """Both optimisers' means hold (1 - beta) times the gradient after a step: Muon's momentum, Adam's first moment."""
    recipe = run.program.recipe
    parts = {"mu": 1 - recipe.optimizer.adam.beta1, "momentum": 1 - float(recipe.inputs_at(0)["momentum"])}
    means = {
        name: jax.device_get(x) / part
        for field, part in parts.items()
        for name, x in leaves(state.opt_state, field).items()
    }
    grads = run.named(means)
    for name, grad in grads.items():
        assert_close(np.linalg.norm(grad), run.golden[f"grad0_norm/{name}"], name)
        assert_close(probe(grad), run.golden[f"grad0_probe/{name}"], name)
    assert {f"grad0_norm/{name}" for name in grads} == {k for k in run.golden if k.startswith("grad0_norm/")}


def assert_close(got: Any, want: Any, name: str) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_first_losses_and_gradients_agree(golden):
    """Two steps show an update; the others are `slow`."""
    train(Run(golden, 1), 2)


@pytest.mark.compile
@pytest.mark.parametrize("num_devices", [1, 8])
def test_all_losses_and_final_weights_agree(golden, num_devices):
    run = Run(golden, num_devices)
    state = train(run, golden.config["steps"])
    for name, value in run.named(state.params).items():
        want = golden.arrays[f"final_norm/{name}"]
        np.testing.assert_allclose(np.linalg.norm(value), want, rtol=1e-3, err_msg=name)
        want = golden.arrays[f"final_probe/{name}"]
        error = np.linalg.norm(probe(value) - want) / np.linalg.norm(want)
        assert error < 1e-2, f"{name}: {error}"
