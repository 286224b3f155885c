"""Rows that travel between devices, against NumPy; and a recipe whose table stays, against the same one gathered."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_step import first_step, gradients, placed

from speedrun.base import mesh
from speedrun.base.errors import UsageError
from speedrun.base.mesh import DATA
from speedrun.science import rows
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.params import Layout, ParamSpec, normal
from speedrun.science.recipe import Recipe
from speedrun.train import recipe_checks
from speedrun.train.program import Program

RNG = np.random.default_rng(0)
IDS = {
    "random": lambda n, v: RNG.integers(0, v, n),
    "repeated": lambda n, v: RNG.integers(0, 3, n) * (v // 3),
    "all different": lambda n, v: RNG.permutation(v)[:n],
    "of one owner": lambda n, v: RNG.integers(0, v // 8, n),
}


def travelled(table: Any, ids_SN: np.ndarray, grads: Any) -> list[np.ndarray]:
    """Return fetched rows and the gradient of the table."""
    spec = ParamSpec(table.shape, ("row", "model"), normal, "pairs", reads=lambda ids_BN: ids_BN)
    layout = Layout({"pairs": spec})

    def both(table_RD, ids_1N, grads_1ND):
        params = {"pairs": table_RD}
        sent, arrived, ids = rows.exchange_rows(layout, params, ids_1N, Kernels("cpu", ""))
        fetched, pull = jax.vjp(lambda sent: arrived(sent)["pairs"], sent)
        sums_RD, (grads,) = jnp.zeros(table_RD.shape), pull(grads_1ND)
        return fetched, sums_RD.at[ids["pairs"]].add(grads["pairs"], mode="drop")

    step = jax.shard_map(both, mesh=mesh.make_mesh(len(ids_SN)), in_specs=P(DATA), out_specs=P(DATA))
    return jax.device_get(jax.jit(step)(table, ids_SN, grads))


@pytest.mark.parametrize("kind", IDS)
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_rows_arrive_and_their_gradients_return(devices, kind):
    table = RNG.standard_normal((64, 3), np.float32)
    ids_SN = np.stack([IDS[kind](40, 64) for _ in range(devices)]).astype(np.int32)
    grads = RNG.integers(-4, 5, (*ids_SN.shape, 3)).astype(np.float32)  # sums are exact in any order
    want = np.zeros_like(table)
    np.add.at(want, ids_SN, grads)
    fetched, returned = travelled(table, ids_SN, grads)
    np.testing.assert_array_equal(fetched, table[ids_SN])
    np.testing.assert_array_equal(returned, want)


def test_rows_that_do_not_fit_are_no_numbers_and_all_others_arrive():
    table = 1 + np.arange(512, dtype=np.float32)[:, None]
    own = [*range(25), *range(12)]  # 23 of an owner fit for 40 ids, its mean of 5 and 8 sqrt(5)
    ids_SN = np.tile(np.array([*own, 64, 65, 511], np.int32), (8, 1))
    grads = np.ones((*ids_SN.shape, 1), np.float32)
    fetched, returned = travelled(table, ids_SN, grads)
    lost = {*range(25)} - {int(x) - 1 for x in fetched.ravel() if np.isfinite(x)}
    assert len(lost) == 2
    want = np.where(np.isin(ids_SN, [*lost])[..., None], np.nan, table[ids_SN])
    np.testing.assert_array_equal(fetched, want)
    assert returned.sum() == np.isfinite(want).sum()


def test_evenly_spread_ids_fit():
    """As many as the table of record 89 gets, and as few as a laptop's; drawn a hundred times."""
    rng = np.random.default_rng(1)
    for num_ids, num_rows in [(49_152, 377_280), (256, 1_920), (32, 1_920)]:
        most, num_local = rows.max_rows(num_ids, num_rows // 8, 8), num_rows // 8
        drawn = (np.unique(rng.integers(0, num_rows, num_ids)) // num_local for _ in range(100))
        assert max(np.bincount(owners).max() for owners in drawn) < most < num_ids


@pytest.mark.parametrize("devices", [1, 8])
def test_rows_outside_the_table_are_no_numbers_and_disturb_no_other(devices):
    ids_SN = np.tile(np.array([0, 63, -1, 64, 5, -(2**31), 2**31 - 1], np.int32), (devices, 1))
    table = np.arange(64, dtype=np.float32)[:, None]
    fetched, returned = travelled(table, ids_SN, np.ones((*ids_SN.shape, 1), np.float32))
    nan = np.nan
    np.testing.assert_array_equal(fetched[..., 0], [[0, 63, nan, nan, 5, nan, nan]] * devices)
    np.testing.assert_array_equal(returned.ravel(), devices * np.isin(table.ravel(), [0, 5, 63]))


def test_places_without_a_row_name_none_in_a_longer_shard():
    """On one device, packed tables have rows beyond their last."""
    asked = jax.shard_map(
        partial(rows._ask, num_local=21), mesh=mesh.make_mesh(1), in_specs=P(DATA), out_specs=P(DATA)
    )
    ids_SC, *_ = jax.jit(asked)(np.array([[3, 3, 20]], np.int32))
    assert sum(ids_SC.ravel() < 24) == 2, "a packed shard has 24 rows"


def test_gradients_are_summed_in_float32_before_and_after_they_are_sent():
    """A bfloat16 sum of ones stops at 256."""
    ids_SN = np.zeros((8, 1000), np.int32)
    table, grads = jnp.ones((64, 1), jnp.bfloat16), jnp.ones((8, 1000, 1), jnp.bfloat16)
    _, returned = travelled(table, ids_SN, grads)
    assert returned[0].tolist() == [8000.0]


def test_an_update_moves_distinct_rows_and_rounds_each_once():
    table = RNG.standard_normal((64, 3)).astype(jnp.bfloat16)
    ids, moves = np.array([5, 63, 64, 0], np.int32), 1e-3 * RNG.standard_normal((4, 3)).astype(np.float32)
    want = table.astype(np.float32)
    want[ids[ids < 64]] += moves[ids < 64]
    found = rows.apply_update(jnp.asarray(table), rows.Rows(jnp.asarray(ids), jnp.asarray(moves)))
    np.testing.assert_array_equal(found, want.astype(jnp.bfloat16))


def spread(tokens_BT: jax.Array) -> jax.Array:
    return (7 * tokens_BT + jnp.roll(tokens_BT, 1, axis=1)) % 1024


def skewed(tokens_BT: jax.Array) -> jax.Array:
    """Rows of the first owner, more than fit in training."""
    return jnp.tile(jnp.arange(tokens_BT.shape[1])[None], (len(tokens_BT), 1))


def pair_of(recipe: Recipe, ids: Callable[[jax.Array], jax.Array]) -> tuple[Recipe, Recipe]:
    """Return a recipe with a vector for each token, from a table that is gathered, or of which rows are read."""

    def variant(reads: Any) -> Recipe:
        def table(config):
            spec = ParamSpec((1024, config.model_dim), ("row", "model"), normal, "embed", reads=reads)
            own = recipe.table(config)
            return {**own, "pairs": spec, "head": replace(own["head"], init=normal)}

        def forward(p, tokens_BT, inputs, config, kernels):
            rest = {name: x for name, x in p.items() if name != "pairs"}
            x_BTD = recipe.forward(rest, tokens_BT, inputs, config, kernels)
            return x_BTD + (p["pairs"] if reads else p["pairs"][ids(tokens_BT)])

        def logits(p, *rest):
            assert ("pairs" in p) == (reads is None), "a shard would be taken for the table"
            return recipe.logits(p, *rest)

        return replace(recipe, table=table, forward=forward, logits=logits)

    return variant(None), variant(ids)


@pytest.mark.parametrize(("devices", "replicas", "parts"), [(8, 1, 8), (2, 1, 8), (4, 2, 16)])
def test_a_table_that_stays_gets_the_gradients_of_one_that_is_gathered(tiny, devices, replicas, parts):
    on = mesh.make_mesh(devices, replicas)
    gathered, read = (Program(recipe, on, parts) for recipe in pair_of(tiny, spread))
    state = gathered.init(jax.random.key(0))
    (loss, grads), (want, wanted) = gradients(read, state), gradients(gathered, state)
    assert loss == pytest.approx(want, rel=1e-6)
    assert grads.keys() == wanted.keys()
    assert np.linalg.norm(wanted["pairs"]) > 0
    ids_N, values_ND = grads["pairs"]
    grads["pairs"] = whole(ids_N, values_ND, 1024, devices // replicas)
    for name, grad in grads.items():
        assert np.linalg.norm(grad - wanted[name]) <= 1e-5 * np.linalg.norm(wanted[name]), name


def whole(ids_N: np.ndarray, values_ND: np.ndarray, num_rows: int, shards: int) -> np.ndarray:
    """The gradient of a table from the rows of all its shards."""
    table_RD, num_local = np.zeros((num_rows, values_ND.shape[1]), np.float32), num_rows // shards
    for shard, ids, values in zip(
        range(shards), np.split(ids_N, shards), np.split(values_ND, shards), strict=True
    ):
        np.add.at(table_RD[shard * num_local :][:num_local], ids[ids < num_local], values[ids < num_local])
    return table_RD


@pytest.mark.parametrize(
    "wrong", [lambda ids: ids * 1.0, lambda ids: ids.T, lambda ids: ids[..., None], lambda _: 5]
)
def test_ids_of_another_form_are_refused(tiny, wrong):
    recipe = pair_of(tiny, lambda tokens_BT: wrong(spread(tokens_BT)))[1]
    with pytest.raises(UsageError, match=r"its table reads .* of 'pairs'; need int32 \[16, N\]"):
        recipe_checks.checked(Program(recipe, mesh.make_mesh(2)))


def test_validation_reads_the_rows_of_a_table_that_stays(tiny):
    on, found = mesh.make_mesh(8), []
    for recipe in pair_of(tiny, spread):
        program = Program(recipe, on)
        params, score = program.init(jax.random.key(0)).params, program.eval_step_for(program.static_at(0))
        found.append(np.asarray(score(params, *placed(program), program.schedule, 0)))
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_ids_that_are_spread_unevenly_make_the_loss_no_number(tiny):
    program = Program(pair_of(tiny, skewed)[1], mesh.make_mesh(8), 16)
    _, metrics = first_step(program)(program.init(jax.random.key(0)), *placed(program), program.schedule)
    assert np.isnan(metrics.loss)
