"""The loss head as an H100 would run it, compiled here without one: bytes, products and instructions."""

from functools import partial
from typing import Any

import anatomy
import hopper
import jax
import jax.numpy as jnp
import pytest
from deviceless import compile_for_target
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.plan import traced
from speedrun.science.kernels import cross_entropy_gpu as gpu
from speedrun.science.kernels import cross_entropy_mosaic as mosaic
from speedrun.science.kernels.cross_entropy import Cap, Targets

VOCAB_SIZE = 50_304
CAP = Cap(height=11.5, unit=15.0, shift=5.0)


def dissected(mesh: Any, form: Any, num_tokens: int, num_targets: int, *, is_scored: bool) -> anatomy.Anatomy:
    """The loss of one device's part, or its gradients."""

    def loss(x_ND: jax.Array, head_VD: jax.Array, *targets: jax.Array) -> jax.Array:
        return form(x_ND, head_VD, Targets(*targets), cap=CAP).weighted

    array = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    states = [array((rows, 768), jnp.bfloat16) for rows in (num_tokens, VOCAB_SIZE)]
    weights = [array(shape, jnp.float32) for shape in ((num_tokens, num_targets), (num_tokens,))]
    args = [*states, array((num_tokens, num_targets), jnp.int32), *weights]
    return anatomy.dissect(compile_for_target(jax.jit(loss if is_scored else jax.grad(loss, (0, 1))), *args))


@pytest.mark.parametrize(
    ("num_tokens", "num_targets", "fp8", "num_chunks", "gigabytes", "calls"),
    [
        (49_152, 1, None, 1, 31, {"__cublas$lt$matmul": 3}),
        (49_152, 1, gpu.RECORD21, 4, 28, {"__cublas$lt$matmul$f8": 12}),
        (49_152, 1, gpu.RECORD89, 1, 26, {"__cublas$lt$matmul$f8": 3}),
        (16_384, 4, gpu.RECORD89, 1, 9.2, {"__cublas$lt$matmul$f8": 3}),
    ],
)
def test_its_traffic_is_within_the_budget_whatever_the_number_of_targets(
    num_tokens, num_targets, fp8, num_chunks, gigabytes, calls, h100
):
    """One pass for the sum and one for the gradient: logits are written once and read twice."""
    form = partial(gpu.weighted_cross_entropy, fp8=fp8, num_chunks=num_chunks)
    got = dissected(h100(1), form, num_tokens, num_targets, is_scored=False)
    assert got.custom_calls == calls, got
    assert got.traffic_bytes < gigabytes * 1e9, got
    logits = f"[{num_tokens // num_chunks},{VOCAB_SIZE}]"
    max_bytes = 4.1 * num_tokens * VOCAB_SIZE / num_chunks + 0.3e9
    assert got.memory.temp_size_in_bytes < max_bytes, "logits and their gradient, in bf16"
    large = {name.partition("[")[0] for name in got.arrays if logits in name}
    assert large == {"bf16", *(["f8e5m2"] if fp8 else [])}, "the gradient: wide range, few bits"


def test_evaluation_reads_its_logits_once(h100):
    got = dissected(h100(1), gpu.weighted_cross_entropy, 49_152, 1, is_scored=True)
    assert got.custom_calls == {"__cublas$lt$matmul": 1}
    assert got.traffic_bytes < 11e9, got


#: Compiles both passes, which dumps their machine code; the variables are read when JAX is imported.
DUMP = """
import jax, jax.numpy as jnp
from speedrun.base import mesh
import deviceless
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
    assert max(counts) < traced.HEAD_SLOTS
