"""Muon and NorMuon against a slow reference, Adam against its formula."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driven import OPTIMIZER, RATES, Driven, draw

from speedrun.recipes.muon import longer_side_root
from speedrun.recipes.record89.normuon_and_adam import POLAR_EXPRESS, normalize, polar_express
from speedrun.science.inputs import Inputs
from speedrun.science.optim.muon_and_adam import Adam
from speedrun.science.optim.orthogonal import orthogonalize, scale_by_muon, shape_factor
from speedrun.science.params import Member


def on_singular_values(
    g: np.ndarray, coefficients: Any, stretch: float = 1.0, eps: float = 1e-7
) -> np.ndarray:
    """Apply a s + b s^3 + c s^5 to each singular value of what has a norm of one, through an SVD in float64."""
    u, s, vt = np.linalg.svd(g.astype(np.float64), full_matrices=False)
    s = s / (stretch * np.sqrt((s * s).sum()) + eps)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


slow_orthogonalize = partial(on_singular_values, coefficients=5 * [(3.4445, -4.7750, 2.0315)])
slow_polar = partial(on_singular_values, coefficients=POLAR_EXPRESS, stretch=1.02, eps=1e-6)


@pytest.mark.parametrize(
    ("shape", "size"), [((4, 4), 1.0), ((8, 32), 1.0), ((16, 17), 1.0), ((1, 5), 1.0), ((4, 4), 1e-8)]
)
def test_newton_schulz_is_its_polynomial_on_the_singular_values(shape, size):
    bank = size * np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    got = orthogonalize(jnp.asarray(bank), steps=5, dtype="float32")
    want = np.stack([slow_orthogonalize(g) for g in bank])
    np.testing.assert_allclose(got, want, atol=2e-4)
    assert not orthogonalize(0 * bank, steps=5, dtype="float32").any()


#: Of optax's own tests, those whose definition is ours: 2-D arrays, divided by their Frobenius norm.
OPTAX_CASES = (
    *(f"test_muon_orthogonalization_modes_standard_{name}" for name in ("square", "tall", "wide")),
    "test_orthogonality_frobenius",
)


@pytest.mark.parametrize("case", OPTAX_CASES)
def test_a_case_of_optax_passes_with_our_iteration(case, monkeypatch):
    calls = []

    def ours(x_mn: jax.Array, _: jax.Array, steps: int, *__: Any) -> jax.Array:
        calls.append(steps)
        is_tall = x_mn.shape[0] > x_mn.shape[1]
        (y,) = orthogonalize((x_mn.T if is_tall else x_mn)[None], steps=steps, dtype="float32")
        return y.T if is_tall else y

    judge = pytest.importorskip("optax.contrib._muon_test", reason="this optax comes without its tests")
    monkeypatch.setattr(judge._muon, "orthogonalize_via_newton_schulz", ours)
    result = judge.MuonTest(case).run()
    assert (result.testsRun, calls) == (1, [5])
    assert result.wasSuccessful(), [*result.errors, *result.failures]


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
    want = np.stack([k * slow_orthogonalize(np.asarray(g)) for k, g in enumerate(look_ahead, 1)])
    np.testing.assert_allclose(update["bank"], want, atol=2e-3)


@pytest.mark.parametrize(
    ("rows", "cols", "factor", "root"), [(4, 4, 1, 2), (144, 36, 2, 12), (36, 144, 1, 12)]
)
def test_factors_depend_on_the_sides_of_a_matrix(rows, cols, factor, root):
    matrix = Member("up", 0, rows, cols)
    assert (shape_factor(matrix), longer_side_root(matrix)) == (factor, root)


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


# --- NorMuon against its formulas in float64; test_golden89.py has an independent implementation ------------


class PlainNorMuon:
    """One matrix as declared, with as many rows and columns as it has."""

    def __init__(self, w: np.ndarray, rate: float) -> None:
        self.w, self.rate, self.mean, self.second = np.float64(w), rate, 0.0, 0.0

    def move(self, g: np.ndarray, mu: float, lr_scale: float) -> None:
        self.mean = self.mean + (1 - mu) * (g - self.mean)
        x = slow_polar(g + mu * (self.mean - g))
        rows, cols = g.shape
        square = (x * x).mean(axis=1 if rows >= cols else 0, keepdims=True)
        self.second = self.second + 0.1 * (square - self.second)
        d = x / np.sqrt(np.maximum(self.second, 1e-10))
        d *= np.linalg.norm(x) / max(np.linalg.norm(d), 1e-10)
        a = OPTIMIZER.muon_lr * lr_scale
        decay = a * OPTIMIZER.muon_decay * self.w * (d * self.w >= 0)
        self.w = self.w - a * self.rate * (d + decay)


@pytest.mark.parametrize("num_devices", [1, 8])
def test_it_follows_its_formulas_for_tall_wide_and_square_matrices(num_devices):
    start = draw(0)
    driven = Driven(start, num_devices)
    names = ("up", "down", "square")
    plain: dict[str, list[PlainNorMuon]] = {}
    for name in names:
        matrices = start[name].reshape(-1, *start[name].shape[-2:])
        plain[name] = [PlainNorMuon(w, RATES.get(name, 1.0)) for w in matrices]
    for step, (mu, lr_scale) in enumerate([(0.85, 1.0), (0.9, 1.7), (0.95, 0.4)]):
        grads = draw(1 + step)
        got = driven.go(grads, momentum=mu, lr_scale=lr_scale)
        for name in names:
            for one, g in zip(plain[name], grads[name].reshape(-1, *start[name].shape[-2:]), strict=True):
                one.move(g, mu, lr_scale)
            want = np.stack([one.w for one in plain[name]]).reshape(start[name].shape)
            np.testing.assert_allclose(got[name], want, atol=3e-6, err_msg=f"{name} after step {step}")


def test_without_gradients_zeros_stay_and_everything_else_decays():
    """A zero direction agrees with every sign: D W >= 0. By a rate * decay * a."""
    start, none = draw(0), {name: 0 * x for name, x in draw(0).items()}
    got = Driven(start).go(none, lr_scale=0.5)
    a = 0.5 * OPTIMIZER.muon_lr
    for name in ("up", "down", "square"):
        kept = 1 - RATES.get(name, 1.0) * OPTIMIZER.muon_decay * a * a
        np.testing.assert_allclose(got[name], kept * start[name], rtol=1e-6)
    driven = Driven(none)
    driven.go(none)
    assert not any(bank.any() for bank in driven.held[0].values())


def test_in_sixteen_bits_the_factor_is_rounded_once_and_means_are_not():
    x = jnp.asarray(draw(3)["down"][None], jnp.bfloat16)
    before = jnp.full((1, 1, 20), 0.3)
    d, second = normalize(x, before, beta2=0.9)
    x64 = np.float64(x)
    mean = 0.27 + 0.1 * (x64**2).mean(axis=1, keepdims=True)
    factor = np.linalg.norm(x64) / np.linalg.norm(x64 / np.sqrt(mean)) / np.sqrt(mean)
    rounded = jnp.asarray(jnp.asarray(factor, jnp.bfloat16), jnp.float32)
    np.testing.assert_array_equal(d, (rounded * x.astype(jnp.float32)).astype(jnp.bfloat16))
    np.testing.assert_allclose(second, mean, rtol=1e-6)
    direction = jax.jit(partial(polar_express, dtype="bfloat16"))(jnp.asarray(draw(3)["up"]).mT)
    assert (d.dtype, direction.dtype, second.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    want = np.stack([slow_polar(g) for g in draw(3)["up"].swapaxes(1, 2)])
    assert np.linalg.norm(np.float32(direction) - want) < 0.2 * np.linalg.norm(want)
