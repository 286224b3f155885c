"""The loss head: its choices; test_several_targets.py has its values, plan/test_h100_heads.py what an H100 would run.

The passes over the logits for Hopper are interpreted, and compared with float64.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from speedrun.science.kernels import cross_entropy_gpu as gpu
from speedrun.science.kernels import cross_entropy_mosaic as mosaic
from speedrun.science.kernels.cross_entropy import (
    Cap,
    Losses,
    Targets,
    as_cap,
    logits,
    single_targets,
    weighted_cross_entropy,
    weighted_uncapped,
)
from speedrun.science.kernels.dispatch import HeadCall, choose_head

CAP = 15.0


def summed(
    form: Callable[..., Losses], x_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array, *, cap: float
) -> jax.Array:
    return form(x_ND, head_VD, single_targets(targets_N), cap=as_cap(cap)).weighted


def summed_on_gpu(*args: jax.Array, cap: float, **options: Any) -> jax.Array:
    return summed(partial(gpu.weighted_cross_entropy, **options), *args, cap=cap)


def inputs(num_tokens: int, model_dim: int, vocab_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return states of unit variance, weights whose logits reach about the cap, and targets."""
    kx, kw, kt = jax.random.split(jax.random.key(0), 3)
    head_VD = 3 / model_dim**0.5 * jax.random.normal(kw, (vocab_size, model_dim))
    targets_N = jax.random.randint(kt, (num_tokens,), 0, vocab_size)
    return jax.random.normal(kx, (num_tokens, model_dim)), head_VD, targets_N


def value_and_grads(form: Callable[..., jax.Array], *args: jax.Array, scale: float = 1.0) -> tuple[Any, Any]:
    """Differentiate `scale` times the sum, so that the incoming gradient matters."""
    return jax.jit(jax.value_and_grad(lambda *a: scale * form(*a, cap=CAP), (0, 1)))(*args)


def rounded(head_dtype: Any, x_dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array, jax.Array]:
    x_ND, head_VD, targets_N = inputs(93, 128, 500)
    x_ND, head_VD = (a.astype(jnp.bfloat16) for a in (x_ND, head_VD / 4))
    return x_ND.astype(x_dtype), head_VD.astype(head_dtype), targets_N


def test_gradients_in_8_bits_may_be_tiny_or_large():
    """8-bit gradients are scaled as those of the sum and multiplied by the incoming gradient later."""
    form = partial(summed_on_gpu, fp8=gpu.RECORD21)
    _, want = value_and_grads(form, *rounded(jnp.float32))
    for scale in (2.0**-30, 2.0**30):
        _, got = value_and_grads(form, *rounded(jnp.float32), scale=scale)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32) / scale, np.asarray(b, np.float32))


def test_only_the_forward_product_sums_fast():
    """Only tensor cores make a difference, so the test reads the requested precision."""
    form = partial(summed_on_gpu, fp8=gpu.RECORD21, cap=CAP)
    text = jax.jit(jax.grad(form, (0, 1))).lower(*rounded(jnp.float32)).as_text()
    assert text.count("precision = [DEFAULT, DEFAULT]") == 1
    assert text.count("precision = [HIGHEST, HIGHEST]") == 2


def test_without_a_cap_it_is_plain_cross_entropy():
    """Against float64 on the host; the gradients are (softmax - one hot) W and (softmax - one hot)^T x."""
    x_ND, head_VD, targets_N = inputs(24, 12, 33)
    choice = choose_head(HeadCall(24, 50_304, jnp.dtype(jnp.float32), "cpu", "", None, as_cap(math.inf)))
    form = partial(summed, partial(choice.function, num_chunks=3), cap=math.inf)
    nll, (dx_ND, dhead_VD) = jax.value_and_grad(form, (0, 1))(x_ND, head_VD, targets_N)
    x, w = (np.asarray(a, np.float64) for a in (x_ND, head_VD))
    p_NV = np.exp(x @ w.T) / np.exp(x @ w.T).sum(1, keepdims=True)
    rows = np.arange(24), np.asarray(targets_N)
    np.testing.assert_allclose(nll, -np.log(p_NV[rows]).sum(), rtol=1e-6)
    p_NV[rows] -= 1
    np.testing.assert_allclose(dx_ND, p_NV @ w, atol=1e-5)
    np.testing.assert_allclose(dhead_VD, p_NV.T @ x, atol=1e-5)
    np.testing.assert_allclose(logits(x_ND, head_VD, cap=math.inf), x @ w.T, atol=1e-4)


def test_without_a_cap_the_heads_gradient_is_summed_in_float32():
    """One chunk in the middle gives 256, the others 1 each: in 16 bits, 256 + 1 is 256."""
    x_ND, targets_N = jnp.full((64, 1), 2, jnp.bfloat16).at[32].set(512), jnp.zeros(64, jnp.int32)
    form = partial(summed, partial(weighted_uncapped, num_chunks=64), cap=math.inf)
    grad = jax.jit(jax.grad(form, 1))(x_ND, jnp.zeros((2, 1), jnp.bfloat16), targets_N)
    assert grad.tolist() == [[-320.0], [320.0]]  # 319, rounded once


CAPS = {"record 21": as_cap(15.0), "record 89": Cap(11.5, 15.0, 5.0)}
TOKENS = 128
INTERPRET = InterpretGPUParams()
INTERPRETED = gpu.Passes(
    partial(mosaic.sum_exp, interpret=INTERPRET), partial(mosaic.softmax_gradient, interpret=INTERPRET)
)


def exact(z_NV: jax.Array, cap: Cap, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return exp(capped - height), and that times the slope of tanh, in float64."""
    tanh_NV = np.tanh((np.asarray(z_NV, np.float64) / scale + cap.shift) / cap.unit)
    exp_NV = np.exp(cap.height * (tanh_NV - 1))
    return exp_NV, exp_NV * (1 - tanh_NV**2)


@pytest.mark.parametrize("cap", CAPS.values(), ids=CAPS)
@pytest.mark.parametrize(("columns", "width"), [(384, 192), (256, 128), (320, 64)])
def test_passes_are_those_of_the_formulas(columns, width, cap):
    scale = 100.0
    z_NV = (8 * scale * jax.random.normal(jax.random.key(0), (TOKENS, columns))).astype(jnp.bfloat16)
    factor_N = jnp.linspace(0.0, 60.0, TOKENS)
    exp_NV, sloped_NV = exact(z_NV, cap, scale)
    assert mosaic._columns(z_NV) == width
    np.testing.assert_allclose(INTERPRETED.sum_exp(z_NV, cap, scale), exp_NV.sum(1), rtol=1e-5)
    want_NV = np.asarray(factor_N, np.float64)[:, None] * sloped_NV
    (g_NV,) = INTERPRETED.softmax_gradient(z_NV, factor_N, cap, scale, jnp.bfloat16)
    np.testing.assert_allclose(np.asarray(g_NV, np.float64), want_NV, rtol=2.0**-8, atol=1e-30)
    g_NV, g_VN = INTERPRETED.softmax_gradient(z_NV, factor_N, cap, scale, jnp.float8_e5m2)
    # Two digits; below 2^-14 they get fewer.
    np.testing.assert_allclose(np.asarray(g_NV, np.float64), want_NV, rtol=2.0**-3 + 2e-3, atol=2.0**-17)
    np.testing.assert_array_equal(np.asarray(g_NV, np.float32).T, np.asarray(g_VN, np.float32))


def targets() -> Targets:
    ids_NM = jax.random.randint(jax.random.key(1), (TOKENS, 4), 0, 192).at[::3, 1].set(-1)
    ids_NM = ids_NM.at[::2, 3].set(ids_NM[::2, 0])
    weights_NM = jnp.where(ids_NM >= 0, jnp.array([[1.0, 0.5, 0.25, 0.25]]), 0.0)
    return Targets(ids_NM, weights_NM, jnp.full(TOKENS, 2.0))


def head_gradients(
    form: Any, dtype: Any, cap: Cap = CAPS["record 89"]
) -> tuple[Losses, tuple[jax.Array, ...]]:
    kx, kw = jax.random.split(jax.random.key(2))
    x_ND = jax.random.normal(kx, (TOKENS, 64)).astype(jnp.bfloat16).astype(dtype)
    head_VD = (0.3 * jax.random.normal(kw, (192, 64))).astype(jnp.bfloat16).astype(dtype)

    def loss(x_ND: jax.Array, head_VD: jax.Array) -> tuple[jax.Array, Losses]:
        losses = form(x_ND, head_VD, targets(), cap=cap)
        return losses.weighted, losses

    gradients, losses = jax.grad(loss, (0, 1), has_aux=True)(x_ND, head_VD)
    return losses, gradients


@pytest.mark.compile
@pytest.mark.parametrize(
    ("fp8", "most"), [(None, 0.01), (gpu.Fp8(x=8.0, head=64.0, grad=64.0), 0.1)], ids=["bf16", "fp8"]
)
def test_a_head_with_these_passes_is_the_definition(fp8, most):
    form = partial(gpu.weighted_cross_entropy, fp8=fp8, passes=INTERPRETED, num_chunks=2)
    losses, gradients = head_gradients(form, jnp.bfloat16)
    right, exact_gradients = head_gradients(weighted_cross_entropy, jnp.float32)
    assert losses.weighted == pytest.approx(float(right.weighted), rel=2e-3)
    assert losses.first == pytest.approx(float(right.first), rel=2e-3)
    for got, want in zip(gradients, exact_gradients, strict=True):
        assert np.linalg.norm(np.asarray(got, np.float32) - want) < most * np.linalg.norm(want)
