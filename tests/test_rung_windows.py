"""The rung windows: record 13's numbers, what a token sees, its trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rungs
from test_recipes import check_trace

from speedrun.science import recipes
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.choose import Kernels
from speedrun.science.params import count

RECIPE = recipes.load("windows")


def test_every_number_is_the_published_one():
    assert rungs.numbers(RECIPE) == {
        "config": {
            "vocab_size": 50257,
            "head_size": 50304,
            "num_layers": 12,
            "model_dim": 768,
            "num_heads": 6,
            "head_dim": 128,
            "mlp_dim": 3072,
            "table_dtype": "bfloat16",
            "logit_cap": 30.0,
            "document_token": 50256,
            "block_tokens": 64,
        },
        "optimizer": {
            "muon_lr": 0.05,
            "muon_steps": 5,
            "muon_dtype": "bfloat16",
            "embed_lr": 0.6,
            "head_lr": 0.008,
            "scalar_lr": 0.04,
            "adam": {"beta1": 0.8, "beta2": 0.95, "eps": 1e-8},
        },
        "schedule": {
            "then": {
                "then": {"cooldown_fraction": 640 / 1750, "momentum": 0.95},
                "first_momentum": 0.85,
                "warmup_steps": 300,
            },
            "growth_blocks": 27.0,
        },
        "stages": ({"num_steps": 1750, "num_sequences": 8, "seq_len": 65536, "document_tokens": 0},),
        "eval_sequences": 8,
        "eval_seq_len": 65536,
        "compute_dtype": "bfloat16",
    }


def test_the_window_grows_from_64_to_1792_tokens_in_steps_of_64():
    """The published expression, in exact fractions of 1,750."""
    got = [64 * RECIPE.inputs_at(step)["window_blocks"] for step in range(1751)]
    assert got == [64 * ((step * (1792 - 64) + 64 * 1750) // (64 * 1750)) for step in range(1751)]
    assert (got[0], got[1750]) == (64, 1792)
    assert {*got} == {*range(64, 1793, 64)}
    assert RECIPE.inputs_at(150)["momentum"] == pytest.approx(0.9)
    assert RECIPE.inputs_at(1750 - 320)["lr_scale"] == pytest.approx(0.5)


def test_it_has_the_published_number_of_parameters():
    assert count(RECIPE.table(RECIPE.config)) == 2 * 50304 * 768 + 12 * (12 * 768**2 + 3) + 6 == 162_201_642


@pytest.mark.compile
def test_its_trace():
    check_trace(rungs.small("windows", block_tokens=2), [5.54518, 5.4754, 5.06269, 4.55297, 4.18555])


def test_the_bound_of_a_scheduled_window_is_in_tokens():
    """The banded form skips tiles of 128 keys beyond the bound; what it should have seen there is NaN."""
    recipe = rungs.small("windows", block_tokens=64)
    params = {name: jnp.asarray(x) for name, x in rungs.random_params(recipe).items()}
    ids_BT = jnp.asarray(np.random.default_rng(1).integers(1, 256, (1, 512)))

    def hidden(blocks, form):
        inputs = Inputs({"window_blocks": blocks}, {"window_blocks": (1, 3)})
        return recipe.forward(params, ids_BT, inputs, recipe.config, Kernels("cpu", "", form))

    forms = jax.jit(lambda blocks: [hidden(blocks, form) for form in ("banded", "definition")])
    np.testing.assert_allclose(*forms(jnp.int32(3)), rtol=1e-4, atol=1e-4)


def test_a_token_sees_its_window_inside_its_document():
    """Two blocks of 3 reach 5 tokens back, and two layers 10. A changed id changes exactly what sees it."""
    recipe = rungs.small("windows", num_layers=2, document_token=9, block_tokens=3)
    params = rungs.random_params(recipe)
    ids_T = np.random.default_rng(1).integers(10, 256, 40)
    ids_T[[5, 30]] = 9
    changed = [0, 3, 8, 15, 22, 35]
    ids_BT = np.tile(ids_T, (len(changed) + 1, 1))
    for row, t in enumerate(changed, start=1):
        ids_BT[row, t] += 1 if ids_T[t] < 255 else -1
    x_BTD = rungs.hidden(recipe, params, ids_BT, window_blocks=2)
    for t, x_TD in zip(changed, x_BTD[1:], strict=True):
        moved = {int(s) for s in np.flatnonzero(np.abs(x_TD - x_BTD[0]).max(-1) > 1e-5)}
        end = next(end for end in (5, 30, 40) if t < end)
        assert moved == {*range(t, min(t + 11, end))}
