"""The passes over the logits for Hopper: interpreted against float64, and what an H100 would run, counted."""

import re
from functools import partial
from typing import Any

import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from speedrun.plan import cost
from speedrun.science.kernels import cross_entropy_gpu as gpu
from speedrun.science.kernels import cross_entropy_mosaic as mosaic
from speedrun.science.kernels.choose import HeadCall, choose_head
from speedrun.science.kernels.cross_entropy import Cap, Losses, Targets, as_cap, weighted_cross_entropy

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
    """Four targets of each token, some equal, some missing."""
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


def test_a_shape_that_no_tile_fits_is_refused():
    for shape in ((63, 192), (64, 100)):
        with pytest.raises(ValueError, match="need a multiple of 64"):
            mosaic.sum_exp(jnp.zeros(shape, jnp.bfloat16), CAPS["record 21"], 1.0)


def test_hopper_has_them_and_others_are_told_why_not():
    call = HeadCall(49_152, 50_304, jnp.dtype(jnp.bfloat16), "gpu", "9.0", None, as_cap(15.0))

    def chosen(**changes: Any) -> tuple[bool, str]:
        choice = choose_head(call._replace(**changes))
        assert isinstance(choice.function, partial)
        return choice.function.keywords["passes"] is not gpu.PASSES, choice.reason

    assert chosen()[0]
    assert chosen(num_tokens=98_304)[1].endswith("98,304 tokens in 2 chunks; mosaic's passes")
    assert chosen(fp8=gpu.RECORD21)[0]
    for changes, reason in [
        ({"compute_capability": "8.0"}, "this is a gpu 8.0; the kernels need an H100 or H200 (gpu 9.0)"),
        # A chunk of so few tokens fits no tile, whatever their number in all.
        ({"chunk_tokens": 96}, "96 tokens in a chunk; the kernels need a multiple of 64"),
        ({"num_tokens": 49_153}, "3781 tokens in a chunk; the kernels need a multiple of 64"),
        ({"num_columns": 50_257}, "50257 columns; the kernels need a multiple of 64"),
        ({"dtype": jnp.dtype(jnp.float32)}, "float32 logits; the kernels need bfloat16"),
    ]:
        taken, why = chosen(**changes)
        assert not taken
        assert why.endswith(f"XLA's passes: {reason}")


@hopper.needs_compiler
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2], ids=str)
def test_they_compile_for_eight_h100(dtype):
    logits = jax.ShapeDtypeStruct((8 * 1024, 50_304), jnp.bfloat16)
    factors = jax.ShapeDtypeStruct((8 * 1024,), jnp.float32)

    def both(z_NV: jax.Array, factor_N: jax.Array) -> tuple[jax.Array, jax.Array]:
        cap = CAPS["record 89"]
        return mosaic.sum_exp(z_NV, cap, 1.0), mosaic.softmax_gradient(z_NV, factor_N, cap, 1.0, dtype)[0]

    text = hopper.compiled(both, logits, factors).as_text() or ""
    assert len(re.findall(r'custom_call_target="mosaic_gpu', text)) == 2


#: Compiles both passes, which dumps their machine code; the variables are read when JAX is imported.
DUMP = """
import jax, jax.numpy as jnp
from speedrun.base import mesh
from speedrun.plan import deviceless
from speedrun.science.kernels import cross_entropy_mosaic as mosaic
from speedrun.science.kernels.cross_entropy import Cap
mesh.prepare("cpu")
placing = jax.sharding.NamedSharding(deviceless.target_mesh("h100", 1), jax.sharding.PartitionSpec())
z = jax.ShapeDtypeStruct((1024, 50_304), jnp.bfloat16, sharding=placing)
f = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=placing)
cap = Cap(11.5, 15.0, 5.0)
deviceless.compile_for_target(jax.jit(lambda z: mosaic.sum_exp(z, cap, 100.0)), z)
for dtype in (jnp.bfloat16, jnp.float8_e5m2):
    deviceless.compile_for_target(jax.jit(lambda z, f: mosaic.softmax_gradient(z, f, cap, 100.0, dtype)), z, f)
"""


@hopper.needs_compiler
def test_a_logit_takes_as_few_instructions_as_the_model_of_costs_says(tmp_path):
    """8 in the sum, 11 or 14 in the gradient, two of them to the special-function units, nothing spilled."""
    kernels = hopper.opcodes(DUMP, tmp_path)
    assert len(kernels) == 3
    a_thread = mosaic.ROWS * mosaic.COLUMNS[0] / 128
    assert {opcodes.count("MUFU") for opcodes in kernels} == {2 * a_thread}
    # The interpreter stores at once: only here does it show if the wait for stores is missing.
    assert {opcodes.count("DEPBAR") for opcodes in kernels} == {1}
    counts = [sum(opcode != "NOP" for opcode in opcodes) / a_thread for opcodes in kernels]
    assert counts == pytest.approx([8.2, 11.4, 14.4], abs=0.5)
    assert max(counts) < cost.HEAD_SLOTS
