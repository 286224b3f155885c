"""Declaration, packing and unpacking of parameters."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedrun.base import mesh
from speedrun.base.errors import UsageError
from speedrun.science import params
from speedrun.science.params import (
    Layout,
    ParamSpec,
    Table,
    constant,
    normal,
    uniform_fan_in,
    uniform_within_fan_in,
    zeros,
)

TABLE = {
    "embed": ParamSpec((13, 4), ("vocab", "model"), normal, "embed"),
    "block.0.qkv": ParamSpec((9, 6, 4), ("qkv", "heads", "model"), uniform_fan_in, "matrix"),
    "block.0.out": ParamSpec((4, 6), ("model", "heads"), zeros, "matrix"),
    "block.0.up": ParamSpec((8, 4), ("mlp", "model"), uniform_fan_in, "matrix"),
    "block.0.lambdas": ParamSpec((2,), ("lambda",), constant(1.0, 0.0), "scalar"),
    "skips": ParamSpec((3,), ("layer",), constant(1.0), "scalar"),
    "head": ParamSpec((16, 4), ("vocab", "model"), zeros, "head"),
}


def values(table: Table = TABLE) -> dict[str, jax.Array]:
    return {name: jnp.arange(1.0, 1 + spec.size).reshape(spec.shape) for name, spec in table.items()}


def test_packed_arrays_divide_by_eight_and_hold_wide_matrices_in_their_order_and_zeros():
    layout = Layout(TABLE)
    packed = layout.pack(values())
    banks = {name: x.shape for name, x in packed.items() if name.startswith("bank.")}
    assert banks == {"bank.4x6.0": (8, 4, 6), "bank.4x6.1": (8, 4, 6), "bank.4x8.0": (8, 4, 8)}
    assert packed["embed"].shape == (16, 4)
    assert packed["scalars"].shape == (5,)
    assert all(x.shape[0] % params.SHARDS == 0 for name, x in packed.items() if name != "scalars")
    places = [(m.name, m.number) for bank in layout.banks.values() for m in bank]
    assert places[:10] == [*(("block.0.qkv", i) for i in range(9)), ("block.0.out", 0)]
    assert not packed["bank.4x6.1"][2:].any()
    assert not packed["embed"][13:].any()
    assert params.count(TABLE) == 13 * 4 + 216 + 24 + 32 + 5 + 64


def test_a_number_for_each_matrix_follows_the_declared_orientation():
    own, layout = jax.sharding.PartitionSpec(mesh.DATA), Layout(TABLE)
    for shards in (1, 4):
        numbers = jax.shard_map(
            lambda: layout.per_matrix(lambda matrix: matrix.rows / matrix.cols),
            mesh=mesh.make_mesh(shards),
            in_specs=(),
            out_specs=dict.fromkeys(layout.banks, own),
        )
        factors = jax.tree.map(jnp.ravel, jax.jit(numbers)())
        assert factors["bank.4x6.1"].tolist() == pytest.approx([1.5, 4 / 6, 1, 1, 1, 1, 1, 1])
        assert factors["bank.4x8.0"].tolist() == [2, 1, 1, 1, 1, 1, 1, 1]


def test_a_group_of_its_own_is_packed_by_itself():
    table = TABLE | {
        "gate": ParamSpec((2, 4, 6), ("layer", "out", "in"), normal, "gate", packing="bank"),
        "mix": ParamSpec((3,), ("lambda",), normal, "mix", packing="vector"),
    }
    layout, plain = Layout(table), Layout(TABLE)
    given = values(table)
    packed = layout.pack(given)
    assert {*packed} - {*plain.banks, *plain.tables, "scalars"} == {"bank.gate.4x6.0", "mixs"}
    assert (layout.groups["bank.gate.4x6.0"], layout.groups["mixs"]) == ("gate", "mix")
    back = layout.unpack(packed)
    assert list(back) == list(table)
    for name, x in back.items():
        np.testing.assert_array_equal(x, given[name])


def test_starting_values_depend_on_name_and_seed_only_and_have_the_dtype_of_the_parameter():
    alone = Layout({"embed": TABLE["embed"], "skips": TABLE["skips"]})
    cases = (Layout(TABLE), 0), (alone, 0), (alone, 1)
    first, again, other = (layout.init(jax.random.key(seed))["embed"] for layout, seed in cases)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    narrow = Layout({"embed": ParamSpec((8, 4), ("vocab", "model"), normal, "embed", "bfloat16")})
    assert narrow.init(jax.random.key(0))["embed"].dtype == jnp.bfloat16


def test_parameters_that_are_alike_start_equal_at_every_seed():
    table = {**TABLE, "twin": ParamSpec((13, 4), ("vocab", "model"), normal, "head", like="embed")}
    one, other = (Layout(table).init(jax.random.key(seed)) for seed in (0, 1))
    np.testing.assert_array_equal(one["twin"], one["embed"])
    np.testing.assert_array_equal(other["twin"], other["embed"])
    assert not np.array_equal(one["twin"], other["twin"])


@pytest.mark.parametrize(
    ("shape", "init", "like"),
    [
        ((13, 4), normal, "absent"),
        ((13, 4), zeros, "embed"),
        ((4, 13), normal, "embed"),
        ((13, 4), normal, "twin"),
        ((13, 4), normal, "twin2"),
    ],
)
def test_a_parameter_is_like_one_that_draws_by_itself(shape, init, like):
    alike = ParamSpec((13, 4), ("vocab", "model"), normal, "head", like="embed")
    twin = ParamSpec(shape, ("vocab", "model"), init, "head", like=like)
    with pytest.raises(UsageError, match=f"its table draws 'twin' like '{like}'; need one with its own draw"):
        Layout({**TABLE, "twin2": alike, "twin": twin})


def test_initialisers_have_the_declared_spread():
    key = jax.random.key(0)
    assert float(jnp.std(normal(key, (300, 300)))) == pytest.approx(1, abs=0.02)
    x = uniform_fan_in(key, (3, 100, 400))  # three matrices of 400 columns
    assert float(jnp.std(x)) == pytest.approx(0.5 / math.sqrt(400), rel=0.02)
    assert float(jnp.max(jnp.abs(x))) <= math.sqrt(3) * 0.5 / math.sqrt(400)
    bound = float(jnp.max(jnp.abs(uniform_within_fan_in(key, (3, 100, 400)))))
    assert 0.99 * 400**-0.5 < bound <= 400**-0.5
    assert constant(0.5, 0.25)(key, (2,)).tolist() == [0.5, 0.25]


def test_a_shape_needs_a_name_for_each_axis():
    with pytest.raises(ValueError, match="need a name for each dimension"):
        ParamSpec((2, 3), ("model",), zeros, "matrix")
