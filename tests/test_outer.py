"""The outer optimiser against its formula in float64, and its identity settings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from speedrun.ground import mesh
from speedrun.ground.mesh import DATA
from speedrun.science.optim.outer import outer_nesterov

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
