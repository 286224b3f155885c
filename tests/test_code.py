"""Reading source texts of strangers: nothing crashes, nothing runs, and the table of what files may do is exact."""

import difflib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_forge import RECIPE, forge, install_track

from speedrun.ground import provenance, track
from speedrun.ground.sourcefile import join_source
from speedrun.ledger import code
from speedrun.ledger.checks import source
from speedrun.ledger.source import split_source
from speedrun.ledger.validate import validate
from speedrun.science import recipes

MANY = 100_000
#: All of them in less than the size that is refused unread.
BOMBS = {
    "brackets": "(" * MANY,
    "closed brackets": "(" * MANY + ")" * MANY,
    "signs": "-" * MANY + "1",
    "calls": "a" + "()" * MANY,
    "comparisons": "a" + "<a" * (MANY // 4),
    "lambdas": "lambda:" * (MANY // 4) + "1",
    "branches": "if 1: pass\n" + "elif 1: pass\n" * (MANY // 8),
    "blocks": "".join(" " * depth + "if 1:\n" for depth in range(500)),
    "f-strings": "f'{" * 1_000,
    "a long number": "9" * MANY,
    "a zero byte": "x = '\0'",
    "half a character": "x = '\ud800'",
    "one line": "x = '" + "y" * 250_000 + "'",
    "a return": "return",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_read_to_its_end(bomb):
    found = code.read("x.py", BOMBS[bomb] + "\n")
    assert found.problem or not found.imports


TABLES = {
    "a long line": "a = " + "[" * MANY,
    "a key of many parts": "a." + "b." * MANY + "c = 1",
    "keys of many parts": "".join(f"{'b.' * 150}c{number} = 1\n" for number in range(100)),
    "a number too large": "a = 1e999999",
    "a long number": "a = " + "9" * 390,
}


@pytest.mark.parametrize("bomb", TABLES)
def test_a_bomb_of_a_table_is_read_to_its_end(bomb):
    found = code.read("x.toml", TABLES[bomb])
    assert found.problem or bomb in ("keys of many parts", "a number too large", "a long number")


@given(st.text(st.characters(codec="utf-8"), max_size=200))
def test_any_text_is_read(text):
    code.read("x.py", text)
    code.read("x.toml", text)


@pytest.mark.parametrize("bomb", ["closed brackets", "signs", "comparisons", "one line"])
def test_a_record_with_a_bomb_ends_in_a_report(tmp_path, monkeypatch, bomb):
    install_track(tmp_path)
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)
    forge(tmp_path / "record", edit_source=lambda files: {**files, RECIPE: BOMBS[bomb] + "\n"})
    report = validate(tmp_path / "record")
    for result in report.results:
        assert all(message.isprintable() and len(message) < 1000 for message in result.messages)


def test_nothing_of_a_source_is_executed(tmp_path, monkeypatch):
    install_track(tmp_path)
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)
    canary = tmp_path / "canary"
    text = f"@print\nclass A(open({str(canary)!r}, 'w').__class__): pass\n"
    forge(tmp_path / "record", edit_source=lambda files: {**files, RECIPE: text})
    validate(tmp_path / "record")
    assert not canary.exists()


def ours(*names: str) -> dict[str, str]:
    """Every file that the source of any of these recipes holds; of any recipe here if none is named."""
    modules = [f"speedrun.science.recipes.{name}" for name in names or recipes.names()]
    return split_source(provenance.closure([*modules, "speedrun.training.train"], []))


def science(files: dict[str, str]) -> dict[str, str]:
    return {path: text for path, text in files.items() if code.is_science(path)}


def test_our_own_science_is_on_the_list_but_for_reviewed_files():
    """What fails here and only computes belongs into speedrun/ledger/permitted.py."""
    files = {path: code.read(path, text) for path, text in science(ours()).items()}
    given = set().union(*(one.given for one in files.values()))
    left = {
        path: found
        for path, one in files.items()
        if (
            found := [
                r for r in one.reaches if r.attribute not in given and not r.name.startswith("speedrun.")
            ]
        )
    }
    assert left.keys() == source._REVIEWED.keys() & files.keys(), left


def test_our_own_files_carry_no_data():
    found = {path: code.read(path, text) for path, text in ours().items()}
    assert not [
        (path, one.problem, one.literals.large)
        for path, one in found.items()
        if one.problem or one.literals.large
    ]
    for name in recipes.names():
        own = ours(name)
        packed_bytes = sum(found[path].packed_bytes for path in own)
        science_bytes = sum(found[path].packed_bytes for path in science(own))
        assert science_bytes < 0.93 * source._MOST_SCIENCE_BYTES, f"{name}: {science_bytes}"
        assert packed_bytes < 0.99 * source._MOST_PACKED_BYTES, name
        prose = "\n".join(found[path].prose for path in own if code.is_science(path))
        assert len(zlib.compress(prose.encode(), 6)) < 0.77 * source._MOST_PROSE_BYTES, name


@pytest.mark.parametrize(
    ("path", "is_science"),
    [
        ("speedrun/science/recipes/tiny.py", True),
        ("speedrun/science/nn.py", True),
        ("speedrun/science/kernels/fast/inner.py", True),
        ("speedrun/step.py", True),
        ("speedrun/kernels/attention.py", True),
        ("speedrun/science/__init__.py", False),
        ("speedrun/science/recipes.py", False),
        ("speedrun/science/recipes/__init__.py", False),
        ("speedrun/science/recipes/weights.toml", False),
        ("speedrun/__init__.py", False),
        ("speedrun/ground/clock.py", False),
    ],
)
def test_science_is_told_by_its_place(path, is_science):
    assert code.is_science(path) == is_science


@pytest.mark.parametrize(
    "text",
    [
        "import numpy as np\nx = np.zeros(3)\n",
        "import jax.numpy as jnp\nfrom jax.experimental import pallas as pl\nx = jnp.array([1.0])\ny = pl.load\n",
        "from dataclasses import replace\nx = replace(1, a=2)\n",
        "from speedrun.science.models.record21 import forward\nfrom speedrun.science import nn\nx = nn.rms_norm\n",
        "def f(x_ref, o_ref):\n    o_ref[...] = x_ref[...]\n    o_ref.at[0].set(1)\n",
        "class A:\n    def __init__(self):\n        super().__init__()\n        self.time = 1\n",
        "class A:\n    def sum(self, x):\n        return x.sum()\n\nfrom operator import sub as sum\n",
        "import importlib.util\nhave = importlib.util.find_spec('einops') is not None\n",
        "import math\nx = [math.sqrt(i) for i in range(8)]\n",
    ],
)
def test_honest_science_reaches_for_nothing(text):
    assert not [one for one in code.read("x.py", text).reaches if not one.attribute]


PARENT = {
    "speedrun/science/models/mine.py": "import jax\n\ndef f(x):\n    y = x + 1\n    return y\n",
    "speedrun/science/nn.py": "def norm(x):\n    return x\n",
    "speedrun/training/loop.py": "a = 1\n",
    "speedrun/tracks/mine.toml": "a = 1\n",
}
MODEL, NN = (PARENT[path] for path in ("speedrun/science/models/mine.py", "speedrun/science/nn.py"))


@pytest.mark.parametrize(
    ("changes", "num_lines"),
    [
        ({}, 0),
        ({"speedrun/training/loop.py": "b = 2\n"}, 0),
        ({"speedrun/tracks/mine.toml": "b = 2\n"}, 0),
        ({"speedrun/science/nn.py": NN.replace("return x", "return 2 * x")}, 1),
        ({"speedrun/science/nn.py": f"\n\n{NN}  \n"}, 0),
        ({"speedrun/science/nn.py": f"{NN}    # why\n    # how\n"}, 2),
        ({"speedrun/science/nn.py": f"{NN}{NN}"}, 2),
        ({"speedrun/science/nn.py": ""}, 0),
        ({"speedrun/science/nn.py": MODEL, "speedrun/science/models/mine.py": NN}, 0),
        ({"speedrun/science/models/copy.py": MODEL}, 4),
    ],
)
def test_lines_of_science_that_the_parent_does_not_hold_are_counted(changes, num_lines):
    assert code.changed_lines(join_source(PARENT | changes), join_source(PARENT)) == num_lines


def test_a_record_without_a_parent_counts_all_its_science():
    assert code.changed_lines(join_source(PARENT), "") == 6


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abcd")))
def test_changed_lines_are_at_most_those_of_a_diff(lines, parent_lines):
    texts = [
        join_source({"speedrun/science/nn.py": "".join(f"{line}\n" for line in side)})
        for side in (lines, parent_lines)
    ]
    added = sum(line.startswith("+ ") for line in difflib.ndiff(parent_lines, lines))
    assert max(0, len(lines) - len(parent_lines)) <= code.changed_lines(*texts) <= added
