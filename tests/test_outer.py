"""The outer optimiser against its formula in float64, with identity settings, and in a recipe."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from test_step import run

from speedrun.ground import mesh
from speedrun.ground.errors import UsageError
from speedrun.ground.mesh import DATA
from speedrun.science.optim.outer import Outer, outer_nesterov
from speedrun.science.recipe import Recipe
from speedrun.training.fingerprint import state_hash
from speedrun.training.program import Program

INNER_LR = 2.0**-4  #: a power of two: its products are exact, so that contracting them changes no bit


def target(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def train(
    transform: optax.GradientTransformation, params: dict[str, jax.Array], num_steps: int, num_devices: int
):
    """Descend |p - target|^2 / 2 with a sharded state, as the step does; return parameters after each step."""
    on = mesh.make_mesh(num_devices)
    goal = {k: jnp.asarray(target(p.shape)) for k, p in params.items()}
    spec = {"rows": P(DATA), "vector": P()}

    def specs(path, leaf):
        names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
        return spec[names[-1]] if names else P()

    state = transform.init(params)
    state_specs = jax.tree_util.tree_map_with_path(specs, state)

    def step(params, state, goal):
        grads = jax.tree.map(lambda p, t: p.astype(jnp.float32) - t, params, goal)
        updates, state = transform.update(grads, state, params)
        return jax.tree.map(lambda p, u: (p.astype(jnp.float32) + u).astype(p.dtype), params, updates), state

    mapped = jax.shard_map(step, mesh=on, in_specs=(spec, state_specs, spec), out_specs=(spec, state_specs))
    compiled, seen = jax.jit(mapped), []
    for _ in range(num_steps):
        params, state = compiled(params, state, goal)
        seen.append(jax.device_get(params))
    return seen


def start(dtype=jnp.float32) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        "rows": jnp.asarray(rng.standard_normal((16, 3)), dtype),
        "vector": jnp.asarray(rng.standard_normal(5), jnp.float32),
    }


def test_every_round_is_the_formula():
    every, lr, momentum = 4, 0.7, 0.5
    seen = train(outer_nesterov(optax.sgd(INNER_LR), every, lr, momentum), start(), 3 * every + 2, 8)
    for name, p in start().items():
        x = np.asarray(p, np.float64)
        anchor, velocity = x, np.zeros_like(x)
        for step in range(3 * every + 2):
            if step % every == 0:
                anchor = x
            x = x - INNER_LR * (x - target(x.shape))
            if step % every == every - 1:
                velocity = momentum * velocity + (anchor - x)
                x = anchor - lr * ((anchor - x) + momentum * velocity)
            np.testing.assert_allclose(seen[step][name], x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("every", [1, 3])
def test_identity_settings_give_the_same_bits(num_devices, every):
    inner = optax.sgd(INNER_LR)
    params = start(jnp.bfloat16)
    alone = train(inner, params, 7, num_devices)
    wrapped = train(outer_nesterov(inner, every, 1.0, 0.0), params, 7, num_devices)
    for want, got in zip(alone, wrapped, strict=True):
        for name, x in want.items():
            assert got[name].dtype == params[name].dtype
            assert got[name].tobytes() == x.tobytes()


def test_momentum_is_kept_in_the_dtype_of_the_parameter():
    params = start(jnp.bfloat16)
    state: Any = outer_nesterov(optax.sgd(INNER_LR), 2, 0.7, 0.5).init(params)
    assert state.anchor["rows"].dtype == state.velocity["rows"].dtype == jnp.bfloat16
    assert state.anchor["vector"].dtype == jnp.float32


def around(recipe: Recipe, **settings: float) -> Recipe:
    outer = Outer(recipe.optimizer, every=2, lr=0.7, momentum=0.5)
    return dataclasses.replace(recipe, optimizer=outer).override(
        {f"optimizer.{name}": value for name, value in settings.items()}
    )


@pytest.mark.compile
def test_a_recipe_trains_alike_on_one_device_and_eight(tiny):
    programs = [Program(around(tiny), mesh.make_mesh(n)) for n in (1, 8)]
    (_, one), (state, eight) = (run(program, 4) for program in programs)
    outer: Any = state.opt_state
    np.testing.assert_allclose(one, eight, rtol=1e-4)
    for held in (outer.anchor, outer.velocity):
        assert {name: x.sharding.spec for name, x in held.items()} == programs[1].layout.specs


@pytest.mark.compile
def test_a_recipe_with_identity_settings_ends_in_the_same_state(tiny):
    wrapped = around(tiny, lr=1.0, momentum=0.0, every=3)
    states = [run(Program(recipe, mesh.make_mesh(8)), 4)[0] for recipe in (tiny, wrapped)]
    assert state_hash(states[0]) == state_hash(states[1])


@pytest.mark.parametrize(
    ("setting", "said"),
    [({"every": 0}, "every is 0; need `int` >= 1"), ({"momentum": 1.0}, "need `float` < 1.0")],
)
def test_settings_without_a_round_or_without_an_end_are_refused(tiny, setting, said):
    with pytest.raises(UsageError, match=said):
        around(tiny, **setting)
