"""The recipes of docs/forks.md: each learns, experts are used evenly, and optimisers follow formulas in NumPy."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driven import TABLE, Driven, draw, spec
from small_run import SMALL
from test_plugins import EXAMPLES
from test_recipes import batches

from speedrun import recipes
from speedrun.base import mesh, recipe_files
from speedrun.base.errors import UsageError
from speedrun.base.sourcefile import RECIPES_VARIABLE
from speedrun.science.inputs import InputPlan
from speedrun.science.params import Params
from speedrun.science.recipe import Batch, Recipe, Stage
from speedrun.train.program import Program

SMOKE = recipes.load("smoke")
SIZES = {key: value for key, value in SMALL.items() if key.startswith("config")}
SIZES |= {"config.attention_kinds": "('long', 'none')", "config.value_tables": "(0, -1)"}
ONE, TWO = (tuple(Stage(n, b, seq_len=32) for n, b in shapes) for shapes in (((9, 8),), ((6, 8), (3, 16))))


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Recipe]]:
    folder: Path = tmp_path_factory.mktemp("forks")
    for name, text in EXAMPLES.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RECIPES_VARIABLE, "")
        yield lambda name: recipes.load(recipe_files.resolve(str(folder / f"{name}.py")))
    recipe_files.forget(sys.modules.keys() & {f"speedrun.recipes.{Path(name).stem}" for name in EXAMPLES})


def small(recipe: Recipe, stages: tuple[Stage, ...] = ONE) -> Recipe:
    return dataclasses.replace(recipe.override(SIZES), stages=stages)


def trained(recipe: Recipe) -> tuple[Program, Params, list[float]]:
    program, losses = Program(recipe, mesh.make_mesh(1), 1), []
    state, step = program.init(jax.random.key(0)), program.train_step_for(program.static_at(0))
    for stage in recipe.stages:
        for batch in batches(stage.num_steps, (stage.num_sequences, stage.seq_len), program):
            state, metrics = step(state, *batch, program.schedule)
            losses.append(float(metrics.loss))
    return program, program.layout.unpack(state.params), losses


@pytest.mark.parametrize("name", ["soap", "lion", "sqrt"])
def test_its_loss_falls(name, fork):
    _, _, losses = trained(small(fork(name)))
    assert losses[-1] < losses[0] - 0.5


def test_the_loss_of_a_batch_that_grows_falls(fork):
    recipe = small(fork("growing"), TWO)
    _, _, losses = trained(
        dataclasses.replace(recipe, schedule=dataclasses.replace(recipe.schedule, stages=TWO))
    )
    assert losses[-1] < losses[0] - 0.5


# -- A mixture of experts


def plain_experts(config: Any, x: np.ndarray, router: Any, bias: Any, up: Any, down: Any) -> np.ndarray:
    """One token and one expert at a time."""
    y = np.zeros_like(x)
    for token, out in zip(x, y, strict=True):
        score = 1 / (1 + np.exp(-router @ token / len(token) ** 0.5))
        best = np.argsort(-(score + config.bias_scale * bias))[: config.num_active]
        for e in best:
            out += score[e] / score[best].sum() * down[e] @ np.maximum(up[e] @ token, 0) ** 2
    return y


def test_each_token_gets_its_best_experts(fork):
    """Also where an expert has more tokens than a block, or none."""
    config = fork("moe").override(SIZES).config
    rng, count, width, inner = np.random.default_rng(0), config.num_experts, config.model_dim, config.mlp_dim
    shapes = {"router": (count, width), "bias": (count,), "mlp_up": (count, inner, width)}
    shapes["mlp_down"] = (count, width, inner)
    p = {f"block.0.{name}": rng.standard_normal(shape) for name, shape in shapes.items()}
    p["block.0.bias"][:2] = -9.0, 9.0
    x = rng.standard_normal((75, width))
    given = {name: jnp.asarray(value, jnp.float32) for name, value in p.items()}
    got = jax.jit(lambda x, p: config.mlp(x, p, "block.0", None))(jnp.asarray(x, jnp.float32), given)
    np.testing.assert_allclose(got, plain_experts(config, x, *p.values()), rtol=1e-4, atol=1e-4)


def loads(program: Program, params: Params, batch: list[jax.Array]) -> np.ndarray:
    """The part of all slots that each expert has, by layer: the gradient of its bias, and the mean."""
    recipe = program.recipe
    inputs = InputPlan.of(recipe.inputs_at, recipe.num_steps, {}).at(0, program.schedule, ())
    tokens_BT, targets_BT = batch
    given = Batch(tokens_BT, targets_BT, {}, jnp.arange(len(tokens_BT)))

    def loss(p: Params) -> jax.Array:
        return recipe.loss(p, given, inputs, recipe.config, program.kernels, recipe.forward).objective

    grads = jax.jit(jax.grad(loss))(params)
    above = np.stack([g for name, g in grads.items() if name.endswith(".bias")])
    return above + 1 / recipe.config.num_experts


def test_its_loss_falls_and_biases_balance_its_experts(fork):
    """Without what the biases have learned, the same experts would be used less evenly."""
    stage = Stage(num_steps=40, num_sequences=8, seq_len=32)
    program, params, losses = trained(small(fork("moe"), (stage,)))
    assert losses[-1] < losses[0] - 0.5
    without = {name: 0 * x if name.endswith(".bias") else x for name, x in params.items()}
    (batch,) = batches(1, (8, 32), program)
    got, unbiased = (loads(program, p, batch) for p in (params, without))
    np.testing.assert_allclose(got.sum(axis=1), 1, rtol=1e-5)
    assert got.max() < 0.4 < unbiased.max(axis=1).min()
    assert (got > 0).sum() > (unbiased > 0).sum()


# -- Optimisers


def run(optimizer: Any, table: Any, grads: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    driven, moved = Driven(draw(0, table), table=table, optimizer=optimizer), {}
    for step, g in enumerate(grads):
        moved = driven.go(g, lr_scale=1 - 0.1 * step)
    return moved


def test_lion_follows_its_formula(fork):
    """u = sign(beta1 m + (1 - beta1) g) + decay w;  w -= lr u;  m = beta2 m + (1 - beta2) g."""
    optimizer: Any = dataclasses.replace(fork("lion").optimizer, weight_decay=0.5)
    grads = [draw(1 + step) for step in range(5)]
    got = run(optimizer, TABLE, grads)
    (beta1, beta2), start = optimizer.betas, draw(0)
    for name in ("up", "down", "square"):
        w, m = np.float64(start[name]), np.zeros(start[name].shape)
        for step, g in enumerate(grads):
            move = np.sign(beta1 * m + (1 - beta1) * g[name]) + 0.5 * w
            w = w - (1 - 0.1 * step) * optimizer.matrix_lr * move
            m = beta2 * m + (1 - beta2) * g[name]
        np.testing.assert_allclose(got[name], w, rtol=1e-5, atol=1e-6)


class PlainSoap:
    """Algorithm 3 of the paper for one matrix in float64, with NumPy's QR and the momentum in the original space."""

    def __init__(self, w: np.ndarray, lr: float, betas: tuple[float, float], every: int) -> None:
        self.w, self.lr, self.betas, self.every, self.t = np.float64(w), lr, betas, every, 0
        self.m = self.v = np.zeros(w.shape)
        self.means = [np.zeros((size, size)) for size in w.shape]
        self.q = [np.eye(size) for size in w.shape]

    def move(self, g: np.ndarray, scale: float) -> None:
        (beta1, beta2), (left, right), self.t = self.betas, self.q, self.t + 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * (left.T @ g @ right) ** 2
        m, v = left.T @ self.m @ right / (1 - beta1**self.t), self.v / (1 - beta2**self.t)
        self.w = self.w - scale * self.lr * left @ (m / (np.sqrt(v) + 1e-8)) @ right.T
        outer = (g @ g.T, g.T @ g)
        self.means = [beta2 * a + (1 - beta2) * new for a, new in zip(self.means, outer, strict=True)]
        if (self.t <= self.every or self.t % self.every == 0) and g.any():
            self.q = [self.turned(a, q) for a, q in zip(self.means, self.q, strict=True)]

    @staticmethod
    def turned(a: np.ndarray, q: np.ndarray) -> np.ndarray:
        new, r = np.linalg.qr(a @ q)
        return new * np.sign(np.diag(r))


def test_soap_follows_its_algorithm(fork):
    """Square matrices: where a mean has no full rank, the rest of its basis is rounding. The first gradient is zero."""
    optimizer: Any = dataclasses.replace(fork("soap").optimizer, matrix_lr=0.1, betas=(0.9, 0.95), every=3)
    table = {name: one for name, one in TABLE.items() if one.group != "matrix"}
    table |= {"one": spec((5, 5), "matrix"), "two": spec((2, 6, 6), "matrix")}
    names, rng = ("one", "two"), np.random.default_rng(0)
    grads = [draw(1 + step, table) for step in range(9)]
    for name in names:
        size = table[name].shape[-1]
        u, v = (np.linalg.qr(rng.standard_normal((size, size)))[0] for _ in range(2))
        for step, g in enumerate(grads):  # singular values that differ
            made = bool(step) * (u @ np.diag(1.5 ** np.arange(size)) @ v + 0.2 * g[name])
            g[name] = np.asarray(made, np.float32)
    got, start = run(optimizer, table, grads), draw(0, table)
    for name in names:
        size = table[name].shape[-1]
        for place, w in enumerate(start[name].reshape(-1, size, size)):
            plain = PlainSoap(w, 0.1, optimizer.betas, every=3)
            for step, g in enumerate(grads):
                plain.move(g[name].reshape(-1, size, size)[place].astype(np.float64), 1 - 0.1 * step)
            np.testing.assert_allclose(got[name].reshape(-1, size, size)[place], plain.w, atol=2e-3)


def test_bases_of_soap_are_eigenvectors_after_some_steps(fork):
    optimizer: Any = fork("soap").optimizer
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.standard_normal((size, size)))[0] for size in (4, 6))
    g = jnp.asarray(u @ np.eye(4, 6) * 2.0 ** np.arange(6) @ v, jnp.float32)[None]
    tx = dataclasses.replace(optimizer, every=30).matrices()
    state = tx.init({"bank": g})
    update = jax.jit(tx.update)
    for _ in range(30):
        _, state = update({"bank": g}, state)
    (left, right) = state[0][2]["bank"]
    for q in (left, right):
        np.testing.assert_allclose(q.mT @ q, np.eye(q.shape[-1])[None], atol=1e-5)
    turned = np.abs(left.mT @ g @ right)[0]
    np.testing.assert_allclose(turned, np.diag([8.0, 4.0, 2.0, 1.0]) @ np.eye(4, 6), atol=1e-4)


# -- Schedules


def test_a_batch_grows_with_its_learning_rate_and_all_else_follows_tokens(fork):
    recipe = fork("growing")
    assert recipe.total_tokens == SMOKE.total_tokens
    sizes = [s.num_sequences for s in recipe.stages for _ in range(s.num_steps)]
    for step, size in enumerate([*sizes, sizes[-1]]):
        got, want = recipe.inputs_at(step), SMOKE.inputs_at(sum(sizes[:step]) // 8)
        np.testing.assert_allclose(got.pop("lr_scale"), (size / 8) ** 0.5 * want.pop("lr_scale"), rtol=1e-6)
        assert got == want
    with pytest.raises(UsageError, match=r"schedule\.stages have 200 steps, stages 201; need as many"):
        recipe.override({"stages.0.num_steps": 141}).inputs_at(0)


def test_a_cooldown_falls_with_the_root_of_its_time(fork):
    recipe = fork("sqrt")
    got = [recipe.inputs_at(step)["lr_scale"] for step in (0, 168, 196, 280)]
    np.testing.assert_allclose(got, [1, 1, 1 - 0.9 * 0.5, 0.1], rtol=1e-6)
