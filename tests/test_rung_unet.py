"""The rung unet: record 11's numbers, its skips against float64, its trace."""

import numpy as np
import rungs
from test_recipes import check_trace

from speedrun.science import recipes
from speedrun.science.params import count

RECIPE = recipes.load("unet")


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
        },
        "optimizer": {
            "muon_lr": 0.04,
            "muon_steps": 5,
            "muon_dtype": "bfloat16",
            "embed_lr": 0.6,
            "head_lr": 0.008,
            "scalar_lr": 0.04,
            "adam": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
        },
        "schedule": {
            "then": {"cooldown_fraction": 900 / 3000, "momentum": 0.95},
            "first_momentum": 0.85,
            "warmup_steps": 500,
        },
        "stages": ({"num_steps": 3000, "num_sequences": 512, "seq_len": 1024, "document_tokens": 0},),
        "eval_sequences": 512,
        "eval_seq_len": 1024,
        "compute_dtype": "bfloat16",
    }


def test_it_has_the_published_number_of_parameters():
    """Three scalars in each layer, and six skips."""
    assert count(RECIPE.table(RECIPE.config)) == 2 * 50304 * 768 + 12 * (12 * 768**2 + 3) + 6 == 162_201_642


def test_its_trace():
    check_trace(rungs.small("unet"), [5.54518, 5.4754, 5.07139, 4.57338, 4.16265])


def test_each_layer_of_the_second_half_adds_what_its_mirror_returned():
    """With matrices of zero a layer is its lambdas only, so the stream can be followed by hand."""
    recipe = rungs.small("unet", num_layers=4)
    params = rungs.random_params(recipe)
    params |= {name: 0 * x for name, x in params.items() if name.endswith((".attn_out", ".mlp_down"))}
    a, b = np.array([params[f"block.{i}.lambdas"] for i in range(4)], np.float64).T
    s = params["skips"].astype(np.float64)
    (ids_T,) = ids_BT = np.random.default_rng(1).integers(0, 256, (1, 12))
    x0 = rungs.rms(params["embed"][ids_T].astype(np.float64))
    x1 = a[0] * x0 + b[0] * x0
    x2 = a[1] * x1 + b[1] * x0
    x3 = a[2] * (x2 + s[0] * x2) + b[2] * x0
    x4 = a[3] * (x3 + s[1] * x1) + b[3] * x0
    np.testing.assert_allclose(rungs.hidden(recipe, params, ids_BT)[0], rungs.rms(x4), rtol=1e-4, atol=1e-5)
