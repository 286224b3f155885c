"""The rung shortcuts: record 9's numbers, its forward pass and loss against float64, its trace."""

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
from speedrun.science.recipe import Batch

RECIPE = recipes.load("shortcuts")


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
            "table_dtype": "float32",
            "logit_cap": 30.0,
        },
        "optimizer": {
            "muon_lr": 0.02,
            "muon_steps": 5,
            "muon_dtype": "bfloat16",
            "embed_lr": 0.3,
            "head_lr": 0.002,
            "scalar_lr": 0.02,
            "adam": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
        },
        "schedule": {
            "then": {"cooldown_fraction": 914 / 3200, "momentum": 0.95},
            "first_momentum": 0.85,
            "warmup_steps": 500,
        },
        "stages": ({"num_steps": 3200, "num_sequences": 512, "seq_len": 1024, "document_tokens": 0},),
        "eval_sequences": 512,
        "eval_seq_len": 1024,
        "compute_dtype": "bfloat16",
    }


def test_the_momentum_rises_in_500_steps():
    momentum = [RECIPE.inputs_at(step)["momentum"] for step in range(3201)]
    assert momentum[:500] == pytest.approx([0.85 + 0.1 * step / 500 for step in range(500)])
    assert momentum[500:] == pytest.approx([0.95] * 2701)
    assert RECIPE.inputs_at(3200 - 457)["lr_scale"] == pytest.approx(0.5)


def test_it_has_the_published_number_of_parameters():
    """Three scalars more in each layer."""
    assert count(RECIPE.table(RECIPE.config)) == 2 * 50304 * 768 + 12 * (12 * 768**2 + 3) == 162_201_636


def test_layers_start_without_the_shortcut_of_the_embedding_and_with_half_of_the_values():
    assert rungs.start(RECIPE, ".lambdas") == {(1.0, 0.0)}
    assert rungs.start(RECIPE, ".value_lambda") == {(0.5,)}


@pytest.mark.compile  # a change here also shows in a descendant's trace
def test_its_trace():
    check_trace(rungs.small("shortcuts"), [5.54518, 5.52743, 5.4618, 5.34857, 5.16649])


def test_its_forward_pass_and_loss_are_record_9s():
    recipe = rungs.small("shortcuts", num_layers=3, logit_cap=2.0)
    params = rungs.random_params(recipe)
    rng = np.random.default_rng(1)
    ids_BT, targets_BT = rng.integers(0, 256, (2, 2, 12))
    p = {name: x.astype(np.float64) for name, x in params.items()}

    def of_one(ids_T):
        x = x0 = rungs.rms(p["embed"][ids_T])
        f, first = 10_000 ** (-np.arange(16) / 16), None
        for block in ("block.0", "block.1", "block.2"):
            x = p[f"{block}.lambdas"][0] * x + p[f"{block}.lambdas"][1] * x0
            q, k, v = (rungs.split(rungs.rms(x) @ w.T, 2) for w in p[f"{block}.qkv"])
            first = v if first is None else first
            v = (1 - p[f"{block}.value_lambda"]) * v + p[f"{block}.value_lambda"] * first
            q, k = (rungs.turn(rungs.rms(each), f) for each in (q, k))
            x = x + rungs.attend(q, k, v, rungs.earlier(len(ids_T))) @ p[f"{block}.attn_out"].T
            x = x + np.maximum(rungs.rms(x) @ p[f"{block}.mlp_up"].T, 0) ** 2 @ p[f"{block}.mlp_down"].T
        return rungs.rms(x)

    x_BTD = np.array([of_one(ids_T) for ids_T in ids_BT])
    np.testing.assert_allclose(rungs.hidden(recipe, params, ids_BT), x_BTD, rtol=2e-4, atol=2e-4)
    logits_BTV = 2 * np.tanh(x_BTD @ p["head"].T / 2)
    target_BT = np.take_along_axis(logits_BTV, targets_BT[..., None], 2)[..., 0]
    batch = Batch(jnp.asarray(ids_BT), jnp.asarray(targets_BT), {})
    arrays = {name: jnp.asarray(x) for name, x in params.items()}
    rest = Inputs({}, {}), recipe.config, Kernels("cpu", ""), recipe.forward
    got = jax.jit(lambda params, batch: recipe.loss(params, batch, *rest))(arrays, batch)
    want = np.mean(np.log(np.exp(logits_BTV).sum(-1)) - target_BT)
    assert float(got.objective) == float(got.nll) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("cap", [0.0, 41.0])
def test_caps_that_cannot_be_computed_are_refused(cap):
    with pytest.raises(ValueError, match=rf"logit_cap is {cap:g}; need more than 0, at most 40"):
        rungs.small("shortcuts", logit_cap=cap)
