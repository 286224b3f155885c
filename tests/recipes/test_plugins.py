"""Recipes outside the package: those of the docs, and files that are refused."""

import dataclasses
import os
import py_compile
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from small_run import SMALL
from test_recipes import train_trace

import speedrun as sr
from speedrun import recipes
from speedrun.api import settings_of
from speedrun.base import mesh, provenance, recipe_files, track
from speedrun.base.errors import DataError, UsageError
from speedrun.base.recipe_files import resolve
from speedrun.base.sourcefile import RECIPES, RECIPES_VARIABLE
from speedrun.data import prepare, shards, tokenizer
from speedrun.data.documents import open_source
from speedrun.record.source import split_source
from speedrun.science.inputs import InputPlan
from speedrun.science.recipe import Stage
from speedrun.train import recipe_checks
from speedrun.train.batch import run_batch
from speedrun.train.program import Program

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("recipes.md", "optimiser-track.md", "tutorial.md", "forks.md")
TEXT = "".join((DOCS / name).read_text() for name in PAGES)
FILES = dict(re.findall(r"^`(\w+\.\w+)`:\n\n```\w+\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
EXAMPLES = {name: text for name, text in FILES.items() if name.endswith(".py")}


@pytest.fixture(autouse=True)
def _no_other_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(RECIPES_VARIABLE, "")
    yield
    package = "speedrun.recipes."
    recipe_files.forget([name for name in sys.modules if name.removeprefix(package) + ".py" in EXAMPLES])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "my recipes"
    made.mkdir()
    for name, text in EXAMPLES.items():
        (made / name).write_text(text)
    return made


ENTRIES = ("polar", "shampoo")  #: of the optimiser track
OTHERS = ("grouped", "swiglu", "adamw", "chars", "moe", "soap", "lion", "sqrt")
_NIGHTLY = [pytest.param(name, marks=pytest.mark.compile) for name in (*OTHERS, *ENTRIES)]


@pytest.mark.parametrize("name", ["gelu", *_NIGHTLY])
def test_an_example_trains_alike_on_one_device_and_eight(name, folder):
    recipe = recipes.load(resolve(str(folder / f"{name}.py")))
    two_layers = {"config.attention_kinds": "('long', 'short')", "config.value_tables": "(0, -1)"}
    stages = (Stage(num_steps=3, num_sequences=8, seq_len=64),)
    small = dataclasses.replace(recipe.override(two_layers), stages=stages)
    one, eight = (train_trace(Program(small, mesh.make_mesh(n)), 3)[1] for n in (1, 8))
    np.testing.assert_allclose(one, eight, rtol=1e-4)
    assert one[-1] < one[0] - 0.1


@pytest.mark.parametrize("name", ["bigram", "glance"])
def test_the_first_steps_of_the_tutorial_learn(name, folder):
    recipe = recipes.load(resolve(str(folder / f"{name}.py")))
    small = dataclasses.replace(recipe, stages=(Stage(num_steps=30, num_sequences=8, seq_len=64),))
    losses = train_trace(Program(small, mesh.make_mesh(1)), 30)[1]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("name", [*ENTRIES, "soap", "lion", "sqrt"])
def test_an_entry_takes_part_in_the_optimiser_track(name, folder):
    recipe = sr.load(str(folder / f"{name}.py"))
    plan = InputPlan.of(recipe.inputs_at, recipe.num_steps, {})
    recipe_checks.check_fixed(recipe, plan.rows, track.load("optim-steps-cpu"))


def test_shards_of_bytes_are_those_of_the_track_and_the_recipe_of_characters(folder, tmp_path, monkeypatch):
    (tmp_path / "chars.toml").write_text(FILES["chars.toml"])
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)
    rules, config = track.load("chars"), sr.load(str(folder / "chars.py")).config
    assert (config.vocab_size, config.document_token) == (rules.data.vocab_size, rules.data.document_token)
    (tmp_path / "book.txt").write_text("Was it a cat I saw? " * 16_000)
    choice, cut = tokenizer.load("bytes"), prepare.Cut("chars", shard_tokens=200_000)
    prepare.prepare(open_source([str(tmp_path / "book.txt")]), choice, cut, tmp_path / "shards")
    found = shards.open_track(tmp_path / "shards", rules.data)
    assert bytes(found.val[0].read(0, 21)[1:].astype(np.uint8)) == b"Was it a cat I saw? "


@pytest.mark.compile
def test_a_run_of_one_is_a_record_that_carries_it(folder, tmp_path, smoke_data):
    recipe = sr.load(str(folder / "gelu.py")).override(SMALL)
    record = sr.run(recipe, track="smoke-cpu", out=tmp_path / "record", data=smoke_data, quiet=True)
    report = record.validate()
    assert report.exit_code == 0, [r.messages for r in report.having("failed")]
    assert [r.check.id for r in report.having("warning") if r.check.id.startswith("V5")] == []
    source = split_source((record.folder / "source.txt").read_text())
    for name in ("gelu.py", "gelu_model.py"):
        assert source[f"{RECIPES}/{name}"] == EXAMPLES[name]
    assert f"{RECIPES}/swiglu.py" not in source


def test_edited_files_are_read_anew_and_what_was_loaded_stays(folder):
    path = folder / "adamw.py"
    before, other = sr.load(str(path)), sr.load(str(folder / "gelu.py"))
    assert [settings_of(recipe) for recipe in (before, other)] == [{}, {}]
    path.write_text(EXAMPLES["adamw.py"].replace("matrix_lr=0.003", "matrix_lr=0.5"))
    assert (before.optimizer.matrix_lr, sr.load(str(path)).optimizer.matrix_lr) == (0.003, 0.5)
    (folder / "gelu_model.py").write_text(EXAMPLES["gelu_model.py"] + "EDITED = True\n")
    assert "EDITED" in type(sr.load(str(folder / "gelu.py")).config).mlp.__globals__


def test_processes_that_are_started_find_it_by_its_name(folder):
    assert resolve(str(folder / "swiglu.py")) == "swiglu"
    script = "from speedrun import recipes; print(recipes.load('swiglu').name)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "swiglu\n"


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


#: What a name may stand for besides a file that ends.
ENDLESS = [
    ("not a regular file", os.mkfifo),
    ("not a regular file", lambda path: path.symlink_to("/dev/zero")),
    ("Is a directory", Path.mkdir),
    ("1,099,511,627,776 bytes, more than", _huge),
    ("Too many levels of symbolic links", lambda path: path.symlink_to(path)),
]


@pytest.mark.parametrize(("said", "make"), ENDLESS)
def test_what_never_ends_is_refused_wherever_it_is_named(said, make, tmp_path):
    path = tmp_path / "mine.py"
    make(path)
    for read in (resolve, lambda name: tokenizer.load(f"{name}.json")):
        path.with_name("mine.py.json").unlink(missing_ok=True)
        path.with_name("mine.py.json").symlink_to(path)
        with pytest.raises((UsageError, DataError), match=re.escape(said)):
            read(str(path))
    (tmp_path / "batch.json").symlink_to(path)
    with pytest.raises(UsageError, match=r"holds no batch\.json"):
        run_batch(tmp_path, data=None, title=None, ghost=None, say=print, to_stderr=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("nothing.py", None),
        *((f"{name}.py", b"") for name in ("two-words", "r\u00e9sum\u00e9", "with:colon/mine", "a" * 200)),
        *((f"{name}.py", b"") for name in ("load", "smoke", "empty")),
        ("latin.py", b"# caf\xe9\n"),
        ("alias.py", b"from speedrun.recipes.smoke import RECIPE"),
        ("mute.py", b"RECIPE = 3"),
    ],
)
def test_a_file_that_cannot_be_a_recipe_is_refused(name, content, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=path.stem):
        recipes.load(resolve(str(path)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("gelu.py", (EXAMPLES["gelu.py"] + "from .gelu_model import Config\n").encode()),
        ("gelu_model.py", b"# coding: latin-1\n# caf\xe9\n"),
    ],
)
def test_files_that_a_record_could_not_carry_are_refused(name, content, folder):
    (folder / name).write_bytes(content)
    resolve(str(folder / "gelu.py"))
    with pytest.raises(UsageError, match=name):
        carried("gelu")


@pytest.mark.parametrize("text", ["\ufeff" + EXAMPLES["adamw.py"], EXAMPLES["adamw.py"].rstrip("\n")])
def test_a_source_has_no_byte_order_mark_and_a_last_newline(text, folder):
    (folder / "adamw.py").write_text(text)
    resolve(str(folder / "adamw.py"))
    assert carried("adamw")[f"{RECIPES}/adamw.py"] == EXAMPLES["adamw.py"]


RATE = """from dataclasses import replace
from speedrun.recipes import rates, smoke
RECIPE = replace(smoke.RECIPE, name="rated", summary="", optimizer=replace(smoke.RECIPE.optimizer, muon_lr=rates.LR))
"""


def rate(folder: Path) -> float:
    """The rate of a recipe that imports it from another file."""
    (folder / "rated.py").write_text(RATE)
    return sr.load(str(folder / "rated.py")).optimizer.muon_lr


def carried(recipe: str = "rated") -> dict[str, str]:
    """The files that a record of a recipe would carry."""
    return split_source(provenance.closure([f"speedrun.recipes.{recipe}"], []))


def test_what_runs_is_the_text_not_bytecode_beside_it_and_a_record_carries_it(tmp_path):
    """Python accepts bytecode of another text of the same size and second."""
    path = tmp_path / "rates.py"
    path.write_text("LR = 0.04\n")
    py_compile.compile(str(path))
    before = path.stat()
    path.write_text("LR = 0.06\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert rate(tmp_path) == 0.06
    path.write_text("LR = 0.08\n")
    assert carried()[f"{RECIPES}/rates.py"] == "LR = 0.06\n"


def test_of_a_module_and_a_package_of_one_name_one_is_imported_and_carried(tmp_path, monkeypatch):
    """The package would win in an unpacked source."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second / "rates", second / "smoke"):
        folder.mkdir(parents=True)
    (first / "rates.py").write_text("LR = 0.04\n")
    (second / "rates" / "__init__.py").write_text("LR = 0.06\n")
    (second / "smoke" / "__init__.py").write_text("LR = 0.06\n")
    monkeypatch.setenv(RECIPES_VARIABLE, str(second))
    assert rate(first) == 0.04
    source = carried()
    assert source[f"{RECIPES}/rates.py"] == "LR = 0.04\n"
    assert not {f"{RECIPES}/rates/__init__.py", f"{RECIPES}/smoke/__init__.py"} & source.keys()


def test_a_folder_can_be_a_recipe_and_a_record_carries_it(tmp_path):
    package = tmp_path / "rated"
    package.mkdir()
    (package / "rates.py").write_text("LR = 0.06\n")
    inside = RATE.replace("import rates, smoke", "import smoke\nfrom speedrun.recipes.rated import rates")
    (package / "__init__.py").write_text(inside)
    assert sr.load(str(package / "__init__.py")).optimizer.muon_lr == 0.06
    source = carried()
    assert {f"{RECIPES}/rated/__init__.py", f"{RECIPES}/rated/rates.py"} <= source.keys()


@pytest.mark.parametrize("helper", ["load", "Recipe", "importlib"])
def test_no_file_takes_the_place_of_what_finds_recipes(helper, tmp_path):
    (tmp_path / f"{helper}.py").write_text("LR = 0.04\n")
    (tmp_path / "rated.py").write_text(f"import speedrun.recipes.{helper}\n")
    with pytest.raises(UsageError, match=rf"{helper}\.py: this package uses the name; rename the file"):
        sr.load(str(tmp_path / "rated.py"))
    assert sr.load("smoke").name == "smoke"
