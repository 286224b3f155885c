"""Small tracks tell right from wrong: their targets are reached by the right program and by no wrong one.

Minutes of training: `pytest -s -m compile tests/recipes/test_separation.py`. Outcomes: docs/LOG.md.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typed import speedrun

from speedrun import recipes
from speedrun.base import mesh, track
from speedrun.base.mesh import DATA
from speedrun.data import generated, shards
from speedrun.data.stream import TokenStream
from speedrun.science.params import Params
from speedrun.science.recipe import Recipe
from speedrun.science.step import Step
from speedrun.train.program import Program, evaluate

pytestmark = pytest.mark.compile

TRACK = track.load("smoke-cpu")
SMOKE = recipes.load("smoke")
DOCS_TRACK = track.load("docs-cpu")
DOCS = recipes.load("docs")


class LocalGradients(Step):
    """The averaging fault: each device moves what it owns by its own gradient alone."""

    def _scatter_mean(self, grads: Params) -> Params:
        def own(name: str, g: jax.Array) -> jax.Array:
            if name in self.layout.vectors:
                return jax.lax.pmean(g, DATA)
            num_local = g.shape[0] // self.mesh.size
            return jax.lax.dynamic_slice_in_dim(g, jax.lax.axis_index(DATA) * num_local, num_local)

        return {name: own(name, g) for name, g in grads.items()}


class Blind:
    """Kernels whose attention does not see the token before."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def attention(self, q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any, **how: Any) -> jax.Array:
        k, v = (jnp.pad(x, ((0, 0), (2, 0), (0, 0), (0, 0)))[:, :-2] for x in (k, v))
        return self._kernels.attention(q, k, v, *rest, **how)


def batches(
    recipe: Recipe, opened: shards.TrackShards, shift: int, copied: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What the loop reads; targets are `shift` places ahead of their tokens, and 1 is right.

    The first `copied` sequences of a batch are scored text.
    """
    stream, scored, stage = TokenStream(opened.train), TokenStream(opened.val), recipe.stages[0]
    for _ in range(recipe.num_steps):
        tokens_BT, targets_BT = (np.array(x) for x in stream.batch(stage.num_sequences, stage.seq_len))
        if copied:
            if scored.cursor.offset + copied * stage.seq_len > TRACK.data.val_tokens:
                scored = TokenStream(opened.val)
            tokens_BT[:copied], targets_BT[:copied] = scored.batch(copied, stage.seq_len)
        yield tokens_BT, np.roll(targets_BT, 1 - shift, axis=1)


def final_losses(
    program: Program, data: Path, rules: track.Track = TRACK, *, shift: int = 1, copied: int = 0
) -> list[np.ndarray]:
    """Losses of scored and of held-out sequences after training; the score itself is always the right one."""
    opened = shards.open_track(data, rules.data)
    state = program.init(jax.random.key(0))
    for batch in batches(program.recipe, opened, shift, copied):
        placed = (mesh.shard(x, program.mesh) for x in batch)
        state, metrics = program.train_step_for(program.static_at(0))(state, *placed, program.schedule)
        jax.block_until_ready(metrics.loss)
    score, size = program.eval_step_for(program.static_at(0)), rules.data.val_tokens
    vals = (evaluate(program, score, state, opened.val[0], size, start=start) for start in (0, size))
    return [np.array(val.sequences) for val in vals]


def final_loss(program: Program, data: Path, rules: track.Track = TRACK, *, shift: int = 1) -> float:
    return float(final_losses(program, data, rules, shift=shift)[0].mean())


def on_node(recipe: Recipe = SMOKE) -> Program:
    return Program(recipe, mesh.make_mesh(8))


def without_attention(recipe: Recipe) -> Recipe:
    config = dataclasses.replace(recipe.config, attention_kinds=("none",) * recipe.config.num_layers)
    return dataclasses.replace(recipe, config=config)


def blind(recipe: Recipe) -> Recipe:
    """The recipe, of which no prediction knows the word before the last; but it can copy the line before."""

    def forward(p: Params, tokens_BT: jax.Array, inputs: Any, cfg: Any, kernels: Any) -> jax.Array:
        return recipe.forward(p, tokens_BT, inputs, cfg, Blind(kernels))  # pyright: ignore[reportArgumentType]

    return dataclasses.replace(recipe, forward=forward)


def local_gradients() -> Program:
    program = on_node()
    own = LocalGradients(SMOKE, program.mesh, program.microbatches, program.kernels, program.constants.arrays)
    vars(program)["step"] = own
    return program


@pytest.mark.parametrize("seed", range(5))
def test_the_right_program_reaches_the_target(smoke_data, tmp_path, seed):
    where = ["--data", str(smoke_data), "--out", str(tmp_path / "out"), "--seed", str(seed)]
    done = speedrun("run", "--track", TRACK.name, *where)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("make", "shift"),
    [
        (lambda: on_node(without_attention(SMOKE)), 1),
        (lambda: on_node(blind(SMOKE)), 1),
        (on_node, 0),
        (on_node, 2),
        (local_gradients, 1),
    ],
    ids=[
        "no attention",
        "only the last word and copies",
        "shifted by 0",
        "shifted by 2",
        "own gradients only",
    ],
)
def test_a_wrong_program_does_not(smoke_data, request, make, shift):
    loss = final_loss(make(), smoke_data, shift=shift)
    print(f"{request.node.callspec.id}: {loss:.4f}")
    assert loss > TRACK.target.loss + (0 if "copies" in request.node.callspec.id else 0.15)


@pytest.mark.parametrize(("copied", "beyond"), [(0, False), (8, True)])
def test_who_trains_on_scored_text_loses_more_on_other_text(smoke_data, copied, beyond):
    scored, held = final_losses(on_node(), smoke_data, copied=copied)
    gap, error = held.mean() - scored.mean(), (sum(x.var(ddof=1) / len(x) for x in (scored, held))) ** 0.5
    print(f"{copied} of 8 sequences: {gap:.4f}, {gap / error:.1f} standard errors")
    assert (gap > 6 * error) == beyond
    assert beyond or abs(gap) < 3 * error


@pytest.fixture(scope="module")
def docs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    generated.make(DOCS_TRACK, folder)
    return folder


@pytest.mark.parametrize(
    ("recipe", "shift", "arrives"),
    [(DOCS, 1, True), (without_attention(DOCS), 1, False), (DOCS, 0, False), (DOCS, 2, False)],
    ids=["right", "no attention", "targets shifted by 0", "targets shifted by 2"],
)
def test_on_the_documentation_only_the_right_program_arrives(docs, request, recipe, shift, arrives):
    loss = final_loss(Program(recipe, mesh.make_mesh(1)), docs, DOCS_TRACK, shift=shift)
    print(f"{request.node.callspec.id}: {loss:.4f}")
    assert (loss <= DOCS_TRACK.target.loss) == arrives
