"""A recipe whose scored logits are masked: what it gives, and what its record carries."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedrun.base import mesh as meshes
from speedrun.base import track
from speedrun.base.bpe_pairs import IMPOSSIBLE_PAIRS, impossible_pairs
from speedrun.base.errors import UsageError
from speedrun.record import archive
from speedrun.record.examine.stablehlo import Programs
from speedrun.record.reader import read_programs
from speedrun.science import masks
from speedrun.science.recipe import Recipe
from speedrun.train.export_programs import exported
from speedrun.train.program import Program

#: Bytes, then merges; "the" is never "th", "e".
WORDS = (b"", *(bytes([i]) for i in b" abcdefghijklmnopqrstuvwxyz"), b"th", b"the", b" the", b"in", b"ing")


@pytest.fixture(scope="module")
def recipe(tiny: Recipe) -> Recipe:
    """The tiny recipe, whose logits are masked."""

    def forward(params: Any, tokens_BT: Any, *rest: Any) -> jax.Array:
        return masks.with_ids(tiny.forward(params, tokens_BT, *rest), tokens_BT)

    def logits(params: Any, x_NE: jax.Array, inputs: Any, config: Any) -> jax.Array:
        x_ND, ids_N = masks.split_ids(x_NE)
        return masks.possible(tiny.logits(params, x_ND, inputs, config), ids_N, inputs, "never")

    def loss(params: Any, batch: Any, inputs: Any, config: Any, kernels: Any, forward: Any) -> Any:
        def plain(*args: Any) -> jax.Array:
            return forward(*args)[..., :-2]

        return tiny.loss(params, batch, inputs, config, kernels, plain)

    return replace(
        tiny, forward=forward, logits=logits, loss=loss, constants=lambda *_: {"never": IMPOSSIBLE_PAIRS}
    )


@pytest.fixture(scope="module")
def program(recipe) -> Program:
    padding = (b"",) * (recipe.config.vocab_size - len(WORDS))
    return Program(recipe, meshes.make_mesh(1), vocabulary=WORDS + padding)


def test_ids_travel_beside_hidden_states():
    ids = jnp.array([[0, 255, 256, 50_256]])
    x = jnp.ones((1, 4, 3), jnp.bfloat16)
    got = masks.split_ids(masks.with_ids(x, ids)[0])
    np.testing.assert_array_equal(got[0], x[0])
    np.testing.assert_array_equal(got[1], ids[0])


def test_a_record_carries_the_name_of_the_mask_and_the_examiner_derives_it(program, recipe):
    ready: Any = SimpleNamespace(recipe=recipe, program=program, track=track.load("smoke-cpu"))
    raw = archive.pack(exported(ready))
    found = read_programs(raw)
    assert found.derived == ("never",)
    given = Programs(found, meshes.make_mesh(1), program.vocabulary)
    params = program.init(jax.random.key(0)).params
    name = given.scorer("logits", recipe.num_steps)
    ids_N = np.arange(given.shape(name)[0]) % recipe.config.vocab_size
    dim = given.shape(name)[1] - 2
    x_NE = masks.with_ids(jnp.ones((1, len(ids_N), dim), recipe.compute_dtype), jnp.asarray(ids_N)[None])[0]
    (logits_NV,) = given.compiled(name)(*jax.tree.leaves(params), *given.constants, np.int32(0), x_NE)
    pairs = impossible_pairs(program.vocabulary or ())
    bits = np.unpackbits(pairs.bits, axis=1, bitorder="little")
    want_NV = bits[pairs.row_of][:, pairs.column_of][ids_N] == 1
    assert want_NV[WORDS.index(b"th"), WORDS.index(b"e")]
    masked_NV = np.isneginf(logits_NV)
    np.testing.assert_array_equal(masked_NV[:, : recipe.config.vocab_size], want_NV)
    assert not masked_NV[:, recipe.config.vocab_size :].any()


def test_a_track_without_a_tokenizer_has_no_mask(recipe):
    with pytest.raises(UsageError, match="impossible pairs need the bytes of ids; choose a track"):
        Program(recipe, meshes.make_mesh(1), vocabulary=()).constants.arrays()


def test_an_unknown_derivation_is_refused(recipe):
    with pytest.raises(UsageError, match="its constants give 'x' as str; need NumPy's"):
        Program(
            replace(recipe, constants=lambda *_: {"x": "a table of text"}), meshes.make_mesh(1)
        ).constants.arrays()
