"""The MLP for Hopper: interpreted against the definition, and what an H100 would run, counted."""

import re
from functools import partial
from typing import Any

import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from speedrun.science import nn
from speedrun.science.kernels import mlp_gradients, mlp_mosaic
from speedrun.science.kernels.mlp import mlp

#: Two tiles by two, which the interpreter's only program takes in turn.
TOKENS, DIM, WIDE = 256, 128, 512
NAMES = ("y", "dx", "dup", "ddown")


def operands() -> list[jax.Array]:
    """Return normalised states, both matrices, and a gradient of the result."""
    shapes = ((TOKENS, DIM), (WIDE, DIM), (DIM, WIDE), (TOKENS, DIM))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x, up, down, dy = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return [a.astype(jnp.bfloat16) for a in (nn.rms_norm(x), up / 20, down / 20, dy)]


def with_gradients(form: Any, x: jax.Array, up: jax.Array, down: jax.Array, dy: jax.Array) -> dict[str, Any]:
    y, pull = jax.vjp(form, x, up, down)
    return dict(zip(NAMES, (y, *pull(dy)), strict=True))


def check(got: dict[str, Any], definition: Any, most: float) -> None:
    want = with_gradients(definition, *(a.astype(jnp.float32) for a in operands()))
    for name in NAMES:
        assert got[name].dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(got[name], np.float32) - want[name]) / np.linalg.norm(want[name])
        assert error < most, name


@pytest.mark.compile
@pytest.mark.parametrize(("factors", "most"), [("bfloat16", 0.003), ("float8_e4m3fn", 0.008)])
def test_it_is_the_definition(monkeypatch, factors, most):
    """Half of the products are negative: no slope there, which is 2 sqrt(h), computed with 1 / sqrt(h).

    In 8 bits the definition has the same factors; a square on the border of two numbers may go to the other.
    """
    hopper.teach_interpreter_transposes(monkeypatch)
    form = partial(mlp_mosaic.mlp, factors=factors, interpret=InterpretGPUParams(detect_races=True))
    got = with_gradients(form, *operands())
    assert not interpret_pallas_call.get_races().races_found
    check(got, partial(mlp, factors="float32" if factors == "bfloat16" else factors), most)


@pytest.mark.compile
def test_with_gradients_in_eight_bits_it_is_the_definition(monkeypatch):
    """The same factors are rounded; a number on the border of two may go to the other. Large gradients are clipped."""
    hopper.teach_interpreter_transposes(monkeypatch)
    interpreted = mlp_mosaic.fused(InterpretGPUParams(detect_races=True))
    for scale in (2.0**-6, 2.0**-18):
        form = partial(mlp_gradients.mlp, gradient_scale=scale)
        got = with_gradients(partial(form, fused=interpreted), *operands())
        assert not interpret_pallas_call.get_races().races_found
        check(got, form, 0.03)


FORMS = {
    "bfloat16": partial(mlp_mosaic.mlp, factors="bfloat16"),
    "forward": partial(mlp_mosaic.mlp, factors="float8_e4m3fn"),
    "all": partial(mlp_gradients.mlp, gradient_scale=2.0**-6, fused=mlp_mosaic.FUSED),
}


@hopper.needs_compiler
@pytest.mark.parametrize(("form", "eights"), [("bfloat16", 0), ("forward", 1), ("all", 4)])
def test_nothing_but_products_touches_the_activations(form, eights):
    """On an H100, value and gradient are two kernels and four products of the library."""

    def run(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        y, pull = jax.vjp(FORMS[form], x, up[0], down[0])
        dx, dup, ddown = pull(y)
        return dx.sum(0, keepdims=True) + (dup.sum() + ddown.sum())

    shapes = (8 * 1024, 768), (8, 3072, 768), (8, 768, 3072)
    given = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    text = hopper.compiled(run, *given).as_text() or ""
    results = re.compile(r".*\[(1024,3072|3072,1024)\].* [\w-]+\(%")
    wide = [line for line in text.splitlines() if results.match(line)]
    assert len(wide) >= 2
    assert not [line for line in wide if " fusion(" in line]
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 2
    assert text.count('custom_call_target="__cublas$lt$matmul"') == 4 - eights
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == eights


DUMP = """
import jax, jax.numpy as jnp
from functools import partial
from speedrun.base import mesh
import deviceless
from speedrun.science.kernels import mlp_gradients, mlp_mosaic
mesh.prepare("cpu")
placing = jax.sharding.NamedSharding(deviceless.target_mesh("h100", 1), jax.sharding.PartitionSpec())
x, up, down = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placing)
               for shape in ((1024, 768), (3072, 768), (768, 3072)))
def run(form, x, up, down):
    return jax.vjp(form, x, up, down)[1](x)
for form in (partial(mlp_mosaic.mlp, factors="float8_e4m3fn"),
             partial(mlp_gradients.mlp, gradient_scale=2.0**-6, fused=mlp_mosaic.FUSED)):
    deviceless.compile_for_target(jax.jit(partial(run, form)), x, up, down)
deviceless.compile_for_target(jax.jit(partial(mlp_mosaic.mlp, factors="bfloat16")), x, up, down)
"""


@hopper.needs_compiler
def test_an_activation_takes_few_instructions_between_products(tmp_path):
    """All instructions of a kernel, also those that run once, for each number of a thread."""
    kernels = hopper.opcodes(DUMP, tmp_path)
    assert len(kernels) == 5
    a_thread = mlp_mosaic.ROWS * mlp_mosaic.COLUMNS / 128
    counts = sorted(sum(opcode != "NOP" for opcode in opcodes) / a_thread for opcodes in kernels)
    assert counts == pytest.approx([10.2, 12.9, 13.7, 17.0, 22.8], abs=0.8)
    assert sorted(opcodes.count("MUFU") for opcodes in kernels) == [0, 0, 0, a_thread, a_thread]
    # The interpreter stores at once, so only here does it show if one is missing: a wait before each of four pieces
    # is stored, or before pieces are fetched, and one for all stores before a kernel ends.
    waits = [1 + 1, 4 + 1, 4 + 1, 4 + 1, 4 + 1]
    assert sorted(opcodes.count("DEPBAR") for opcodes in kernels) == waits
