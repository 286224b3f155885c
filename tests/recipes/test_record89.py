"""Record 89 as it is run: its numbers, its starting values, what it refuses; core/test_golden89.py has the rest."""

import dataclasses
import json
from typing import Any

import golden_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_golden89 import recipe_of
from test_recipes import check_trace

from speedrun import recipes
from speedrun.base import mesh
from speedrun.base.errors import UsageError
from speedrun.recipes.record89.model import spread
from speedrun.science.recipe import Recipe, Stage
from speedrun.train import recipe_checks
from speedrun.train.program import Program

RECORD = recipes.load("record89")
SMOKE = RECORD.override({"size": "smoke"})


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    return json.loads(str(golden_files.arrays("units2026.npz")["full/config"]))


def test_its_numbers_are_the_published_ones(published):
    """But for dtypes, which golden files do not have, and constants."""
    none = {"bigram_signs": np.zeros(1)}
    want = recipe_of(published, published["micro_batches"], none, np.zeros(1))
    dtypes = {name: getattr(RECORD.config, name) for name in ("table_dtype", "head_fp8", "mlp_dtype")}
    want = dataclasses.replace(
        want,
        config=dataclasses.replace(want.config, **dtypes),
        optimizer=dataclasses.replace(want.optimizer, polar_dtype="bfloat16"),
        compute_dtype="bfloat16",
        constants=RECORD.constants,
    )
    assert want == RECORD


def test_its_starting_values_are_the_published_ones(published):
    """Biases and scalars by the files' own script; of what is drawn, the standard deviation."""
    values = {"num_layers": 11, "num_heads": SMOKE.config.num_heads}
    table = SMOKE.table(SMOKE.config)
    start = {name: np.asarray(spec.init(jax.random.key(3), spec.shape)) for name, spec in table.items()}
    for name, want in golden_files.script("golden2026.py")["recipe_bias"](values).items():
        np.testing.assert_allclose(start.pop(name), want, rtol=1e-6, atol=1e-7, err_msg=name)
    attention_kinds = (3 * 128) ** -0.5
    sd = {"embed": 0.005, "head": 0.005, "mudd_w1": attention_kinds, "mudd_gate_w1": attention_kinds}
    assert table["embed"].like == "head"
    for name, x in start.items():
        last = name.rpartition(".")[2]
        drawn = 0.5 * 128**-0.5 if last in ("qk", "vo", "up") else 0.01 if "value_embed" in name else 0.0
        assert x.std() == pytest.approx(sd.get(name, drawn), rel=0.03), name
        assert abs(x.mean()) <= 0.03 * x.std(), name


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"config.layers.1.attention": "none"}, "layer 6, and no other, needs 'none'"),
        ({"config.layers.6.extras": "('value',)"}, "layer 6 has extras"),
        ({"config.layers.10.extras": "()"}, "the last layer needs its embedding"),
        ({"config.layers.0.extras": "('nope',)"}, "extras is .*nope.*; need tuple.Literal.'value', 'offset'"),
        (
            {"schedule.phases.0.target_weights": "('a', 'b', 'c')"},
            "target_weights .*; need `float`, got `str`",
        ),
        ({"schedule.phases.2.target_weights": "(0.0,)"}, "need a weight above 0"),
        ({"schedule.phases.3.long_blocks": "1_000_000_000"}, "a window of 16,000,000,000 tokens"),
        ({"config.bigram_rows": "1"}, "bigram_rows is 1"),
        ({"schedule.phases.2.end_weights": "(1.0, 0.5)"}, "need equal lengths"),
        ({"schedule.phases.3.lr_scale": "2.0"}, "its lr_scale must be 1"),
    ],
)
def test_a_setting_that_would_do_nothing_or_fail_is_refused(setting, said):
    with pytest.raises(UsageError, match=said):
        SMOKE.override(setting)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"config.num_heads": 2}, "need a quarter: --set schedule.rotary_pairs=16"),
        ({"optimizer.adam.1.lr": 2.0}, "ties .'head', 'embed'.; need two tables"),
        ({"optimizer.tied": "('value_embed.1', 'value_embed.2')"}, "need two tables with equal starts"),
        ({"stages.0.num_steps": 30}, "steps, and the stages 111 in all"),
        ({"schedule.phases.0.prefix_weight": 0.25}, "this data has no bytes of its ids"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(setting, said):
    with pytest.raises(UsageError, match=said):
        recipe_checks.checked(Program(SMOKE.override(setting), mesh.make_mesh(1), vocabulary=()))


def test_constants_are_random_signs_and_the_longest_prefix_of_each_id():
    config = dataclasses.replace(SMOKE.config, vocab_size=6)
    found: dict[str, Any] = RECORD.constants(config, (b"a", b"ab", b"abc", b"b"))
    assert found["prefixes"].tolist() == [-1, 0, 1, -1, -1, -1]
    signs_SD = np.asarray(found["bigram_signs"]())
    assert signs_SD.shape == (config.sign_rows, config.model_dim)
    assert set(np.unique(signs_SD)) == {-1, 1}
    for axis in (0, 1):  # five standard deviations
        assert np.abs(signs_SD.mean(axis)).max() < 5 * signs_SD.shape[axis] ** -0.5


@pytest.mark.parametrize(("gradient_scale", "of_mlp"), [(0.0, 2), (2.0**-6, 5)])
def test_eight_bits_are_in_training_only(gradient_scale, of_mlp):
    """Some products of each layer's MLP, and three of the head."""
    own = {"mlp_dtype": "float8_e4m3fn", "mlp_gradient_scale": gradient_scale}
    config = dataclasses.replace(SMOKE.config, **own, head_fp8=RECORD.config.head_fp8)
    assert products_in_eight_bits(dataclasses.replace(SMOKE, config=config), 256) == (of_mlp * 11 + 3, 0)


def products_in_eight_bits(recipe: Recipe, num_tokens: int) -> tuple[int, int]:
    """How many a training step has, and a validation."""
    program = Program(recipe, mesh.make_mesh(1), vocabulary=())
    state, ids = (
        jax.eval_shape(program.init, jax.random.key(0)),
        jax.ShapeDtypeStruct((8, num_tokens), np.int32),
    )
    static, params = program.static_at(0), state.params
    train = program.train_step_for(static).lower(state, ids, ids, program.schedule).as_text()
    score = program.eval_step_for(static).lower(params, ids, ids, program.schedule, state.step).as_text()
    both = [
        [line for line in text.splitlines() if "stablehlo.dot_general" in line] for text in (train, score)
    ]
    train_8, score_8 = (sum("xf8E" in line for line in lines) for lines in both)
    return train_8, score_8


@pytest.mark.parametrize("shape", [(2, 96), (3, 7)])
def test_a_vector_for_each_token_has_the_sum_over_tokens_as_gradient(shape):
    dy = np.random.default_rng(0).standard_normal((*shape, 5)).astype(np.float32)
    y, pull = jax.vjp(lambda x: spread(x, *shape), jnp.arange(5.0))
    np.testing.assert_array_equal(y, np.broadcast_to(np.arange(5), dy.shape))
    np.testing.assert_allclose(pull(jnp.asarray(dy))[0], dy.astype(np.float64).sum((0, 1)), rtol=1e-5)


@pytest.mark.compile
def test_its_trace():
    """All four phases, Adam in two. Another algorithm shows here; golden tests say which is right."""
    phases = tuple(dataclasses.replace(phase, num_steps=1) for phase in SMOKE.schedule.phases)
    schedule = dataclasses.replace(SMOKE.schedule, phases=phases)
    stages = (Stage(4, 8, 64),)
    small = dataclasses.replace(SMOKE, schedule=schedule, stages=stages, eval_sequences=8, eval_seq_len=64)
    check_trace(small, [5.54128, 5.53298, 5.51969, 5.51574, 5.47772])
