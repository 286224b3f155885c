"""The rungs of the ladder: published numbers, forward passes against float64, pinned traces, and their own pieces."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import erf
from test_recipes import check_trace

from speedrun import recipes
from speedrun.base.errors import UsageError
from speedrun.base.mesh import DATA
from speedrun.recipes import gpt2
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.params import Layout, Params
from speedrun.science.recipe import Recipe, Stage

RUNGS = ("gpt2", "muon", "modern", "shortcuts", "unet", "windows", "values", "record21")


@pytest.mark.parametrize(
    ("rung", "falling", "last", "rising"),
    [
        ("muon", 1800, 0.0, 0),
        ("modern", 1308, 0.0, 0),
        ("shortcuts", 914, 0.0, 500),
        ("unet", 900, 0.0, 500),
        ("windows", 640, 0.0, 300),
        ("values", 600, 0.0, 300),
        ("record21", 708, 0.1, 300),
    ],
)
def test_rate_and_momentum_are_the_published_ones(rung, falling, last, rising):
    """The rate falls to `last` in the last steps; Muon's momentum rises from 0.85 to 0.95 in the first."""
    recipe = recipes.load(rung)
    step = np.arange(recipe.num_steps + 1)
    at = [recipe.inputs_at(s) for s in range(recipe.num_steps + 1)]
    fall = np.clip((recipe.num_steps - step) / falling, 0, 1)
    np.testing.assert_allclose([x["lr_scale"] for x in at], fall + last * (1 - fall), atol=1e-6)
    assert all(x["lr_scale"] == 1 for x in at[: recipe.num_steps - falling])
    rise = np.minimum(1, step / rising) if rising else np.ones(len(step))
    np.testing.assert_allclose([x["momentum"] for x in at], 0.85 + 0.1 * rise, atol=1e-6)


def test_the_learning_rate_of_gpt2_is_that_of_the_log():
    logged = {0: 1e-6, 699: 6e-4, 700: 6e-4, 5000: 526e-6, 10130: 3e-4, 15000: 82e-6, 19559: 0.0}
    recipe = recipes.load("gpt2")
    assert recipe.optimizer.matrix_lr == recipe.optimizer.other_lr
    for step, lr in logged.items():
        got = recipe.optimizer.other_lr * recipe.inputs_at(step)["lr_scale"]
        assert got == pytest.approx(lr, abs=5.1e-7), step


@pytest.mark.parametrize(
    ("rung", "block", "last"), [("windows", 64, 28), ("values", 128, 14), ("record21", 128, 14)]
)
def test_the_window_is_the_published_one(rung, block, last):
    """1,728 tokens in all: rounded down to blocks, and one block more; record 21 rounds up. In whole numbers."""
    recipe = recipes.load(rung)
    n, up = recipe.num_steps, rung == "record21"
    grown = [divmod(1728 * step, block * n) for step in range(n + 1)]
    want = [max(1, blocks + (rest > 0)) if up else blocks + 1 for blocks, rest in grown]
    got = [recipe.inputs_at(step)["window_blocks"] for step in range(n + 1)]
    assert (got, got[-1]) == (want, last)


@pytest.mark.parametrize("num_layers", [2, 8])
def test_what_gpt2_adds_to_the_stream_starts_smaller_the_deeper_it_is(num_layers):
    recipe = small("gpt2", num_layers=num_layers)
    for name, spec in recipe.table(recipe.config).items():
        if name.endswith(("attn_out.weight", "mlp_down.weight", "mlp_up.weight")):
            want = 0.02 if "mlp_up" in name else 0.02 / np.sqrt(2 * num_layers)
            sd = float(spec.init(jax.random.key(0), spec.shape).std())
            assert sd == pytest.approx(want, rel=0.05), name


#: Sizes of the configs; a config has only some of them.
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "padded_vocab_size": 256,
    "max_positions": 64,
    "num_layers": 2,
    "model_dim": 64,
    "num_heads": 2,
    "head_dim": 32,
    "mlp_dim": 128,
    "table_dtype": "float32",
    "document_token": 0,
    "block_tokens": 16,
}
#: Layers of `values`, which has an entry for each.
LAYERS = {
    "num_layers": 4,
    "attention_kinds": ("window", "none", "window", "window"),
    "value_tables": (0, -1, 1, 0),
}


def small(name: str, **config: Any) -> Recipe:
    recipe = recipes.load(name)
    fields = {field.name for field in dataclasses.fields(recipe.config)}
    sizes = {key: value for key, value in SMALL.items() if key in fields} | config
    return dataclasses.replace(
        recipe,
        config=dataclasses.replace(recipe.config, **sizes),
        stages=(Stage(4, 8, 64),),
        eval_sequences=8,
        eval_seq_len=64,
        compute_dtype="float32",
    )


#: A change of `muon` to `windows` also shows in a descendant's trace; the first loss of a zero head is ln 256.
TRACES = {
    "gpt2": ({}, [5.55591, 5.23174, 4.75588, 4.27593, 4.12729]),
    "muon": ({}, [5.67987, 5.60577, 5.41626, 5.21476, 4.94549]),
    "modern": ({}, [5.54518, 5.52743, 5.46166, 5.3485, 5.16722]),
    "shortcuts": ({}, [5.54518, 5.52743, 5.4618, 5.34857, 5.16649]),
    "unet": ({}, [5.54518, 5.4754, 5.07879, 4.59327, 4.16915]),
    "windows": ({"block_tokens": 2}, [5.54518, 5.4754, 5.06269, 4.55297, 4.18555]),
    "values": (LAYERS, [5.54518, 5.4754, 5.05799, 4.53397, 4.19396]),
}


NIGHTLY = [pytest.param(rung, marks=pytest.mark.compile) for rung in TRACES if rung not in ("unet", "values")]


@pytest.mark.parametrize("rung", ["unet", "values", *NIGHTLY])
def test_its_trace(rung):
    config, pinned = TRACES[rung]
    recipe = small(rung, **config)
    if rung == "gpt2":
        fast = {"optimizer.matrix_lr": 0.01, "optimizer.other_lr": 0.01, "schedule.warmup_steps": 2}
        recipe = recipe.override(fast)
    check_trace(recipe, pinned)


def random_params(recipe: Recipe) -> dict[str, np.ndarray]:
    """Draw every parameter from a normal, so that none is zero and every path through the model matters."""
    rng = np.random.default_rng(0)
    table = recipe.table(recipe.config)
    return {name: (0.2 * rng.standard_normal(spec.shape)).astype(np.float32) for name, spec in table.items()}


def hidden(recipe: Recipe, params: dict[str, np.ndarray], ids_BT: np.ndarray, **inputs: int) -> np.ndarray:
    @jax.jit
    def forward(params: Params, ids_BT: jax.Array) -> jax.Array:
        return recipe.forward(params, ids_BT, Inputs(inputs, {}), recipe.config, Kernels("cpu", ""))

    return np.asarray(forward({name: jnp.asarray(x) for name, x in params.items()}, jnp.asarray(ids_BT)))


def rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.finfo(np.float32).eps)


def split(x_TD: np.ndarray, num_heads: int) -> np.ndarray:
    return np.moveaxis(x_TD.reshape(len(x_TD), num_heads, -1), 1, 0)


def turn(x_HTK: np.ndarray, f: np.ndarray) -> np.ndarray:
    """Rotate pair i by position times f_i, as a product of complex numbers."""
    u, w = np.split(x_HTK, 2, axis=-1)
    z = (u + 1j * w) * np.exp(-1j * np.arange(x_HTK.shape[1])[:, None] * f)
    return np.concatenate([z.real, z.imag], axis=-1)


def attend(q_HTK: np.ndarray, k_HTK: np.ndarray, v_HTK: np.ndarray, seen_TT: np.ndarray) -> np.ndarray:
    """Return softmax(q k^T / sqrt(K)) v over what is seen, heads side by side: [T, H K]."""
    scores = np.where(seen_TT, q_HTK @ np.swapaxes(k_HTK, 1, 2) / np.sqrt(q_HTK.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    o_HTK = weights / weights.sum(-1, keepdims=True) @ v_HTK
    return np.moveaxis(o_HTK, 0, 1).reshape(q_HTK.shape[1], -1)


def forward_of(rung: str, p: dict[str, np.ndarray], ids_T: np.ndarray, cfg: Any, blocks: int) -> np.ndarray:
    """Return the final states of a rung; each does what the one before does, and more."""
    has = {name: RUNGS.index(rung) >= RUNGS.index(name) for name in RUNGS}
    t, depth = np.arange(len(ids_T)), cfg.num_layers
    seen_TT, back_TT = t[:, None] >= t, t[:, None] - t < blocks * cfg.block_tokens if has["windows"] else True
    if has["values"]:
        back_TT = t[:, None] // cfg.block_tokens - t // cfg.block_tokens < blocks
    if has["windows"]:
        document_T = np.cumsum(ids_T == cfg.document_token)
        seen_TT = seen_TT & back_TT & (document_T[:, None] == document_T)
    f = 10_000 ** (-np.arange(16) / 16)
    if has["values"]:
        f = np.concatenate([(1 / 1024) ** (np.arange(8) / 7), np.zeros(8)])
    x = x0 = rms(p["embed"][ids_T]) if has["modern"] else p["embed"][ids_T]
    outputs, first = [], None
    for i in range(depth):
        block = f"block.{i}"
        if has["unet"] and i >= depth // 2:
            x = x + p["skips"][i - depth // 2] * outputs[depth - 1 - i]
        if has["shortcuts"]:
            x = p[f"{block}.lambdas"][0] * x + p[f"{block}.lambdas"][1] * x0
        if f"{block}.qkv" in p:
            q, k, v = (split(rms(x) @ w.T, 2) for w in p[f"{block}.qkv"])
            q, k = (turn(rms(each) if has["modern"] else each, f) for each in (q, k))
            if has["values"]:
                v = p[f"{block}.value_lambdas"][0] * v
                if cfg.value_tables[i] >= 0:
                    shared = p[f"value_embed.{cfg.value_tables[i]}"][ids_T]
                    v = v + p[f"{block}.value_lambdas"][1] * split(shared, 2)
            elif has["shortcuts"]:
                first = v if first is None else first
                v = (1 - p[f"{block}.value_lambda"]) * v + p[f"{block}.value_lambda"] * first
            o = attend(q, k, v, seen_TT) @ p[f"{block}.attn_out"].T
            x = x + (o if has["modern"] else o / np.sqrt(2 * depth))
        up = rms(x) @ p[f"{block}.mlp_up"].T
        h = np.maximum(up, 0) ** 2 if has["modern"] else up / 2 * (1 + erf(up / np.sqrt(2)))
        x = x + h @ p[f"{block}.mlp_down"].T
        outputs.append(x)
    return rms(x)


@pytest.mark.parametrize("rung", RUNGS[1:-1])
def test_its_forward_pass_is_the_published_one(rung):
    """Two documents, windows of three blocks of four. test_exported.py has gpt2, test_golden.py record 21."""
    windows = {"block_tokens": 4, "document_token": 9} if rung in ("windows", "values") else {}
    depth = LAYERS if rung == "values" else {"num_layers": 2 if rung == "muon" else 4}
    recipe = small(rung, **depth, **windows)
    params = random_params(recipe)
    ids_BT = np.random.default_rng(1).integers(10, 256, (2, 24))
    ids_BT[0, 7] = ids_BT[1, 20] = 9
    p = {name: x.astype(np.float64) for name, x in params.items()}
    got = hidden(recipe, params, ids_BT, **({"window_blocks": 3} if windows else {}))
    want = [forward_of(rung, p, ids_T, recipe.config, 3) for ids_T in ids_BT]
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_the_bound_of_a_scheduled_window_is_in_tokens():
    """The banded form skips tiles of 128 keys beyond the bound; what it should have seen there is NaN."""
    recipe = small("windows", block_tokens=64)
    params = {name: jnp.asarray(x) for name, x in random_params(recipe).items()}
    ids_BT = jnp.asarray(np.random.default_rng(1).integers(1, 256, (1, 512)))

    def of(blocks, form):
        inputs = Inputs({"window_blocks": blocks}, {"window_blocks": (1, 3)})
        return recipe.forward(params, ids_BT, inputs, recipe.config, Kernels("cpu", "", form))

    forms = jax.jit(lambda blocks: [of(blocks, form) for form in ("banded", "definition")])
    np.testing.assert_allclose(*forms(jnp.int32(3)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rung", "changes", "said"),
    [
        ("modern", {"padded_vocab_size": 255}, "padded_vocab_size is 255; need 256 or more"),
        ("shortcuts", {"logit_cap": 0.0}, "logit_cap is 0; need more than 0, at most 40"),
        ("values", {"attention_kinds": ("window",) * 3}, "attention_kinds has 3 entries; need num_layers, 4"),
        (
            "values",
            {"attention_kinds": ("window", "half", "none", "none")},
            "attention_kinds is .*half.*; need tuple.Literal",
        ),
        ("values", {"value_tables": (-2, 0, 0, 0)}, "number tables from 0, -1 for none"),
    ],
)
def test_configs_that_do_not_fit_are_refused(rung, changes, said):
    with pytest.raises(ValueError, match=said):
        small(rung, **(LAYERS if rung == "values" else {}) | changes)


def test_sequences_longer_than_the_positions_of_gpt2_are_refused():
    recipe = small("gpt2", max_positions=8)
    with pytest.raises(UsageError, match=r"sequences of 12 tokens; need config\.max_positions, 8, or fewer"):
        hidden(recipe, random_params(recipe), np.zeros((1, 12), np.int32))


@pytest.mark.parametrize("clip_norm", [0.5, 1e9])
def test_adamw_clips_all_gradients_together_and_decays_matrices_and_tables(clip_norm):
    """Two steps on eight shards against optax on whole arrays; rates differ, so that a decay times lr^2 would show."""
    rates = {"matrix_lr": 0.2, "other_lr": 0.1, "weight_decay": 0.3}
    optimizer = gpt2.AdamW(**rates, beta1=0.8, beta2=0.9, eps=1e-3, clip_norm=clip_norm)
    recipe = small("gpt2", num_layers=1, vocab_size=24, max_positions=16, model_dim=4, head_dim=2, mlp_dim=8)
    layout = Layout(recipe.table(recipe.config))
    rng = np.random.default_rng(0)
    shapes = {name: x.shape for name, x in jax.eval_shape(layout.init, jax.random.key(0)).items()}
    draw = lambda: {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}  # noqa: E731
    start, first, second = draw(), draw(), draw()

    def shards(tree):
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
    whole = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.scale_by_adam(0.8, 0.9, 1e-3),
        optax.add_decayed_weights(0.3, mask={name: name != "vectors" for name in start}),
    )
    want: Any = start
    state = whole.init(want)
    for grads, lr_scale in ((first, 0.5), (second, 2.0)):
        moves: Any
        moves, state = whole.update(grads, state, want)
        rates = {name: lr_scale * (0.2 if name in layout.banks else 0.1) for name in want}
        want = {name: np.asarray(x - rates[name] * moves[name]) for name, x in want.items()}
    for name, x in want.items():
        np.testing.assert_allclose(got[name], shards({name: x})[name], rtol=1e-4, atol=1e-5, err_msg=name)
