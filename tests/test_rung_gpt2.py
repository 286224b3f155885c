"""The rung gpt2: record 1's numbers, GPT-2's forward pass and AdamW against float64, its trace."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rungs
from test_recipes import check_trace

from speedrun.ground.errors import UsageError
from speedrun.ground.mesh import DATA
from speedrun.science import recipes
from speedrun.science.inputs import Inputs
from speedrun.science.params import Layout, count
from speedrun.science.recipes import gpt2

RECIPE = recipes.load("gpt2")


def test_every_number_is_the_published_one():
    """Copied from llm.c's command for this record, and from the rates and steps in its log."""
    assert rungs.numbers(RECIPE) == {
        "config": {
            "vocab_size": 50257,
            "max_positions": 1024,
            "num_layers": 12,
            "model_dim": 768,
            "num_heads": 12,
            "head_dim": 64,
            "mlp_dim": 3072,
        },
        "optimizer": {
            "matrix_lr": 6e-4,
            "other_lr": 6e-4,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
        },
        "schedule": {"warmup_steps": 700},
        "stages": ({"num_steps": 19560, "num_sequences": 512, "seq_len": 1024, "document_tokens": 0},),
        "eval_sequences": 512,
        "eval_seq_len": 1024,
        "compute_dtype": "bfloat16",
    }


def test_the_learning_rate_is_that_of_the_log():
    """The log prints six decimals."""
    logged = {
        0: 0.000001,
        699: 0.0006,
        700: 0.0006,
        5000: 0.000526,
        10130: 0.0003,
        15000: 0.000082,
        19559: 0.0,
    }
    for step, lr in logged.items():
        assert 6e-4 * RECIPE.inputs_at(step)["lr_scale"] == pytest.approx(lr, abs=5.1e-7), step


def test_it_has_the_published_number_of_parameters():
    assert count(RECIPE.table(RECIPE.config)) == 124_439_808  # GPT-2's smallest


@pytest.mark.parametrize("num_layers", [2, 8])
def test_what_is_added_to_the_stream_starts_smaller_the_deeper_it_is(num_layers):
    """GPT-2: 0.02, divided by the root of the number of additions, two a layer."""
    recipe = rungs.small("gpt2", num_layers=num_layers)
    for name, spec in recipe.table(recipe.config).items():
        if name.endswith(("attn_out.weight", "mlp_down.weight", "mlp_up.weight")):
            want = 0.02 if "mlp_up" in name else 0.02 / np.sqrt(2 * num_layers)
            assert float(spec.init(jax.random.key(0), spec.shape).std()) == pytest.approx(want, rel=0.05), (
                name
            )


@pytest.mark.compile
def test_its_trace():
    recipe = rungs.small("gpt2", schedule=gpt2.WarmupAndCosine(warmup_steps=2))
    optimizer = dataclasses.replace(recipe.optimizer, matrix_lr=0.01, other_lr=0.01)
    check_trace(
        dataclasses.replace(recipe, optimizer=optimizer), [5.55591, 5.23174, 4.75588, 4.27593, 4.12729]
    )


def test_its_forward_pass_is_gpt2s():
    recipe = rungs.small("gpt2")
    params = rungs.random_params(recipe)
    ids_BT = np.random.default_rng(1).integers(0, 256, (2, 12))
    p = {name: x.astype(np.float64) for name, x in params.items()}

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * p[f"{name}.gain"] + p[f"{name}.bias"]

    def affine(x, name):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def gelu(x):
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def of_one(ids_T):
        x = p["embed"][ids_T] + p["positions"][: len(ids_T)]
        for block in ("block.0", "block.1"):
            h = norm(x, f"{block}.attn_norm")
            weights, biases = p[f"{block}.qkv.weight"], p[f"{block}.qkv.bias"]
            qkv = [rungs.split(h @ w.T + b, 2) for w, b in zip(weights, biases, strict=True)]
            x = x + affine(rungs.attend(*qkv, rungs.earlier(len(ids_T))), f"{block}.attn_out")
            x = x + affine(gelu(affine(norm(x, f"{block}.mlp_norm"), f"{block}.mlp_up")), f"{block}.mlp_down")
        return norm(x, "final_norm")

    got = rungs.hidden(recipe, params, ids_BT)
    np.testing.assert_allclose(got, [of_one(ids_T) for ids_T in ids_BT], rtol=1e-5, atol=1e-5)


def test_table_and_head_are_one():
    recipe = rungs.small("gpt2")
    params = rungs.random_params(recipe)
    x_ND = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    arrays = {name: jnp.asarray(x) for name, x in params.items()}
    got = recipe.logits(arrays, jnp.asarray(x_ND), recipe.config)
    np.testing.assert_allclose(got, x_ND @ params["embed"].T, rtol=1e-4, atol=1e-5)


def test_sequences_longer_than_its_positions_are_refused():
    recipe = rungs.small("gpt2", max_positions=8)
    with pytest.raises(UsageError, match=r"sequences of 12 tokens; need config\.max_positions, 8, or fewer"):
        rungs.hidden(recipe, rungs.random_params(recipe), np.zeros((1, 12), np.int32))


@pytest.mark.parametrize("clip_norm", [0.5, 1e9])
def test_adamw_clips_all_gradients_together_and_decays_matrices_and_tables(clip_norm):
    """Two steps on eight shards against float64; the rates differ, so that a decay times lr^2 would show."""
    rates = {"matrix_lr": 0.2, "other_lr": 0.1, "weight_decay": 0.3}
    optimizer = gpt2.AdamW(**rates, beta1=0.8, beta2=0.9, eps=1e-3, clip_norm=clip_norm)
    recipe = rungs.small(
        "gpt2", num_layers=1, vocab_size=24, max_positions=16, model_dim=4, head_dim=2, mlp_dim=8
    )
    layout = Layout(recipe.table(recipe.config))
    rng = np.random.default_rng(0)
    shapes = {name: x.shape for name, x in jax.eval_shape(layout.init, jax.random.key(0)).items()}
    start, first, second = (
        {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(3)
    )

    def shards(tree):
        """Divide what is sharded over eight, repeat the rest."""

        def of(name, x):
            return x.reshape(8, -1, *x.shape[1:]) if DATA in layout.specs[name] else np.stack([x] * 8)

        return {name: jnp.asarray(of(name, x)) for name, x in tree.items()}

    transform = optimizer.transform(layout)

    def train(params: Any, *grads: Any) -> Any:
        state = transform.init(params)
        for grad, lr_scale in zip(grads, (0.5, 2.0), strict=True):
            moves, state = transform.update(grad, state, params, inputs=Inputs({"lr_scale": lr_scale}, {}))
            params = jax.tree.map(jnp.add, params, moves)
        return params

    got: dict[str, Any] = jax.jit(jax.vmap(train, axis_name=DATA))(*map(shards, (start, first, second)))
    want = {name: x.astype(np.float64) for name, x in start.items()}
    mean, square = (dict.fromkeys(want, 0.0) for _ in range(2))
    for step, (grads, lr_scale) in enumerate(((first, 0.5), (second, 2.0)), start=1):
        norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in grads.values()))
        for name, g in grads.items():
            g = g.astype(np.float64) * min(1, clip_norm / norm)
            mean[name] = 0.8 * mean[name] + 0.2 * g
            square[name] = 0.9 * square[name] + 0.1 * g**2
            adam = mean[name] / (1 - 0.8**step) / (np.sqrt(square[name] / (1 - 0.9**step)) + 1e-3)
            decay = 0.0 if name == "vectors" else 0.3
            lr = lr_scale * (0.2 if name in layout.banks else 0.1)
            want[name] = want[name] - lr * (adam + decay * want[name])
    for name, x in want.items():
        np.testing.assert_allclose(got[name], shards({name: x})[name], rtol=1e-4, atol=1e-5, err_msg=name)
