"""Estimates of memory against real states, and refusals before compilation."""

import jax
import jax.numpy as jnp
import pytest

from speedrun import recipes
from speedrun.base import mesh
from speedrun.base.errors import UsageError
from speedrun.base.mesh import make_mesh
from speedrun.train import memory
from speedrun.train import program as programs
from speedrun.train.preflight import prepare
from speedrun.train.program import Program
from speedrun.train.run_config import RunConfig


@pytest.mark.parametrize("num_devices", [1, 8])
def test_state_bytes_are_those_of_the_state(tiny, num_devices):
    program = Program(tiny, make_mesh(num_devices))
    state = program.init(jax.random.key(0))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert memory.state_bytes(program) == held


def test_more_parts_need_less():
    whole, parts = (memory.max_bytes(Program(recipes.load("smoke"), make_mesh(1), n)) for n in (8, 1))
    assert whole < parts


@pytest.mark.parametrize(
    ("function", "arrays"),
    [
        (lambda x, w: jnp.tanh(x @ w) + x, 1),  # the product; the sum is the result
        (lambda x, w: jnp.tanh(x @ w) @ w, 2),  # a product, and what another one reads
        (lambda x, w: jnp.tanh(x @ w + 1), 1),  # not what is only renamed, or computed where it is read
        (lambda x, w: (x @ w + w).T.reshape(4, -1, 16) + 1, 1),
        (lambda x, w: (x @ w) @ (w @ x), 2),
        (lambda x, w: ((x @ w) @ w) @ w, 2),  # a third array takes the place of the first
        (lambda x, w: jax.lax.fori_loop(0, 9, lambda _, y: jnp.tanh(y @ w), x), 1),  # in each turn
        (lambda x, w: (x @ w).at[0].set(7) @ w, 1),  # in place
    ],
)
def test_bytes_beside_inputs_and_results_are_those_of_arrays_that_exist_at_one_time(function, arrays):
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    found = memory.temp_bytes(jax.make_jaxpr(function)(x, x).jaxpr)
    assert found == pytest.approx(arrays * 4 * 256 * 256, rel=0.01)


@pytest.fixture
def a_device_of(monkeypatch):
    return lambda num_bytes: monkeypatch.setattr(mesh, "memory_bytes", lambda _: num_bytes)


def test_a_run_that_does_not_fit_is_refused(a_device_of, tmp_path):
    a_device_of(memory.max_bytes(Program(recipes.load("smoke"), make_mesh(8))) - 1)
    said = (
        r"smoke needs about 0\.\d\d GB on each device, this cpu gives JAX 0\.\d\d GB; try more --microbatches"
    )
    with pytest.raises(UsageError, match=said):
        prepare(RunConfig(track="smoke-cpu", out=tmp_path / "new", data=tmp_path))


@pytest.mark.parametrize(("spare_bytes", "remat"), [(0, "off"), (-1, "on")])
def test_a_gpu_with_too_little_memory_computes_activations_twice_and_says_so(
    a_device_of, monkeypatch, smoke_data, tmp_path, spare_bytes, remat
):
    monkeypatch.setattr(programs.meshes, "accelerator", lambda _: ("gpu", "8.9"))
    longer = {
        "stages.0.seq_len": "1024",
        "stages.0.num_steps": "40",
    }  # else only the order of a trace decides
    a_device_of(memory.max_bytes(Program(recipes.load("smoke").override(longer), make_mesh(8))) + spare_bytes)
    ready = prepare(RunConfig("smoke-cpu", tmp_path / "new", overrides=longer, data=smoke_data))
    assert ready.described["remat"] == remat
    said = {call: choice.reason for call, choice in ready.program.kernels.choices.items()}
    assert ("logits of 12,288 tokens at one time" in said.get("activations", "")) == (remat == "on")


def test_simulated_devices_share_the_memory_of_the_machine():
    program, eight = Program(recipes.load("smoke"), make_mesh(8)), mesh.memory_bytes(make_mesh(8))
    assert mesh.memory_bytes(make_mesh(1)) // 8 == eight
    with pytest.raises(UsageError, match="this cpu gives JAX"):
        memory.require(program, eight + 1)
