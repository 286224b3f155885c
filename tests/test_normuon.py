"""NorMuon against its formulas in float64; test_golden89.py has an independent implementation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driven import OPTIMIZER, RATES, Driven, draw

from speedrun.science.optim.normuon_and_adam import POLAR_EXPRESS, normalize, polar_express


def slow_polar(g: np.ndarray) -> np.ndarray:
    """Apply a s + b s^3 + c s^5 to each singular value, in float64."""
    u, s, vt = np.linalg.svd(g.astype(np.float64), full_matrices=False)
    s = s / (1.02 * np.sqrt((s * s).sum()) + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


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
