"""Recipes that show one thing and run another: each is refused."""

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest

from speedrun.ground import mesh, track
from speedrun.ground.errors import UsageError
from speedrun.ledger import code
from speedrun.science import recipes
from speedrun.science.inputs import MOST_NUMBERS, Plan
from speedrun.science.models import record21
from speedrun.science.recipe import Recipe, describe
from speedrun.training import fixed
from speedrun.training.program import Program

SMOKE, TRACK = recipes.load("smoke"), track.load("optim-steps-cpu")


class Number(int):
    """Shows one number and computes with another."""

    def __floordiv__(self, other: int) -> int:
        return 100 // other


class Text(str):
    """Shows one text and is found under another."""

    __slots__ = ()


def test_what_wraps_a_function_is_not_described_as_the_function() -> None:
    """A rule for gradients may return any loss, and `custom_vjp` takes the name of what it wraps."""
    disguised: Any = jax.custom_vjp(record21.loss)
    found = describe(replace(SMOKE, loss=disguised))["loss"]
    assert found != describe(SMOKE)["loss"] == "speedrun.science.models.record21.loss"


@pytest.mark.parametrize("value", [Number(256), Text("float32"), np.float64(1), np.int64(8), {"a": 1}, [1]])
def test_a_setting_that_json_would_not_show_as_it_is_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=f"type {type(value).__name__}"):
        describe(dataclasses.replace(SMOKE.config, document_token=value))


def test_names_of_functions_and_classes_cannot_be_set() -> None:
    text = """class Disguised:
    def __init__(self):
        self.__module__ = "speedrun.science.models.record21"
        self.__qualname__ = "forward"
        self.mine = 1
"""
    assert [reach.line for reach in code.read("speedrun/science/recipes/x.py", text).reaches] == [3, 4]


def test_a_recipe_has_no_properties_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disguised(Recipe):
        forward = property(lambda self: None)  # pyright: ignore[reportAssignmentType]

    module = recipes.importlib.import_module("speedrun.science.recipes.smoke")
    monkeypatch.setattr(module, "RECIPE", object.__new__(Disguised))
    with pytest.raises(UsageError, match="need one, a Recipe"):
        recipes.load("smoke")


def test_inputs_are_plain_copies() -> None:
    array, row = np.zeros(2, np.float32), {"a": Number(2), "b": True, "c": "x"}
    row["d"] = array
    plan = Plan.of(lambda step: row, 1, {})
    array[0], row["a"] = 5, 3
    kinds = {name: type(value) for name, value in plan.rows[0].items()}
    assert kinds == {"a": int, "b": bool, "c": str, "d": np.ndarray}
    assert (plan.rows[0]["a"], plan.rows[0]["d"].any()) == (2, False)
    with pytest.raises(TypeError):
        plan.at(0, plan.schedule, ()).spans["a"] = (1, 1)  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize(
    "value",
    [1.0, None, [1], jax.numpy.float32(1), np.array([None]), np.str_("x"), np.zeros(MOST_NUMBERS + 1)],
)
def test_an_input_of_no_use_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="its schedule gives 'a' as") as caught:
        Plan.of(lambda step: {"a": value}, 1, {})
    assert "\n" not in str(caught.value)


def test_an_optimiser_cannot_change_the_layout_of_the_model() -> None:
    @dataclass(frozen=True)
    class Meddling:
        inner: Any

        def transform(self, layout: Any) -> Any:
            layout.table["embed"] = replace(layout.table["embed"], shape=(8, 8))
            layout.banks.clear()
            return self.inner.transform(type(layout)(SMOKE.table(SMOKE.config)))

    meddled = replace(SMOKE, optimizer=Meddling(SMOKE.optimizer))
    step = Program(meddled, mesh.make_mesh(1, 1)).step
    assert step.transform
    assert step.layout.table["embed"].shape == (256, 128)
    assert step.layout.banks


def test_inputs_of_the_last_validation_are_fixed() -> None:
    """They are in no log."""
    recipe = SMOKE.override({"stages.0.num_steps": 4})
    rows = [*Plan.of(recipe.inputs_at, 4, {}).rows]
    fixed.check(recipe, rows, TRACK)
    rows[4] = rows[4] | {"window_blocks": np.array(4, np.int32)}
    with pytest.raises(UsageError, match="changes window_blocks"):
        fixed.check(recipe, rows, TRACK)
