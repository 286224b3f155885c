"""The contract of a recipe: a toy that uses all of it, and recipes that break it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from small_run import events, runs_of
from test_checkpoint import went_on
from test_referee import examination

from speedrun import recipes
from speedrun.base import recipe_files, runlog
from speedrun.base.errors import UsageError
from speedrun.base.recipe_files import resolve
from speedrun.base.sourcefile import RECIPES_VARIABLE
from speedrun.record.examination import Stretch
from speedrun.record.examine.examiner import examine
from speedrun.record.reader import load
from speedrun.record.summary import assemble
from speedrun.record.validate import validate
from speedrun.science.recipe import Recipe
from speedrun.train.preflight import prepare
from speedrun.train.recorded import train
from speedrun.train.run_config import RunConfig

FILE = Path(__file__).parents[1] / "toy89" / "toy89.py"


@pytest.fixture(scope="module")
def toy() -> Iterator[Recipe]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RECIPES_VARIABLE, "")
        yield recipes.load(resolve(str(FILE)))
    recipe_files.forget(["speedrun.recipes.toy89"])


@pytest.fixture(scope="module")
def finished(toy: Recipe, smoke_data, tmp_path_factory) -> RunConfig:
    out = tmp_path_factory.mktemp("toy") / "record"
    config = RunConfig("smoke-cpu", out, recipe=toy.name, data=smoke_data, checkpoint_every=5)
    train(config)
    return config


@pytest.mark.compile
def test_a_run_is_a_record_and_goes_on_to_the_same_bytes(toy, finished, tmp_path):
    losses = [step.loss for step in events(finished.out, runlog.Step)]
    assert losses[-1] < losses[0] - 0.3
    *_, last = events(finished.out, runlog.Val)
    assert (last.step, last.tokens) == (toy.num_steps, 131072)
    assemble(finished.out, title="toy89")
    report = validate(finished.out)
    assert report.exit_code == 0, [result.messages for result in report.having("failed")]
    (old,) = runs_of(finished.out)
    _, new = went_on(finished, tmp_path, 5)
    assert new.end.final_hash == old.end.final_hash


@pytest.mark.compile
def test_the_referee_trains_it_again_with_its_constants(toy, finished, tmp_path):
    both = Stretch(0, 3, from_checkpoint=False), Stretch(5, 9, from_checkpoint=True)
    found = examine(examination(finished, tmp_path, num_steps=toy.num_steps, stretches=both))
    losses = tuple(step.loss for step in events(finished.out, runlog.Step))
    assert [stretch.losses for stretch in found.stretches] == [losses[:3], losses[5:]]
    (run,) = load(finished.out).runs
    assert (found.final_hash, found.leak) == (run.end.final_hash, 0.0)
    assert found.val_loss == pytest.approx(run.val_loss, abs=1e-5)


def returning(result: str) -> str:
    """Change the result of the toy's optimiser to this expression of `moves` and `state`."""
    return (
        "import jax\n"
        "from dataclasses import fields\n"
        "class Changed(toy89.NorMuonAndAdam):\n"
        "    def transform(self, layout):\n"
        "        inner = super().transform(layout)\n"
        "        def update(*given, **more):\n"
        "            moves, state = inner.update(*given, **more)\n"
        f"            return {result}\n"
        "        return inner._replace(update=update)\n"
        "OLD = toy89.RECIPE.optimizer\n"
        "CHANGES = {'optimizer': Changed(**{f.name: getattr(OLD, f.name) for f in fields(OLD)})}"
    )


#: Changes of the toy with one mistake, and what the error must say.
MISTAKES = {
    "objective": (
        "def loss(*given):\n"
        "    found = toy89.loss(*given)\n"
        "    return found._replace(objective=found.objective.astype('bfloat16'))\n"
        "CHANGES = {'loss': loss}",
        r"its loss returns: objective is bfloat16\[\], need float32\[\]",
    ),
    "loss": (
        "def loss(*given): return tuple(toy89.loss(*given))\nCHANGES = {'loss': loss}",
        "its loss returns a tuple; need a Loss",
    ),
    "forward_rank": (
        "def forward(*given): return toy89.forward(*given)[0]\nCHANGES = {'forward': forward}",
        r"its forward returns float32\[64, 16\] for int32\[1, 64\]; need hidden states \[1, 64, D\]",
    ),
    "state_dtype": (
        returning("moves, jax.tree.map(lambda x: x.astype('float32'), state)"),
        r"its optimizer's update returns the state: \S+num_updates is float32\[\], need int32\[\]",
    ),
    "state_containers": (
        returning("moves, [*state]"),
        "its optimizer's update returns the state: the arrays of init in other containers",
    ),
    "update_shape": (
        returning("moves | {'embed': moves['embed'][:1]}, state"),
        r"its optimizer updates: embed is \[1, 16\], need \[32, 16\]",
    ),
    "python_input": (
        "class Counting(toy89.Schedule):\n"
        "    def at(self, *at): return super().at(*at) | {'count': at[0]}\n"
        "CHANGES = {'schedule': Counting(), 'stages': (replace(toy89.RECIPE.stages[1], num_steps=32),)}",
        "its schedule gives 'count' as 33 Python values, .* need at most 32; give a NumPy value",
    ),
    "arguments": (
        "def logits(params, x_ND, config): return x_ND\nCHANGES = {'logits': logits}",
        r"its logits: too many positional arguments; need logits\(params, x_ND, inputs, config\)",
    ),
    "logits": (
        "def logits(*given): return toy89.logits(*given)[:, :-1]\nCHANGES = {'logits': logits}",
        "its logits are .64, 255. for 64 hidden states; config.vocab_size needs 256 columns",
    ),
    "schedule": (
        "class Short(toy89.Schedule):\n"
        "    def at(self, *at): return {k: v for k, v in super().at(*at).items() if k != 'momentum'}\n"
        "CHANGES = {'schedule': Short()}",
        "give no input 'momentum'; they give",
    ),
    "window": (
        "class Closing(toy89.Schedule):\n"
        "    def at(self, *at): return super().at(*at) | {'window_blocks': np.int32(at[1] - at[0])}\n"
        "CHANGES = {'schedule': Closing()}",
        "its schedule gives a window 'window_blocks' of 0 blocks; need at least 1",
    ),
    "float": (
        "class Falling(toy89.Schedule):\n"
        "    def at(self, *at): return super().at(*at) | {'lr_scale': 1 - at[0] / at[1]}\n"
        "CHANGES = {'schedule': Falling()}",
        "gives 'lr_scale' as 1.0; need a bool, int or str",
    ),
    "both": (
        "def constants(*given): return toy89.constants(*given) | {'tied': np.ones(1, bool)}\n"
        "CHANGES = {'constants': constants}",
        "its schedule and its constants give 'tied'; rename one of them",
    ),
    "large": (
        "def constants(*_): return {'signs': np.ones((2**25 + 1,), np.int8)}\n"
        "CHANGES = {'constants': constants}",
        "its constants have 33,554,433 bytes; need 33,554,432 or less",
    ),
    "vocabulary_key": (
        "def constants(cfg, vocabulary): return {'prefix': {b'a': 0}[b'b']}\n"
        "CHANGES = {'constants': constants}",
        "its constants raise KeyError.b'b'.; need some for any vocabulary",
    ),
    "carry_shape": (
        "def carry(cfg): return {'amax': np.ones(2, np.float32)}\n"
        "def loss(p, batch, *given):\n"
        "    one = batch._replace(carry={'amax': batch.carry['amax'][:, 0]})\n"
        "    return toy89.loss(p, one, *given)\n"
        "CHANGES = {'carry': carry, 'loss': loss}",
        "its loss returns",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_a_recipe_is_refused_before_it_is_compiled(
    toy, smoke_data, tmp_path, mistake, monkeypatch
):
    source, said = MISTAKES[mistake]
    monkeypatch.setenv(RECIPES_VARIABLE, str(FILE.parent))
    imports = "from dataclasses import replace\nimport numpy as np\n"
    imports += "from speedrun.recipes import toy89\n"
    recipe = f"RECIPE = replace(toy89.RECIPE, name='bad_{mistake}', **CHANGES)\n"
    file = tmp_path / f"bad_{mistake}.py"
    file.write_text(f"{imports}{source}\n{recipe}")
    with pytest.raises(UsageError, match=f"^recipe bad_{mistake}: .*{said}") as info:
        prepare(RunConfig("smoke-cpu", tmp_path / "out", recipe=resolve(str(file)), data=smoke_data))
    assert "\n" not in str(info.value)
