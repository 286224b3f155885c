"""The MLP with gradients in 8 bits: against NumPy with rounded factors, exact gradients, and what may break it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from speedrun.science import nn
from speedrun.science.kernels import mlp_gradients
from speedrun.science.kernels.mlp import mlp

TOKENS, DIM, WIDE = 64, 32, 96
SCALE = 2.0**-6
FORM = partial(mlp_gradients.mlp, gradient_scale=SCALE)


def operands() -> dict[str, jax.Array]:
    """Return normalised states, both matrices, and a gradient of the result."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"x": (TOKENS, DIM), "up": (WIDE, DIM), "down": (DIM, WIDE), "dy": (TOKENS, DIM)}
    drawn = {name: jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys, strict=True)}
    return {**drawn, "x": nn.rms_norm(drawn["x"]), "up": drawn["up"] / 6, "down": drawn["down"] / 10}


def with_gradients(form: Any, given: dict[str, jax.Array]) -> list[np.ndarray]:
    """Return y, and the gradients of x, up and down, in float64."""
    y, pull = jax.vjp(form, given["x"], given["up"], given["down"])
    return [np.asarray(x, np.float64) for x in (y, *pull(given["dy"]))]


def errors(got: list[np.ndarray], want: list[np.ndarray]) -> np.ndarray:
    return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(got, want, strict=True)])


def test_it_multiplies_rounded_factors():
    """A number that is half-way between two may be rounded to the other, as its product is in float32 here."""

    def rounded(x: np.ndarray, scale: float, dtype: Any) -> np.ndarray:
        limit = float(ml_dtypes.finfo(dtype).max)
        return scale * np.clip(x / scale, -limit, limit).astype(dtype).astype(np.float64)

    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    given = operands()
    x, up, down, dy = (np.asarray(given[name], np.float64) for name in ("x", "up", "down", "dy"))
    x8 = rounded(x, np.sqrt(DIM) / 448, e4m3)
    up8, down8 = (rounded(w, np.abs(w).max() / 448, e4m3) for w in (up, down))
    h8 = rounded(np.maximum(x8 @ up8.T, 0) ** 2, DIM * (up**2).sum(axis=1).max() / 448, e4m3)
    dz8, dy8 = rounded(dy @ down * 2 * np.sqrt(h8), SCALE, e5m2), rounded(dy, SCALE, e5m2)
    want = [h8 @ down8.T, dz8 @ up8, dz8.T @ x8, dy8.T @ h8]
    assert errors(with_gradients(FORM, given), want).max() < 5e-3


@pytest.mark.parametrize("factor", [2.0**-12, 1.0, 2.0**3])
def test_gradients_of_all_sizes_are_near_the_exact_ones(factor):
    given = operands()
    given["dy"] *= factor
    found = errors(with_gradients(FORM, given), with_gradients(mlp, given))
    assert found.min() > 0.02
    assert found.max() < 0.1


@pytest.mark.parametrize(
    ("name", "change", "zeros"),
    [
        ("down", lambda x: 0 * x, {"x", "up"}),  # as it begins
        ("up", lambda x: 0 * x, {"x", "up", "down"}),
        ("dy", lambda x: 0 * x, {"x", "up", "down"}),
        ("dy", lambda x: 1e30 * x, set()),
        ("dy", lambda x: 1e-30 * x, {"x", "up", "down"}),
        ("x", lambda x: 0 * x + x[:1], set()),  # rank one
        ("up", lambda x: 1e-10 * x, {"x", "up"}),
        ("up", lambda x: 1e8 * x, set()),
    ],
)
def test_hard_inputs_in_sixteen_bits_give_finite_numbers(name, change, zeros):
    given = operands()
    given[name] = change(given[name])
    y, *gradients = with_gradients(FORM, {key: x.astype(jnp.bfloat16) for key, x in given.items()})
    assert all(np.isfinite(x).all() for x in (y, *gradients))
    assert {key for key, x in zip(("x", "up", "down"), gradients, strict=True) if not x.any()} == zeros


@pytest.mark.parametrize("name", ["x", "up", "down", "dy"])
def test_what_is_no_number_reaches_the_gradients(name):
    given = {key: x.astype(jnp.bfloat16) for key, x in operands().items()}
    given[name] = given[name].at[3, 5].set(jnp.nan)
    _, *gradients = with_gradients(FORM, given)
    assert not all(np.isfinite(x).all() for x in gradients)
