"""The optimiser tracks: what they fix is that of their recipe, as values and as text; a run that differs is refused."""

import dataclasses
import importlib
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
from test_recipes import at_laptop_size

from speedrun import recipes
from speedrun.base import mesh, provenance, track
from speedrun.base.errors import UsageError
from speedrun.record.checks.v5_source import FREE, FREE_FOLDERS, leaves
from speedrun.record.source import is_science, read, split_source
from speedrun.science.inputs import InputPlan, Inputs
from speedrun.science.recipe import Batch, Recipe, describe
from speedrun.train import recipe_checks
from speedrun.train.preflight import prepare
from speedrun.train.program import Program
from speedrun.train.run_config import RunConfig

ROOT = Path(__file__).parents[2]
FIXING = [name for name in track.files() if track.load(name).fixed is not None]
#: Of the recipe when the version of the track was made. Another revision is another recipe: make a new version.
REVISIONS = {"optim-steps@2": 1, "optim-steps-cpu@2": 2}
CPU = track.load("optim-steps-cpu")
SMOKE = recipes.load("smoke")


def check(recipe: Recipe, rules: track.Track) -> None:
    recipe_checks.check_fixed(recipe, InputPlan.of(recipe.inputs_at, recipe.num_steps, {}).rows, rules)


@pytest.mark.parametrize("name", FIXING)
def test_a_track_fixes_all_of_its_recipe_but_what_is_free(name):
    rules = track.load(name)
    recipe = recipes.load(rules.recipe)
    described = msgspec.json.decode(msgspec.json.encode(describe(recipe)))
    assert rules.fixed is not None
    assert leaves(rules.fixed.recipe) == leaves({k: v for k, v in described.items() if k not in FREE})
    assert REVISIONS[rules.id] == recipe.revision
    for num_steps in (recipe.num_steps, 27):
        for step in range(num_steps + 1):
            inputs = recipe.schedule.at(step, num_steps)
            for given, most in rules.fixed.inputs.items():
                assert inputs[given] == max(1, np.ceil(most * (step / num_steps)))
    check(recipe, rules)


class Asked(dict):
    def __init__(self, values: dict) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def __getitem__(self, name: str):
        self.names.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("name", FIXING)
def test_a_track_fixes_every_input_that_its_model_reads(name):
    rules = track.load(name)
    program = Program(at_laptop_size(rules.recipe), mesh.make_mesh(1))
    recipe, asked = program.recipe, Asked(program.recipe.inputs_at(0))
    inputs = Inputs(asked, dict.fromkeys(asked, (1, 4)))
    params = jax.eval_shape(lambda key: program.layout.unpack(program.layout.init(key)), jax.random.key(0))
    ids = jax.ShapeDtypeStruct((1, 64), np.int32)

    def loss(params, ids):
        batch = Batch(ids, ids, {}, ids[:, 0])
        return recipe.loss(params, batch, inputs, recipe.config, program.kernels, recipe.forward)

    jax.eval_shape(loss, params, ids)
    assert rules.fixed is not None
    assert asked.names == {*rules.fixed.inputs}


class Late:
    """A schedule whose windows grow later, or are of another kind."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def at(self, step: int, num_steps: int) -> dict:
        given = SMOKE.schedule.at(step, num_steps)
        late = SMOKE.schedule.at(max(0, step - (self.kind is np.int32)), num_steps)
        return given | {"window_blocks": self.kind(late["window_blocks"])}


def pretended(*_) -> None:
    """It is named like the track's."""


pretended.__module__, pretended.__qualname__ = SMOKE.forward.__module__, SMOKE.forward.__qualname__
STAGE = SMOKE.stages[0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"forward": pretended}, "forward"),
        ({"loss": pretended, "table": pretended}, "loss, table"),
        ({"config": dataclasses.replace(SMOKE.config, logit_cap=14.0)}, "config"),
        ({"carry": lambda _: {}}, "carry"),
        ({"stages": (dataclasses.replace(STAGE, seq_len=512),)}, "stages"),
        ({"schedule": Late(np.int32)}, "window_blocks"),
        ({"schedule": Late(int)}, "window_blocks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # an address would differ between processes
)
def test_a_recipe_that_changes_what_is_fixed_is_refused(changes, named):
    assert describe(pretended) == describe(SMOKE.forward)
    recipe = dataclasses.replace(SMOKE, name="mine", **changes)
    with pytest.raises(UsageError) as caught:
        check(recipe, CPU)
    free = "change only optimizer, schedule and numbers of steps, or choose another track"
    assert str(caught.value) == f"recipe mine changes {named}, which optim-steps-cpu@2 fixes; {free}"
    check(recipe, track.load("smoke-cpu"))


def test_optimizer_schedule_and_number_of_steps_are_free():
    slower = dataclasses.replace(SMOKE.schedule, momentum_end=0.9, cooldown_fraction=0.7)
    changed = {"optimizer.muon_lr": 0.03, "stages.0.num_steps": 33, "optimizer.muon_steps": 3}
    check(dataclasses.replace(SMOKE.override(changed), name="mine", schedule=slower), CPU)


def test_a_run_is_refused_before_its_folder_is_made(tmp_path):
    with pytest.raises(UsageError, match="recipe smoke changes config, which optim-steps-cpu@2 fixes"):
        prepare(RunConfig("optim-steps-cpu", tmp_path / "out", overrides={"config.mlp_dim": "512"}))
    assert not (tmp_path / "out").exists()


def test_fixed_science_imports_nothing_that_is_free():
    free = tuple(folder.rstrip("/").replace("/", ".") for folder in FREE_FOLDERS)
    names = [str(path.relative_to(ROOT)) for path in ROOT.glob("speedrun/science/**/*.py")]
    fixed = [name for name in names if is_science(name) and not name.startswith(FREE_FOLDERS)]
    assert len(fixed) > 10
    for name in fixed:
        for one in read((ROOT / name).read_text()).imports:
            assert not f"{one.module}.{one.name}".startswith(free), f"{name} imports {one.module}"


#: Tables that a recipe could change, for nothing: of packing, of flags that V401 reads, of an empty carry, and of rules
#: that change what the track fixes.
HARMLESS = {"PACKINGS", "COMPILER_OPTIONS", "NOTHING", "SIZES", "SIZED", "FEATURES"}


@pytest.mark.parametrize("name", FIXING)
def test_the_fixed_model_has_no_table_that_a_recipe_could_change(name):
    """As by `table = MIXERS; table["long"] = mine`."""
    source = split_source(provenance.closure([f"speedrun.recipes.{track.load(name).recipe}"], []))
    for path in source:
        if path.startswith("speedrun/science/") and not path.startswith(FREE_FOLDERS):
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for table, value in vars(importlib.import_module(name)).items():
                fixed = not isinstance(value, dict | list | set) or table.startswith("__")
                assert fixed or table in HARMLESS, (
                    f"{path}: {table} should be a MappingProxyType, a tuple or a frozenset"
                )
