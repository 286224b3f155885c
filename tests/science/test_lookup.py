"""Sums of gradients by id in tiles, interpreted, against NumPy in float64. Legend: N tokens, V rows, D model."""

from functools import partial

import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedrun.science import nn
from speedrun.science.kernels import lookup_triton

RNG = np.random.default_rng(0)
NUM_TOKENS, NUM_ROWS = 5 * lookup_triton.TOKENS, 50
#: Hot ids, which go on over tiles; tiles end where ids do; and ids without a row.
IDS = {
    "random": RNG.integers(0, NUM_ROWS, NUM_TOKENS),
    "one id": np.full(NUM_TOKENS, 7),
    "a hot one": np.where(RNG.random(NUM_TOKENS) < 0.6, 7, RNG.integers(0, NUM_ROWS, NUM_TOKENS)),
    "whole tiles": RNG.permutation(np.repeat([0, 3, 4, 20, 49], lookup_triton.TOKENS)),
    "beyond the table": RNG.integers(NUM_ROWS - 2, NUM_ROWS + 2, NUM_TOKENS),
    "before the table": RNG.integers(-3, 2, NUM_TOKENS),
}
GRADIENTS = {
    "normal": RNG.standard_normal,
    "tiny": lambda shape: 2.0**-126 * RNG.integers(-3, 4, shape),
    "huge": lambda shape: 2.0**118 * RNG.integers(-3, 4, shape),
    "zeros": np.zeros,
}


def summed(ids_N: np.ndarray, dy_ND: np.ndarray) -> np.ndarray:
    """The sums in float64, which a bfloat16 sum would lose."""
    want = np.zeros((NUM_ROWS, dy_ND.shape[1]))
    known = (ids_N >= 0) & (ids_N < NUM_ROWS)
    np.add.at(want, ids_N[known], dy_ND[known].astype(np.float64))
    return want


@pytest.mark.parametrize("size", GRADIENTS)
@pytest.mark.parametrize("kind", IDS)
def test_each_row_gets_the_sum_of_its_gradients_rounded_once(kind, size):
    ids_N, dy_ND = IDS[kind], GRADIENTS[size]((NUM_TOKENS, lookup_triton.COLUMNS)).astype(jnp.bfloat16)
    got = lookup_triton.row_sums(lookup_triton.order(jnp.asarray(ids_N)), dy_ND, NUM_ROWS, interpret=True)
    assert got.dtype == jnp.bfloat16
    want = summed(ids_N, dy_ND)
    most = np.abs(want).max() * 1e-6  # sums in float32
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2.0**-8, atol=most)


def test_tables_share_an_order_and_their_rows_and_gradients_are_the_definitions():
    ids_BT = jnp.asarray(IDS["a hot one"].reshape(5, -1))
    by_id, shape = lookup_triton.order(ids_BT), (NUM_ROWS, 2 * lookup_triton.COLUMNS)
    tables = [jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16) for _ in range(2)]
    dy = jnp.asarray(RNG.standard_normal((2, *ids_BT.shape, shape[1])), jnp.bfloat16)
    sums = partial(lookup_triton.row_sums, interpret=True)
    forms = (lambda x: lookup_triton.lookup(x, ids_BT, by_id, sums)), partial(nn.lookup, ids_BT=ids_BT)
    found = [
        jax.vjp(lambda *given, form=form: jnp.stack([form(x) for x in given]), *tables) for form in forms
    ]
    (got, pull), (want, pull_definition) = found
    np.testing.assert_array_equal(got, want)
    for one, other in zip(pull(dy), pull_definition(dy), strict=True):
        np.testing.assert_array_equal(one, other)


@hopper.needs_compiler
def test_the_kernel_compiles_for_an_h100_without_spills():
    """On each device, of its own tokens."""

    def gradient(ids_N: jax.Array, dy_ND: jax.Array) -> jax.Array:
        return lookup_triton.row_sums(lookup_triton.order(ids_N), dy_ND, 50_304)

    ids = jax.ShapeDtypeStruct((8 * 49_152,), jnp.int32)
    dy = jax.ShapeDtypeStruct((8 * 49_152, 768), jnp.bfloat16)
    text = hopper.compiled(gradient, ids, dy, **hopper.NO_SPILLS).as_text() or ""
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 1
