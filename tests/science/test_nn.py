"""Pure functions of models against their formulas in NumPy."""

import statistics
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from speedrun.science import nn
from speedrun.science.kernels.mlp import bounds, mlp, product, unscaled


@pytest.mark.parametrize("size", [1.0, 2.0**-12])  # the mean square of the other is half of epsilon
def test_rms_norm_is_computed_in_float32_and_returned_as_it_came(size):
    x = jnp.asarray(size * np.random.default_rng(0).standard_normal((4, 768)), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    want = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1.1920929e-07)
    got = nn.rms_norm(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, jnp.asarray(want, jnp.float32).astype(jnp.bfloat16))


def test_learned_scalars_are_not_rounded():
    """bfloat16 rounds 1.003 to 1."""
    x = jnp.full((3,), 1024, jnp.bfloat16)
    got = nn.weighted_sum((jnp.float32(1.003), x), (jnp.float32(-1), x))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), 3.072, rtol=0.004)


def test_a_lookup_returns_rows_and_its_gradient_sums_for_each_row_in_float32():
    """A bfloat16 sum of ones stops at 256."""
    ids = np.array([[0, 7, 7, 3], [3, 7, 0, 5]])
    table, g = np.arange(16.0).reshape(8, 2), np.arange(16.0).reshape(2, 4, 2)
    rows, pull = jax.vjp(lambda table: nn.lookup(table, jnp.asarray(ids)), jnp.asarray(table))
    want = np.zeros_like(table)
    np.add.at(want, ids, g)
    np.testing.assert_array_equal(rows, table[ids])
    np.testing.assert_array_equal(pull(jnp.asarray(g, rows.dtype))[0], want)
    ids, table = jnp.zeros((1, 1000), jnp.int32), jnp.ones((4, 2), jnp.bfloat16)
    grad = jax.grad(lambda table: nn.lookup(table, ids).astype(jnp.float32).sum())(table)
    assert grad.dtype == jnp.bfloat16
    assert grad[0].tolist() == [1000.0, 1000.0]


def test_an_opening_token_belongs_to_the_document_it_opens():
    assert nn.documents(jnp.array([[5, 0, 5, 5, 0, 0, 5]]), 0).tolist() == [[0, 1, 1, 1, 2, 3, 3]]


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-6), ("bfloat16", 2.0**-8)])
def test_gelu_is_x_times_the_normal_distribution_function(dtype, most):
    x = np.linspace(-6, 6, 49)  # multiples of a quarter are exact in 16 bits
    phi = np.array([statistics.NormalDist().cdf(a) for a in x])
    density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    y, slope = jax.jvp(nn.gelu, (jnp.asarray(x, dtype),), (jnp.ones(49, dtype),))
    assert (y.dtype, slope.dtype) == (dtype, dtype)
    np.testing.assert_allclose(np.asarray(y, np.float64), x * phi, rtol=most, atol=1e-6)
    np.testing.assert_allclose(np.asarray(slope, np.float64), phi + x * density, rtol=most, atol=1e-6)


@pytest.mark.parametrize("dim", [16, 768])
def test_bounds_of_an_mlp_hold_and_are_reached(dim):
    """By a state that has all its norm in one entry, and by one along the largest row."""
    rng = np.random.default_rng(dim)
    up_FD = rng.standard_normal((4 * dim, dim)).astype(np.float32)
    largest_D = up_FD[np.argmax(np.linalg.norm(up_FD, axis=1))]
    x_ND = np.stack([*rng.standard_normal((100, dim)), largest_D, np.eye(dim)[0]])
    x_ND *= dim**0.5 / np.linalg.norm(x_ND, axis=1, keepdims=True)
    most_x, most_h = bounds(jnp.asarray(x_ND, jnp.float32), jnp.asarray(up_FD))
    assert most_x == pytest.approx(np.abs(x_ND).max(), rel=1e-5)
    assert most_h == pytest.approx(np.square(x_ND @ up_FD.T).max(), rel=1e-5)


def test_products_in_eight_bits_round_each_factor_by_its_own_scale():
    random = np.random.default_rng(0)
    x = jnp.asarray(50 * random.standard_normal((2, 5, 16)), jnp.bfloat16)
    w = jnp.asarray(random.standard_normal((7, 16)) / 50, jnp.bfloat16)
    most = jnp.float32(100)  # some are cut

    def rounded(a, most):
        scale = np.float32(most) / np.float32(448)
        scaled = np.clip(np.asarray(a, np.float32) / scale, -448, 448)
        return scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale

    got, back = jax.vjp(lambda x, w: product(x, w, most, "float8_e4m3fn"), x, w)
    got = jnp.asarray(got)
    want = rounded(x, 100) @ rounded(w, np.abs(w).max()).T
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-7, atol=1e-2)
    dy = jnp.ones_like(got)
    x_NI, w_OI = (np.asarray(a, np.float64).reshape(-1, 16) for a in (x, w))
    exact = np.ones((10, 7)) @ w_OI, np.ones((7, 10)) @ x_NI  # of factors that are not rounded
    for mine, want in zip(back(dy), exact, strict=True):
        np.testing.assert_allclose(
            np.asarray(mine, np.float64).reshape(want.shape), want, rtol=2**-8, atol=1e-3
        )
    np.testing.assert_array_equal(product(x, 0 * w, most, "float8_e4m3fn"), jnp.zeros_like(x @ w.T))


@pytest.mark.parametrize("size", [0.0, 1e-3, 30.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_without_their_scale_have_the_gradients_of_exact_factors(dtype, size):
    random, factors = np.random.default_rng(0), "float8_e4m3fn"
    x = nn.rms_norm(jnp.asarray(random.standard_normal((12, 16)), dtype))
    weights = tuple(jnp.asarray(size * random.standard_normal((n, 16)), dtype) for n in (7, 7, 3))
    dys = tuple(jnp.asarray(random.standard_normal((12, len(w))), dtype) for w in weights)

    def scaled(x, weights):
        products, scales = unscaled(x, weights, factors)
        return tuple(y * s.astype(dtype) for y, s in zip(products, scales, strict=True))

    got, pull = jax.vjp(scaled, x, weights)
    dx, dweights = pull(dys)
    most, wide = {"float32": 1e-6, "bfloat16": 2.0**-6}[dtype], partial(np.asarray, dtype=np.float64)
    exact = np.sum([wide(dy) @ wide(w) for dy, w in zip(dys, weights, strict=True)], axis=0)
    np.testing.assert_allclose(wide(dx), exact, rtol=most, atol=most * np.abs(exact).max())
    for y, w, dy, dw in zip(got, weights, dys, dweights, strict=True):
        want = product(x, w, jnp.float32(4), factors)
        np.testing.assert_allclose(
            wide(y), wide(want), rtol=most, atol=most * float(np.abs(wide(want)).max())
        )
        np.testing.assert_allclose(wide(dw), wide(dy).T @ wide(x), rtol=most, atol=10 * most)


def test_the_mlp_in_eight_bits_is_near_that_in_sixteen_also_where_its_bounds_are_reached():
    random = np.random.default_rng(0)
    x, up, down = (random.standard_normal(shape) for shape in ((1, 64, 96), (384, 96), (96, 384)))
    x[0, 0], x[0, 1] = up[np.argmax(np.linalg.norm(up, axis=1))], np.eye(96)[0]
    x = nn.rms_norm(jnp.asarray(x, jnp.float32))
    up, down = jnp.asarray(up / 10, jnp.float32), jnp.asarray(down / 20, jnp.float32)
    exact, got = (mlp(x, up, down, factors=dtype) for dtype in ("float32", "float8_e4m3fn"))
    error = np.linalg.norm(got - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert error.max() < 0.1
    assert 0.02 < error.mean() < 0.06
