"""The rung muon: record 4's numbers, its forward pass against float64, the size of Muon's updates, its trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rungs
from scipy.special import erf
from test_recipes import check_trace

from speedrun.ground.mesh import DATA
from speedrun.science import nn, recipes
from speedrun.science.inputs import Inputs
from speedrun.science.models import muon
from speedrun.science.params import Layout, count

RECIPE = recipes.load("muon")


def test_every_number_is_the_published_one():
    assert rungs.numbers(RECIPE) == {
        "config": {
            "vocab_size": 50257,
            "num_layers": 12,
            "model_dim": 768,
            "num_heads": 12,
            "head_dim": 64,
            "mlp_dim": 3072,
        },
        "optimizer": {
            "muon_lr": 0.1 * 0.0036,
            "muon_steps": 5,
            "muon_dtype": "bfloat16",
            "head_lr": 0.0036,
            "adam": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
        },
        "schedule": {"cooldown_fraction": 1800 / 6200, "momentum": 0.95},
        "stages": ({"num_steps": 6200, "num_sequences": 512, "seq_len": 1024, "document_tokens": 0},),
        "eval_sequences": 512,
        "eval_seq_len": 1024,
        "compute_dtype": "bfloat16",
    }


def test_the_learning_rate_falls_in_the_last_1800_steps():
    at = [RECIPE.inputs_at(step)["lr_scale"] for step in range(6201)]
    assert {*at[:4401]} == {1}
    assert at[4401:] == pytest.approx([(6200 - step) / 1800 for step in range(4401, 6201)], abs=1e-6)


def test_it_has_the_published_number_of_parameters():
    assert count(RECIPE.table(RECIPE.config)) == 50257 * 768 + 12 * 12 * 768**2 == 123_532_032


@pytest.mark.compile  # a change here also shows in a descendant's trace
def test_its_trace():
    check_trace(rungs.small("muon"), [5.67987, 5.60577, 5.41626, 5.21476, 4.94549])


def test_scores_depend_on_distances_only_and_lengths_stay():
    """The pairs turn by 1 to 10000^(-1 + 2 / K) radians per position."""
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 16)).astype(np.float32)
    angles = muon.rotary_angles(50, 16)
    turned_q, turned_k = (np.asarray(nn.rotary(jnp.tile(x, (1, 50, 1, 1)), angles))[0, :, 0] for x in (q, k))
    scores_TT = turned_q @ turned_k.T
    for distance in (0, 1, 17):
        np.testing.assert_allclose(np.diagonal(scores_TT, distance), scores_TT[0, distance], atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(turned_q, axis=1), np.linalg.norm(q), rtol=1e-5)
    np.testing.assert_allclose(angles[1][1], np.sin(10_000 ** (-np.arange(8) / 8)), rtol=1e-5)


def test_its_forward_pass_is_record_4s():
    recipe = rungs.small("muon")
    params = rungs.random_params(recipe)
    ids_BT = np.random.default_rng(1).integers(0, 256, (2, 12))
    p = {name: x.astype(np.float64) for name, x in params.items()}

    def of_one(ids_T):
        x, f = p["embed"][ids_T], 10_000 ** (-np.arange(16) / 16)
        for block in ("block.0", "block.1"):
            q, k, v = (rungs.split(rungs.rms(x) @ w.T, 2) for w in p[f"{block}.qkv"])
            o = rungs.attend(rungs.turn(q, f), rungs.turn(k, f), v, rungs.earlier(len(ids_T)))
            x = x + o @ p[f"{block}.attn_out"].T / np.sqrt(4)
            up = rungs.rms(x) @ p[f"{block}.mlp_up"].T
            x = x + up / 2 * (1 + erf(up / np.sqrt(2))) @ p[f"{block}.mlp_down"].T
        return rungs.rms(x)

    got = rungs.hidden(recipe, params, ids_BT)
    np.testing.assert_allclose(got, [of_one(ids_T) for ids_T in ids_BT], rtol=2e-4, atol=2e-4)


def test_the_entries_of_an_update_are_as_large_as_its_learning_rate():
    """For square, wide and tall matrices. Singular values end between 0.7 and 1.2."""
    recipe = rungs.small("muon", num_layers=1, model_dim=32, head_dim=16)
    layout = Layout(recipe.table(recipe.config))
    transform = recipe.optimizer.transform(layout)
    rng = np.random.default_rng(0)
    grads = {name: rng.standard_normal(spec.shape).astype(np.float32) for name, spec in layout.table.items()}

    def update(grads):
        params = layout.init(jax.random.key(0))
        inputs = Inputs({"lr_scale": 0.5, "momentum": 0.95}, {})
        return layout.unpack(transform.update(grads, transform.init(params), params, inputs=inputs)[0])

    one_device = jax.tree.map(lambda x: x[None], layout.pack({k: jnp.asarray(g) for k, g in grads.items()}))
    updates = jax.jit(jax.vmap(update, axis_name=DATA))(one_device)
    for name in ("qkv", "attn_out", "mlp_up", "mlp_down"):
        size = np.sqrt(np.mean(np.square(updates[f"block.0.{name}"]), axis=(-2, -1))) / (0.5 * 0.00036)
        assert ((size > 0.7) & (size < 1.2)).all(), (name, size)
    np.testing.assert_allclose(np.abs(updates["embed"]), 0.5 * 0.0036, rtol=1e-3)  # Adam's first step
