"""QK-norm and rotary: every form against a formula in NumPy and its finite differences."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedrun.science import nn
from speedrun.science.kernels import qk_norm_triton
from speedrun.science.kernels.qk_norm import qk_norm

FORMS: dict[str, Callable[..., Any]] = {
    "definition": qk_norm,
    "triton": partial(qk_norm_triton.qk_norm, interpret=True),
    "triton in small tiles": partial(qk_norm_triton.qk_norm, tokens=4, interpret=True),
}

#: [B, T, H, K]
SHAPES = {
    "one head": (1, 48, 1, 64),
    "several rows": (3, 8, 2, 32),
    "odd length": (2, 5, 3, 16),
    "no multiple of a tile": (1, 40, 2, 16),
    "as in the record": (1, 32, 6, 128),
}


#: Record 89 has the root of attention's scale in its angles.
LENGTH = 0.36


def scaled_angles(num_positions: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    cos_TK, sin_TK = nn.rotary_angles(num_positions, head_dim)
    return LENGTH * cos_TK, LENGTH * sin_TK


def inputs(shape: tuple[int, ...], dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """Return small queries, large keys, and their cotangents."""
    qk, dy = jax.random.normal(jax.random.key(0), (2, 2, *shape))
    return (1e-4 * qk[0]).astype(dtype), (3 * qk[1]).astype(dtype), tuple(g.astype(dtype) for g in dy)


def value_and_gradients(form: Callable[..., Any], shape: tuple[int, ...], dtype: Any) -> list[jax.Array]:
    """Return values and gradients of queries and keys, as float32."""
    q, k, dy = inputs(shape, dtype)
    angles = scaled_angles(shape[1], shape[3])

    @jax.jit
    def run(q: jax.Array, k: jax.Array, dy: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(lambda q, k: form(q, k, angles), q, k)
        return *y, *pull(dy)

    results = run(q, k, dy)
    assert all(x.dtype == dtype and x.shape == shape for x in results)
    return [x.astype(jnp.float32) for x in results]


@cache
def defined(shape: tuple[int, ...]) -> list[jax.Array]:
    """Return values and gradients of the definition in float32."""
    return value_and_gradients(qk_norm, shape, jnp.float32)


def formula(x_BTHK: np.ndarray) -> np.ndarray:
    """Compute in complex numbers and float64: z / rms(z), rotated by -t f, times a length."""
    half, quarter = x_BTHK.shape[3] // 2, x_BTHK.shape[3] // 4
    f = np.concatenate([(1 / 1024) ** (np.arange(quarter) / (quarter - 1)), np.zeros(quarter)])
    turn = LENGTH * np.exp(-1j * np.arange(x_BTHK.shape[1])[:, None] * f)[None, :, None, :]
    root = np.sqrt(np.mean(x_BTHK**2, axis=-1, keepdims=True) + 1.1920929e-07)
    z = (x_BTHK[..., :half] + 1j * x_BTHK[..., half:]) / root * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def differences(x_BTHK: np.ndarray, dy_BTHK: np.ndarray) -> np.ndarray:
    """Differentiate sum(dy formula(x)) by central differences, in one coordinate of all heads at a time."""
    dx_BTHK, size = np.zeros_like(x_BTHK), 1e-6 * np.abs(x_BTHK).max()
    for i in range(x_BTHK.shape[3]):
        step_K = size * np.eye(x_BTHK.shape[3])[i]
        rise_BTHK = formula(x_BTHK + step_K) - formula(x_BTHK - step_K)
        dx_BTHK[..., i] = np.sum(dy_BTHK * rise_BTHK, axis=-1) / (2 * size)
    return dx_BTHK


@cache
def in_float64(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return values by the formula, and gradients by differences."""
    q, k, dy = inputs(shape)
    x, dy = ([np.asarray(a, np.float64) for a in pair] for pair in ((q, k), dy))
    return [*map(formula, x), *map(differences, x, dy)]


@pytest.mark.parametrize("name", FORMS)
class TestForms:
    """Queries are so small that the epsilon under the root matters; keys are large."""

    @pytest.mark.parametrize("shape", [*SHAPES.values()][1:], ids=[*SHAPES][1:])
    def test_float32(self, name, shape):
        got = defined(shape) if name == "definition" else value_and_gradients(FORMS[name], shape, jnp.float32)
        for a, exact in zip(got, in_float64(shape), strict=True):
            np.testing.assert_allclose(a, exact, atol=5e-6 * np.abs(exact).max())

    @pytest.mark.parametrize("shape", [*SHAPES.values()][:2], ids=[*SHAPES][:2])
    def test_bfloat16(self, name, shape):
        got = value_and_gradients(FORMS[name], shape, jnp.bfloat16)
        for a, b in zip(got, defined(shape), strict=True):
            assert jnp.linalg.norm(a - b) < 0.005 * jnp.linalg.norm(b)

    def test_heads_have_several_angles_in_turn(self, name):
        """Those with one angle are as if they were alone."""
        q, k, dy = inputs((2, 8, 6, 16))
        of_both = [a.reshape(8, 2, 8) for a in scaled_angles(16, 16)]

        def run(form: Callable[..., Any], angles: list[jax.Array], *qkdy: jax.Array) -> tuple[jax.Array, ...]:
            y, pull = jax.vjp(lambda q, k: form(q, k, angles), *qkdy[:2])
            return *y, *pull(qkdy[2:])

        got = jax.jit(partial(run, FORMS[name]))([a.reshape(8, 16) for a in of_both], q, k, *dy)
        for i in range(2):
            alone = run(qk_norm, [a[:, i] for a in of_both], *(x[:, :, i::2] for x in (q, k, *dy)))
            for a, b in zip(got, alone, strict=True):
                np.testing.assert_allclose(a[:, :, i::2], b, atol=3e-6 * np.abs(b).max())


@hopper.needs_compiler
@pytest.mark.parametrize(
    ("head_dim", "num_angles"),
    [(128, 2), *(pytest.param(width, 1, marks=pytest.mark.compile) for width in (16, 64, 128))],
)
def test_triton_compiles_for_an_h100(head_dim, num_angles):
    """One call forward, one backward of each array; scratch holds only angles and one number per row."""
    x_BTHK = jax.ShapeDtypeStruct((8, 49152, 6, head_dim), jnp.bfloat16)

    def run(q: jax.Array, k: jax.Array, *dy: jax.Array) -> Any:
        cos, sin = (a.reshape(49152, -1) for a in nn.rotary_angles(num_angles * 49152, head_dim))
        y, pull = jax.vjp(lambda q, k: qk_norm_triton.qk_norm(q, k, (cos, sin)), q, k)
        return *y, *pull(dy)

    program = hopper.compiled(run, *[x_BTHK] * 4)
    text, memory = program.as_text(), program.memory_analysis()
    assert text
    assert memory
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 4
    assert " copy(" not in text
    assert memory.temp_size_in_bytes < 3 * 4 * 49152 * (num_angles * head_dim // 2 + 6) + 2**20
