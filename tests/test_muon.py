"""Newton-Schulz and Muon against a slow reference and against optax; Adam against its formula."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from speedrun.science.inputs import Inputs
from speedrun.science.optim.groups import Adam
from speedrun.science.optim.orthogonal import orthogonalize, scale_by_muon, shape_factor
from speedrun.science.params import Member


def slow_orthogonalize(g: np.ndarray, steps: int) -> np.ndarray:
    """Apply a x + b x^3 + c x^5 to each singular value, through an SVD in float64."""
    u, s, vt = np.linalg.svd(g.astype(np.float64), full_matrices=False)
    s = s / (np.sqrt((s * s).sum()) + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


@pytest.mark.parametrize(
    ("shape", "size"), [((4, 4), 1.0), ((8, 32), 1.0), ((16, 17), 1.0), ((1, 5), 1.0), ((4, 4), 1e-8)]
)
def test_newton_schulz_is_its_polynomial_on_the_singular_values(shape, size):
    bank = size * np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    got = orthogonalize(jnp.asarray(bank), steps=5, dtype="float32")
    want = np.stack([slow_orthogonalize(g, 5) for g in bank])
    np.testing.assert_allclose(got, want, atol=2e-4)


def test_optax_differs_by_the_correction_of_bias_and_by_nothing_else():
    """Its momentum is ours with both means divided by 1 - beta^t; after the first step the directions differ."""
    dims: Any = {"w": optax.contrib.MuonDimensionNumbers()}
    tx = optax.contrib.scale_by_muon(beta=0.95, ns_steps=5, weight_dimension_numbers=dims)
    ours = scale_by_muon(lambda: {"w": jnp.ones((1, 1, 1))}, steps=5, dtype="float32")
    now = Inputs({"momentum": jnp.float32(0.95)}, {})
    grads = jax.random.normal(jax.random.key(1), (3, 16, 24))
    state, own, mean = tx.init({"w": grads[0]}), ours.init({"w": grads[:1]}), jnp.zeros((16, 24))
    for t, g in enumerate(grads, 1):
        theirs: Any
        mine: Any
        theirs, state = tx.update({"w": g}, state, {"w": g})
        mine, own = ours.update({"w": g[None]}, own, inputs=now)
        mean = 0.95 * mean + 0.05 * g
        corrected = 0.95 * mean / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
        want = orthogonalize(corrected[None], steps=5, dtype="float32")[0]
        np.testing.assert_allclose(theirs["w"], want, atol=1e-5)
        difference = np.linalg.norm(mine["w"][0] - want) / np.linalg.norm(want)
        assert difference < 1e-5 if t == 1 else 0.05 < difference < 0.15


def test_zero_stays_zero_and_tall_matrices_are_refused():
    assert not orthogonalize(jnp.zeros((2, 3, 5)), steps=5, dtype="float32").any()
    with pytest.raises(ValueError, match="5 x 3"):
        orthogonalize(jnp.zeros((2, 5, 3)), steps=5, dtype="float32")


def test_momentum_is_nesterov_and_each_matrix_has_its_factor():
    key = jax.random.key(2)
    g1, g2 = jax.random.normal(key, (2, 8, 3, 4))
    factor = jnp.arange(1.0, 9.0)[:, None, None]
    tx = scale_by_muon(lambda: {"bank": factor}, steps=5, dtype="float32")
    state = tx.init({"bank": g1})
    _, state = tx.update({"bank": g1}, state, inputs=Inputs({"momentum": jnp.float32(0.9)}, {}))
    update: Any
    update, _ = tx.update({"bank": g2}, state, inputs=Inputs({"momentum": jnp.float32(0.8)}, {}))
    mean = 0.8 * (0.1 * g1) + 0.2 * g2
    look_ahead = 0.8 * mean + 0.2 * g2
    want = np.stack([k * slow_orthogonalize(np.asarray(g), 5) for k, g in enumerate(look_ahead, 1)])
    np.testing.assert_allclose(update["bank"], want, atol=2e-3)


@pytest.mark.parametrize(("rows", "cols", "factor"), [(4, 4, 1), (3072, 768, 2), (768, 3072, 1)])
def test_tall_matrices_move_further(rows, cols, factor):
    assert shape_factor(Member("up", 0, rows, cols)) == factor


def test_adam_keeps_moments_in_16_bits_and_computes_in_float32():
    """Two steps by the formula; only the moments between them are rounded."""
    g1, g2 = np.asarray(jax.random.normal(jax.random.key(3), (2, 64)))
    tx = Adam(0.8, 0.95, 1e-10).at(0.1)
    state = tx.init(jnp.zeros(64, jnp.bfloat16))
    update: Any
    for g in (g1, g2):
        update, state = tx.update(jnp.asarray(g), state)
    kept = [leaf.dtype for leaf in jax.tree.leaves(state) if leaf.size > 1]
    moments = 0.2 * g1, np.float32(0.05) * g1 * g1
    mean, square = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in moments)
    mean, square = 0.8 * mean + 0.2 * g2, 0.95 * square + 0.05 * g2 * g2
    want = -0.1 * (mean / (1 - 0.8**2)) / (np.sqrt(square / (1 - 0.95**2)) + 1e-10)
    np.testing.assert_allclose(update, want, rtol=1e-5, atol=1e-7)
    assert kept == [jnp.bfloat16, jnp.bfloat16]
