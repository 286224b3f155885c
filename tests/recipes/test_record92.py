"""Record 92 as it is run: its sibling, and what it refuses. tests/core/test_golden92.py has the rest."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_record89 import products_in_eight_bits

import speedrun as sr
from speedrun import recipes
from speedrun.base import mesh, track
from speedrun.base.errors import UsageError
from speedrun.base.mesh import DATA
from speedrun.data import synthetic
from speedrun.recipes.record92.averages import Average, averages
from speedrun.recipes.record92.row_adam import RowPeriod, row_adam
from speedrun.recipes.record92.tokens import ngram_rows
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.masks import with_ids
from speedrun.science.params import Layout, ParamSpec, count, zeros
from speedrun.science.rows import Rows, apply_update, max_rows
from speedrun.train import checkpoint, compile, memory, recipe_checks
from speedrun.train.program import Program, StepShape

RECORD = recipes.load("record92")
SMOKE = RECORD.override({"size": "smoke"})


@pytest.mark.parametrize(
    "num_tokens", sorted({RECORD.eval_seq_len, *(stage.seq_len for stage in RECORD.stages)})
)
def test_the_rows_of_a_sequence_fit_between_eight_devices(num_tokens):
    sizes, each = RECORD.config, RECORD.config.ngram_rows // 8
    ids = synthetic.imitated(
        num_tokens, vocab_size=sizes.vocab_size, document_token=sizes.document_token, seed=0
    )
    found = np.unique(ngram_rows(jnp.asarray(ids, jnp.int32)[None], sizes.ngram_rows))
    assert np.bincount(found // each).max() < max_rows(2 * num_tokens, each, 8)


def test_queries_keys_and_values_have_eight_bits_in_training_only():
    """Forward products of seven layers, of a sibling with none else in eight bits."""
    config = {"config.qkv_dtype": "float8_e4m3fn"}
    assert products_in_eight_bits(SMOKE.override(config), SMOKE.stages[0].seq_len) == (3 * 7, 0)


def test_states_from_queries_keys_and_values_in_eight_bits_are_near_those_in_float32():
    """In layers with value embeddings and without, and with exclusive heads: each has the scale elsewhere."""
    program, table = Program(SMOKE, mesh.make_mesh(1), vocabulary=()), SMOKE.table(SMOKE.config)
    keys = jax.random.split(jax.random.key(0), len(table))
    p = {name: spec.init(k, spec.shape) for (name, spec), k in zip(table.items(), keys, strict=True)}
    p |= {name: 20 * p[name] for name in p if name.startswith("value_embed")}
    p |= {name: 4 * p[name] for name in p if name.endswith(".vo")}  # so that attention counts
    ids_BT = jnp.asarray(np.random.default_rng(0).integers(0, SMOKE.config.vocab_size, (1, 256)), jnp.int32)
    inputs = program.step.plan.at(0, program.step.plan.schedule, program.static_at(0))

    def state(dtype: str) -> np.ndarray:
        own = replace(inputs, values={**inputs.values, "products": {"qkv": dtype}})
        given = own, SMOKE.config, Kernels("cpu", "")
        return np.asarray(jax.jit(lambda read: SMOKE.forward(read, ids_BT, *given))(SMOKE.read(p, ids_BT)))

    exact, near = state("float32"), state("float8_e4m3fn")
    assert 0.01 < np.linalg.norm(near - exact) / np.linalg.norm(exact) < 0.1


@pytest.mark.parametrize("stage", range(3))
def test_bench_and_warm_up_draw_ids_with_which_sampled_columns_have_room_for_all_targets(stage):
    sizes, one = RECORD.config, RECORD.stages[stage]
    room = min(RECORD.inputs_at(step)["columns"] for step in RECORD.steps_of(stage))
    ids = synthetic.imitated(
        one.seq_len, vocab_size=sizes.vocab_size, document_token=sizes.document_token, seed=0
    )
    assert len(np.unique(ids)) < room
    ready: Any = SimpleNamespace(track=track.load("main-8xh100"), program=Program(SMOKE, mesh.make_mesh(8)))
    _, targets_BT = compile._random_ids(ready, StepShape(8, 256, ()))
    assert len(np.unique(targets_BT)) < 20


def test_an_update_has_room_for_the_batches_since_the_last_one():
    """Relative to its own: those that precede the last stage are larger."""
    waiting, most = 0.0, [0] * len(RECORD.stages)
    for step in range(RECORD.num_steps):
        stage = RECORD.stage_of(step)
        own = RECORD.stages[stage].seq_len
        waiting += own
        if RECORD.inputs_at(step)["update_tables"]:
            most[stage] = max(most[stage], math.ceil(waiting / own))
            waiting = 0.0
    assert most == [phase.room for phase in RECORD.schedule.phases]


@pytest.mark.parametrize(("batches", "fits"), [(2, True), (1, False)])
def test_an_update_without_room_for_all_rows_that_wait_is_no_number(batches, fits):
    """Two batches of two rows each wait."""
    transform = row_adam(["t"], [RowPeriod(1.0, 0.9, 0.0)], 0.1, eps=1e-8, decay=0.0, when="update_tables")
    moves: Any = {}
    params: Any = {"t": jnp.ones((8, 3))}
    state: Any = transform.init(params)
    for event, ids in enumerate(([0, 5], [6, 2])):
        grads: Any = {"t": Rows(jnp.array(ids), jnp.ones((2, 3)))}
        inputs = Inputs({"update_tables": event, "rows_room": batches, "lr_scale": jnp.float32(1)}, {})
        moves, state = transform.update(grads, state, params, inputs=inputs)
    found = apply_update(params["t"], moves["t"])
    assert np.isfinite(found).all() == fits
    np.testing.assert_array_equal(found[jnp.array([1, 3, 4, 7])], 1.0)
    assert not state.waits["t"].any()


def test_its_state_has_a_hash():
    assert jax.eval_shape(checkpoint.fingerprint, Program(SMOKE, mesh.make_mesh(8)).state).shape == (2,)


def test_its_mask_is_in_scored_logits():
    masked = recipes.load("record92_masked").override({"size": "smoke"})
    words = b"a", b"n", b"o", b"an", b"ano"
    vocabulary = words + (b"",) * (masked.config.vocab_size - len(words))
    program = Program(masked, mesh.make_mesh(1), vocabulary=vocabulary)
    inputs = Inputs({k: jnp.asarray(x) for k, x in program.constants.arrays().items()}, {})
    head = jnp.asarray(np.random.default_rng(0).normal(size=(256, 128)), jnp.float32)
    x_ND, ids_N = head[:5] / 10, jnp.arange(5)
    got = masked.logits({"head": head}, with_ids(x_ND[None], ids_N[None])[0], inputs, masked.config)
    want = np.array(RECORD.logits({"head": head}, x_ND, inputs, masked.config))
    want[0, 1] = want[3, 2] = -np.inf  # a n, an o
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("devices", [1, 8])
def test_averages_count_the_steps_they_are_told_and_are_shipped_in_order(devices):
    """`head` is all of one mean, then a quarter of another; so is `embed` of its own, and it keeps its norm."""
    layout = Layout({name: ParamSpec((16, 4), ("id", "model"), zeros, name) for name in ("head", "embed")})
    given = Average(("head",), "early", 1.0), Average(("head", "embed"), "late", 0.25)
    transform, rates = averages(given, ("embed",), layout), [(0, 0), (1, 0), (0.3, 1), (0, 0.5), (0.6, 0.2)]
    moves = np.random.default_rng(0).standard_normal((len(rates), 2, 16, 4)).astype(np.float32)

    def trained(moves_SXRD: jax.Array) -> Any:
        params = {name: jnp.zeros_like(moves_SXRD[0, 0]) for name in ("head", "embed")}
        state: Any = transform.init(params)
        for i, (early, late) in enumerate(rates):
            inputs = Inputs({"early": early, "late": late, "use_averages": i == len(rates) - 1}, {})
            given = dict(zip(params, moves_SXRD[i], strict=True))
            own: Any
            own, state = transform.update(given, state, params, inputs=inputs)
            params = {name: x + own[name] for name, x in params.items()}
        return params

    parts = P(None, None, DATA), P(DATA)
    step = jax.shard_map(trained, mesh=mesh.make_mesh(devices), in_specs=parts[:1], out_specs=parts[1])
    found: Any = jax.device_get(jax.jit(step)(moves))
    head, embed = np.cumsum(moves.astype(np.float64), axis=0).swapaxes(0, 1)  # after each step
    early = 0.4 * (0.7 * head[1] + 0.3 * head[2]) + 0.6 * head[4]
    late = {name: 0.8 * (0.5 * w[2] + 0.5 * w[3]) + 0.2 * w[4] for name, w in (("h", head), ("e", embed))}
    shipped = 0.75 * embed[4] + 0.25 * late["e"]
    shipped *= np.linalg.norm(embed[4]) / np.linalg.norm(shipped)
    np.testing.assert_allclose(found["head"], 0.75 * early + 0.25 * late["h"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["embed"], shipped, rtol=1e-5, atol=1e-6)


def test_averages_that_never_began_ship_finite_weights():
    """A warm-up runs the last step's program early."""
    layout = Layout({"embed": ParamSpec((16, 4), ("id", "model"), zeros, "embed")})
    transform = averages((Average(("embed",), "late", 1.0),), ("embed",), layout)

    def shipped(embed_RD: jax.Array) -> jax.Array:
        params, inputs = {"embed": embed_RD}, Inputs({"late": 0, "use_averages": True}, {})
        own: Any = transform.update({"embed": embed_RD}, transform.init(params), params, inputs=inputs)[0]
        return embed_RD + own["embed"]

    step = jax.shard_map(shipped, mesh=mesh.make_mesh(1), in_specs=P(DATA), out_specs=P(DATA))
    assert not jax.jit(step)(jnp.ones((16, 4))).any()  # NaN would be true


def test_averages_of_groups_that_do_not_exist_are_refused():
    layout = Layout(SMOKE.table(SMOKE.config))
    for group in ("nosuch", "ngram"):
        with pytest.raises(UsageError, match=f"no averages of {group}; need some of embed, "):
            averages((Average((group,), "late", 1.0),), (), layout)


def test_an_average_of_more_steps_than_there_are_begins_with_the_first():
    schedule = SMOKE.schedule
    assert all(schedule.rate(tail, 0, 10) == 1.0 for tail in schedule.tails)
    assert all(schedule.rate(tail, 4, 10) == tail.rate for tail in schedule.tails if tail.name != "ema")


@pytest.mark.compile
def test_its_sibling_is_a_program_whose_state_has_few_bytes():
    """Also with columns that are sampled, which the sibling has too few ids for."""
    few = SMOKE.override({"schedule.phases.1.columns": "(200,)"})
    program = recipe_checks.checked(Program(few, mesh.make_mesh(8), vocabulary=()))
    assert 8 * memory.state_bytes(program) <= 16 * count(few.table(few.config))


@pytest.mark.compile
@pytest.mark.parametrize("name", ["record89", "record92"])
def test_a_small_sibling_trains_to_the_end(name, smoke_data, tmp_path):
    """A warm-up, all kinds of steps, validations, and the averages that are shipped."""
    recipe = recipes.load(name).override({"size": "smoke"})
    given = {"track": "smoke-cpu", "data": smoke_data, "devices": 1, "quiet": True}
    (run,) = sr.run(recipe, out=tmp_path / "record", **given).runs
    assert run.val_loss < 3.6, "a model without attention ends at 4.2"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"config.mix_dim": "48"}, "groups that fill the model"),
        ({"config.ngram_rows": "14"}, "need an even number, at least 16"),
        ({"config.vocab_size": "200_000"}, "need at most 107,3"),
        ({"config.layers.8.extras": "()"}, "layers 1, 2, 8 and 10 need 'value'"),
    ],
)
def test_a_setting_that_would_do_nothing_or_fail_is_refused(setting, said):
    with pytest.raises(UsageError, match=said):
        SMOKE.override(setting)
