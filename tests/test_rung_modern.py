"""The rung modern: record 8's numbers, its forward pass against float64, its trace."""

import numpy as np
import pytest
import rungs
from test_recipes import check_trace

from speedrun.science import recipes
from speedrun.science.params import count

RECIPE = recipes.load("modern")


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
        },
        "optimizer": {
            "muon_lr": 0.02,
            "muon_steps": 5,
            "muon_dtype": "bfloat16",
            "embed_lr": 0.3,
            "head_lr": 0.002,
            "adam": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
        },
        "schedule": {"cooldown_fraction": 1308 / 4578, "momentum": 0.95},
        "stages": ({"num_steps": 4578, "num_sequences": 512, "seq_len": 1024, "document_tokens": 0},),
        "eval_sequences": 512,
        "eval_seq_len": 1024,
        "compute_dtype": "bfloat16",
    }


def test_it_has_the_published_number_of_parameters():
    assert count(RECIPE.table(RECIPE.config)) == 2 * 50304 * 768 + 12 * 12 * 768**2 == 162_201_600


@pytest.mark.compile  # a change here also shows in a descendant's trace
def test_its_trace():
    """The first loss is that of the zero head: ln 256."""
    check_trace(rungs.small("modern"), [5.54518, 5.52743, 5.46166, 5.3485, 5.16722])


def test_its_forward_pass_is_record_8s():
    recipe = rungs.small("modern")
    params = rungs.random_params(recipe)
    ids_BT = np.random.default_rng(1).integers(0, 256, (2, 12))
    p = {name: x.astype(np.float64) for name, x in params.items()}

    def of_one(ids_T):
        x, f = rungs.rms(p["embed"][ids_T]), 10_000 ** (-np.arange(16) / 16)
        for block in ("block.0", "block.1"):
            q, k, v = (rungs.split(rungs.rms(x) @ w.T, 2) for w in p[f"{block}.qkv"])
            q, k = (rungs.turn(rungs.rms(each), f) for each in (q, k))
            x = x + rungs.attend(q, k, v, rungs.earlier(len(ids_T))) @ p[f"{block}.attn_out"].T
            x = x + np.maximum(rungs.rms(x) @ p[f"{block}.mlp_up"].T, 0) ** 2 @ p[f"{block}.mlp_down"].T
        return rungs.rms(x)

    got = rungs.hidden(recipe, params, ids_BT)
    np.testing.assert_allclose(got, [of_one(ids_T) for ids_T in ids_BT], rtol=2e-4, atol=2e-4)


def test_a_head_smaller_than_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="head_size is 255; need at least vocab_size, 256"):
        rungs.small("modern", head_size=255)
