"""The rung values: record 17's numbers, its forward pass against float64, its trace."""

import numpy as np
import pytest
import rungs
from test_recipes import check_trace

from speedrun.science import recipes
from speedrun.science.params import count

RECIPE = recipes.load("values")
SMALL = {"num_layers": 4, "mixing": ("window", "none", "window", "window"), "value_tables": (0, -1, 1, 0)}


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
            "block_tokens": 128,
            "mixing": (*["window"] * 7, "none", *["window"] * 4),
            "value_tables": (0, 1, 2, -1, -1, -1, -1, -1, -1, 0, 1, 2),
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
                "then": {"cooldown_fraction": 600 / 1490, "momentum": 0.95},
                "first_momentum": 0.85,
                "warmup_steps": 300,
            },
            "growth_blocks": 13.5,
        },
        "stages": ({"num_steps": 1490, "num_sequences": 8, "seq_len": 65536, "document_tokens": 0},),
        "eval_sequences": 8,
        "eval_seq_len": 65536,
        "compute_dtype": "bfloat16",
    }


def test_the_window_is_the_published_one():
    """1,728 tokens in all, rounded down to blocks of 128, and one block more; in exact fractions of 1,490."""
    got = [RECIPE.inputs_at(step)["window_blocks"] for step in range(1491)]
    assert got == [(step * (1792 - 64) + 128 * 1490) // (128 * 1490) for step in range(1491)]
    assert (got[0], got[1490]) == (1, 14)


def test_it_has_the_published_number_of_parameters():
    """Four tables of 50,257 rows, eleven layers with attention, and 52 scalars, as record 21."""
    matrices = 11 * 4 * 768**2 + 12 * 8 * 768**2
    assert count(RECIPE.table(RECIPE.config)) == (4 * 50257 + 50304) * 768 + matrices + 52 == 275_598_388


def test_layers_start_with_half_of_each_kind_of_values():
    assert rungs.start(RECIPE, ".value_lambdas") == {(0.5, 0.5)}
    assert rungs.start(RECIPE, ".lambdas") == {(1.0, 0.0)}
    assert rungs.start(RECIPE, "skips") == {(1.0,) * 6}


def test_its_trace():
    check_trace(rungs.small("values", **SMALL), [5.54518, 5.4754, 5.05799, 4.53397, 4.19396])


def test_its_forward_pass_is_record_17s():
    recipe = rungs.small("values", **SMALL, block_tokens=4, document_token=9)
    params = rungs.random_params(recipe)
    ids_BT = np.random.default_rng(1).integers(10, 256, (2, 24))
    ids_BT[0, 7] = ids_BT[1, 13] = 9
    p = {name: x.astype(np.float64) for name, x in params.items()}

    def of_one(ids_T):
        t, docs = np.arange(24), np.cumsum(ids_T == 9)
        seen = rungs.earlier(24) & (docs[:, None] == docs) & (t[:, None] // 4 - t // 4 < 3)
        f = np.concatenate([(1 / 1024) ** (np.arange(8) / 7), np.zeros(8)])
        x = x0 = rungs.rms(p["embed"][ids_T])
        outputs = []
        for i, (mixing, value_table) in enumerate(
            zip(recipe.config.mixing, recipe.config.value_tables, strict=True)
        ):
            block = f"block.{i}"
            if i >= 2:
                x = x + p["skips"][i - 2] * outputs[3 - i]
            x = p[f"{block}.lambdas"][0] * x + p[f"{block}.lambdas"][1] * x0
            if mixing == "window":
                q, k, v = (rungs.split(rungs.rms(x) @ w.T, 2) for w in p[f"{block}.qkv"])
                q, k = (rungs.turn(rungs.rms(each), f) for each in (q, k))
                v = p[f"{block}.value_lambdas"][0] * v
                if value_table >= 0:
                    shared = rungs.split(p[f"value_embed.{value_table}"][ids_T], 2)
                    v = v + p[f"{block}.value_lambdas"][1] * shared
                x = x + rungs.attend(q, k, v, seen) @ p[f"{block}.attn_out"].T
            x = x + np.maximum(rungs.rms(x) @ p[f"{block}.mlp_up"].T, 0) ** 2 @ p[f"{block}.mlp_down"].T
            outputs.append(x)
        return rungs.rms(x)

    got = rungs.hidden(recipe, params, ids_BT, window_blocks=3)
    np.testing.assert_allclose(got, [of_one(ids_T) for ids_T in ids_BT], rtol=2e-4, atol=2e-4)


def test_a_layer_without_attention_has_no_parameters_for_it():
    recipe = rungs.small("values", **SMALL)
    has = {
        name.removeprefix("block.1.") for name in recipe.table(recipe.config) if name.startswith("block.1.")
    }
    assert has == {"lambdas", "mlp_up", "mlp_down"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mixing": ("window",) * 3}, "mixing has 3 entries; need num_layers, 4"),
        ({"value_tables": (0,) * 5}, "value_tables has 5 entries; need num_layers, 4"),
        (
            {"mixing": ("window", "half", "none", "none")},
            "mixing is .*half.*; need tuple.Literal.'window', 'none'",
        ),
        ({"value_tables": (-2, 0, 0, 0)}, "number tables from 0, -1 for none"),
        ({"logit_cap": 50.0}, "logit_cap is 50"),
    ],
)
def test_layers_that_do_not_fit_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        rungs.small("values", **SMALL | changes)
