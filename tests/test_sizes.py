"""Sizes: siblings of a full-size recipe follow from the stated rules, build, and train."""

import itertools

import jax
import numpy as np
import pytest

from speedrun import recipes
from speedrun.api import settings_of
from speedrun.base import mesh
from speedrun.base.errors import UsageError
from speedrun.science.params import count
from speedrun.science.recipe import SIZES, Recipe, settings, settings_at
from speedrun.train.program import Program

RECORD21 = recipes.load("record21")
AT = {name: RECORD21.override({"size": name}) for name in SIZES}

#: A model with a number of layers, and learned positions.
GPT2 = settings(recipes.load("gpt2"))
FULL_SIZE = [name for name in recipes.names() if recipes.load(name).config.model_dim == 768]


@pytest.mark.parametrize("name", FULL_SIZE)
def test_small_is_the_recipe_itself_and_each_size_larger_than_the_one_before(name: str) -> None:
    assert recipes.load(name).override({"size": "small"}) == recipes.load(name)
    siblings = [recipes.load(name).override({"size": size}) for size in SIZES]
    numbers = [(count(one.table(one.config)), one.config.num_layers, one.total_tokens) for one in siblings]
    for smaller, larger in itertools.pairwise(numbers):
        assert smaller[0] < larger[0]
        assert smaller[1] <= larger[1]
        assert smaller[2] < larger[2]


@pytest.mark.parametrize("name", SIZES)
def test_layers_keep_both_ends_and_their_mirrors(name: str) -> None:
    places = settings_at(name, settings(RECORD21) | {"config.depth": tuple(range(12))}, {})["config.depth"]
    assert places == tuple(sorted(places))
    assert (places[0], places[-1]) == (0, 11)
    assert [11 - place for place in reversed(places)] == list(places)
    assert AT[name].config.mixing == tuple(RECORD21.config.mixing[place] for place in places)


_LARGE = [name for name in SIZES if name not in ("smoke", "nano")]


@pytest.mark.parametrize(
    "name", ["smoke", "nano", *(pytest.param(name, marks=pytest.mark.compile) for name in _LARGE)]
)
def test_each_size_is_a_program_on_eight_devices(name: str) -> None:
    recipe = AT[name]
    program, stage = Program(recipe, mesh.make_mesh(8)), recipe.stages[0]
    state = jax.eval_shape(program.init, jax.random.key(0))
    ids = [jax.ShapeDtypeStruct((stage.num_sequences, stage.seq_len), np.int32)] * 2
    static = program.shape_at(0).static
    after, _ = jax.eval_shape(program.train_step_for(static), state, *ids, program.schedule)
    got, want = (jax.tree.map(lambda x: (x.shape, x.dtype), one) for one in (after, state))
    assert got == want


def test_other_settings_change_the_sibling() -> None:
    one = RECORD21.override({"stages.0.num_steps": "20", "size": "nano", "config.num_heads": 2})
    assert (one.num_steps, one.config.num_heads, one.config.model_dim) == (20, 2, 256)


def test_settings_that_depend_on_each_other_change_together() -> None:
    two_layers = {"config.mixing": "('long', 'long')", "config.value_tables": "(0, 0)"}
    one = recipes.load("smoke").override(two_layers)
    assert one.config.num_layers == 2
    with pytest.raises(UsageError, match=r"setting config\.mixing=\('long',\).*: value_tables has 4 entries"):
        recipes.load("smoke").override({"config.mixing": "('long',)"})


@pytest.mark.parametrize("name", SIZES)
def test_a_library_user_can_run_it(name: str) -> None:
    """A run gets settings, not a recipe."""
    assert RECORD21.override(settings_of(AT[name])) == AT[name]


@pytest.mark.parametrize(("recipe", "size"), [(RECORD21, "tiny"), (recipes.load("smoke"), "nano")])
def test_a_size_that_cannot_be_is_refused(recipe: Recipe, size: str) -> None:
    with pytest.raises(UsageError, match=size):
        recipe.override({"size": size})


def test_a_width_of_another_name_is_refused_unless_it_is_given() -> None:
    wide = GPT2 | {"config.expert_dim": 1536}
    with pytest.raises(UsageError, match=r"config\.expert_dim"):
        settings_at("nano", wide, {})
    assert settings_at("nano", wide, {"config.expert_dim": 1}) == settings_at("nano", GPT2, {})
