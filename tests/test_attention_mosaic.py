"""Attention for Hopper: interpreted against the definition, and what an H100 would run, counted."""

from collections.abc import Callable
from functools import partial
from typing import Any

import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from speedrun.science.kernels import attention_mosaic
from speedrun.science.kernels.attention import attention, sight

#: Lengths of documents, the window in blocks, and its block in tokens. Small: each copy and product is a callback.
CASES = {
    "short documents": ([1, 1, 78, 176], 2, 32),
    "a window between tiles": ([384], 3, 100),
    "a window in tokens": ([30, 226], 128, 1),
    "all is seen": ([256], 99, 128),
}


def inputs(num_tokens: int) -> jax.Array:
    """Return queries, keys, values and a cotangent: [4, B, T, H, K]."""
    return jax.random.normal(jax.random.key(0), (4, 2, num_tokens, 2, 128)).astype(jnp.bfloat16)


def differentiated(form: Callable[..., jax.Array], seen: jax.Array, q: Any, k: Any, v: Any, g: Any) -> Any:
    """Return value and gradients, as float32."""
    o_BTHK, pull = jax.vjp(lambda *qkv: form(*qkv, seen, scale=0.1), q, k, v)
    return [np.asarray(x, np.float32) for x in (o_BTHK, *pull(g))]


@pytest.fixture
def interpreted(monkeypatch):
    hopper.teach_interpreter_products(monkeypatch)
    return partial(attention_mosaic.attention, interpret=InterpretGPUParams(detect_races=True))


@pytest.mark.compile
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_definition(interpreted, name):
    lengths, blocks, block_tokens = CASES[name]
    doc_BT = np.stack([np.repeat(np.arange(len(n)), n) for n in (lengths, lengths[::-1])])
    seen, (q, k, v, g) = sight(jnp.asarray(doc_BT), blocks, block_tokens), inputs(doc_BT.shape[1])
    got = differentiated(interpreted, seen, q, k, v, g)
    assert not interpret_pallas_call.get_races().races_found
    want = differentiated(attention, seen, *(x.astype(jnp.float32) for x in (q, k, v, g)))
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) < 0.004 * np.linalg.norm(b)


@pytest.mark.compile
def test_large_scores_of_equal_values_have_no_gradient(interpreted):
    """Scores of about 100, of which 16 bits leave halves. Two sums cancel: neither may be rounded."""
    seen, (q, k, v, g) = jnp.zeros((2, 128), jnp.int32), inputs(128)
    q, k = q.at[..., 0].set(32), k.at[..., 0].set(32)
    _, dq, dk, dv = differentiated(interpreted, seen, q, k, jnp.broadcast_to(v[:, :1], v.shape), g)
    assert max(np.abs(dq).max(), np.abs(dk).max()) < 1e-4 * np.abs(dv).max()


@pytest.mark.compile
def test_a_query_that_sees_nothing_is_no_number(interpreted):
    first_T, (q, k, v, _) = np.arange(256) // 64 * 64, inputs(256)
    nothing_T = np.arange(256) >= 190
    first_T = np.where(nothing_T, 256, first_T)
    first_BT = jnp.asarray(np.stack([first_T, np.arange(256)]), jnp.int32)
    o_BTHK = np.asarray(interpreted(q, k, v, first_BT, scale=0.1), np.float32)
    np.testing.assert_array_equal(np.isnan(o_BTHK[0, :, 0]).all(1), nothing_T)
    assert np.isfinite(o_BTHK[0, ~nothing_T]).all()
    np.testing.assert_array_equal(o_BTHK[1], v[1])  # of a query that sees itself alone


DUMP = """
import jax, jax.numpy as jnp
from functools import partial
from speedrun.base import mesh
from speedrun.plan import deviceless
from speedrun.science.kernels.attention_mosaic import attention
mesh.prepare("cpu")
placing = jax.sharding.NamedSharding(deviceless.target_mesh("h100", 1), jax.sharding.PartitionSpec())
x = jax.ShapeDtypeStruct({shape}, jnp.bfloat16, sharding=placing)
first = jax.ShapeDtypeStruct({shape}[:2], jnp.int32, sharding=placing)
def run(do, first, *qkv):
    o, pull = jax.vjp(lambda *qkv: attention(*qkv, first, scale=0.12), *qkv)
    return o, *pull(do)
deviceless.compile_for_target(jax.jit(run), x, first, x, x, x)
"""


@hopper.needs_compiler
@pytest.mark.parametrize("shape", [(1, 49_152, 6, 128), (1, 98_304, 3, 128)])
def test_a_tile_takes_few_instructions_between_products(tmp_path, shape):
    """In records 21 and 89. All instructions of a kernel, also those that run once, for each weight of a thread."""
    kernels = sorted(hopper.opcodes(DUMP.format(shape=shape), tmp_path), key=lambda one: one.count("HGMMA"))
    assert [one.count("HGMMA") for one in kernels] == [8 + 8, 8 + 8 + 4, 8 + 8 + 4 + 4]
    weights = [
        attention_mosaic.ROWS * tile / 128
        for tile in (attention_mosaic.FORWARD, *[attention_mosaic.BACKWARD] * 2)
    ]
    counts = [sum(opcode != "NOP" for opcode in one) / n for one, n in zip(kernels, weights, strict=True)]
    assert counts == pytest.approx([23.3, 47.1, 43.3], rel=0.08)
    # Forward, two rows of a thread also shrink, and at last have the logarithm and the inverse of their sums.
    assert [one.count("MUFU") for one in kernels] == [64 + 3 * 2, 32, 32]
    # The interpreter stores at once, so only here does a missing wait for all stores show.
    assert [one.count("DEPBAR") for one in kernels] == [1, 1, 1]
