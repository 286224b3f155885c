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
    check_trace(rungs.small("unet"), [5.54518, 5.4754, 5.07879, 4.59327, 4.16915])


def test_each_layer_of_the_second_half_adds_what_its_mirror_returned():
    """Four layers by hand, without attention."""
    recipe = rungs.small("unet", num_layers=4)
    params = rungs.random_params(recipe)
    params |= {name: 0 * x for name, x in params.items() if name.endswith(".attn_out")}
    p = {name: x.astype(np.float64) for name, x in params.items()}
    (ids_T,) = ids_BT = np.random.default_rng(1).integers(0, 256, (1, 12))
    x0 = rungs.rms(p["embed"][ids_T])

    def layer(x, i):
        x = p[f"block.{i}.lambdas"][0] * x + p[f"block.{i}.lambdas"][1] * x0
        up = rungs.rms(x) @ p[f"block.{i}.mlp_up"].T
        return x + np.maximum(up, 0) ** 2 @ p[f"block.{i}.mlp_down"].T

    x1 = layer(x0, 0)
    x2 = layer(x1, 1)
    x3 = layer(x2 + p["skips"][0] * x2, 2)
    x4 = layer(x3 + p["skips"][1] * x1, 3)
    np.testing.assert_allclose(rungs.hidden(recipe, params, ids_BT)[0], rungs.rms(x4), rtol=1e-4, atol=1e-4)
