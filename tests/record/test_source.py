"""Untrusted source texts are read without a crash, and never executed."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_forge import RECIPE, forge

from speedrun.base.sourcefile import MARKER, check_path, join_source
from speedrun.record import source
from speedrun.record.layout import sha256
from speedrun.record.source import split_source
from speedrun.record.validate import validate


def nested(depth: int) -> str:
    """A compiler copies each `finally` to every exit of its `try`, so a level multiplies its time by five."""
    body = "return 0"
    for level in range(depth):
        lines = [f"try:\n    if x: return {level}\n    if y: return {level}", "finally:", f"    {body}"]
        body = "\n".join(lines).replace("\n", "\n    ")
    return f"def f(x, y):\n    {body}\n"


MANY = 100_000
#: All are smaller than the size that is refused unread.
BOMBS = {
    "exits of blocks": nested(16),
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
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_read_to_its_end(bomb):
    with contextlib.suppress(ValueError):
        assert not source.read(BOMBS[bomb] + "\n").imports


@settings(max_examples=30)
@given(st.text(st.characters(codec="utf-8"), max_size=200))
def test_any_text_is_read(text):
    with contextlib.suppress(ValueError):
        source.read(text)


def test_texts_that_begin_and_end_alike_are_read_each():
    around = "# a line of a licence\n" * 1000
    for name in ("jax", "os", "sys"):
        assert [one.module for one in source.read(f"{around}import {name:<3}\n{around}").imports] == [name]


@pytest.mark.parametrize("bomb", ["signs", "one line"])
def test_a_record_with_a_bomb_ends_in_a_report(forged, bomb):
    forge(forged / "record", edit_source=lambda files: {**files, RECIPE: BOMBS[bomb] + "\n"})
    for result in validate(forged / "record").results:
        assert all(message.isprintable() and len(message) < 1000 for message in result.messages)


def test_nothing_of_a_source_is_executed(forged):
    canary = forged / "canary"
    text = f"@print\nclass A(open({str(canary)!r}, 'w').__class__): pass\n"
    forge(forged / "record", edit_source=lambda files: {**files, RECIPE: text})
    validate(forged / "record")
    assert not canary.exists()


PARENT = {
    "speedrun/science/models/mine.py": "import jax\n\ndef f(x):\n    y = x + 1\n    return y\n",
    "speedrun/science/nn.py": "def norm(x):\n    return x\n",
    "speedrun/train/run.py": "a = 1\n",
    "speedrun/tracks/mine.toml": "a = 1\n",
}
MODEL, NN = (PARENT[path] for path in ("speedrun/science/models/mine.py", "speedrun/science/nn.py"))


@pytest.mark.parametrize(
    ("changes", "num_lines"),
    [
        ({}, 0),
        ({"speedrun/train/run.py": "b = 2\n"}, 0),
        ({"speedrun/recipes/__init__.py": "b = 2\n"}, 0),
        ({"speedrun/recipes/mine.py": "b = 2\n"}, 1),
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
    assert source.changed_lines(join_source(PARENT | changes), join_source(PARENT)) == num_lines
    assert source.changed_lines(join_source(PARENT), "") == 6, "without a parent all is counted"


NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(lambda parts: "/".join(parts) + ".py")
TEXTS = st.text(st.characters(codec="utf-8")).map(lambda text: f"{text}\n") | st.just("")


@given(st.dictionaries(PATHS, TEXTS, max_size=4))
def test_round_trip(files):
    assert split_source(join_source(files)) == files
    assert list(split_source(join_source(files))) == list(files)
    inner = {"c.py": join_source(files), "d.toml": "c = 1\n"}  # lines that look like markers are text
    assert split_source(join_source(inner)) == inner


@pytest.mark.parametrize(
    "path",
    ["/a.py", "../a.py", "a/../b.py", "./a.py", "a//b.py", "a\\b.py", "a.sh", ".py", "a b.py", "a.py\n", ""],
)
def test_paths_that_could_escape_are_refused(path):
    with pytest.raises(ValueError, match="source path"):
        check_path(path)


TWO_FILES = join_source({"a.py": "A = 1\n", "b.py": "B = 2\n"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (TWO_FILES.replace("A = 1", "A = 2"), "does not match"),
        (TWO_FILES.replace("a.py", "b.py"), "twice"),
        (TWO_FILES.replace("a.py", "../a.py"), "source path"),
        (TWO_FILES.replace("lines:1", "lines:9"), "does not match"),
        (TWO_FILES.replace("lines:1", "lines:99999999999"), "need a file marker"),
        ("hello\n" + TWO_FILES, "need a file marker"),
        (TWO_FILES[:-1], "newline"),
        (TWO_FILES[: -len("B = 2\n")], "does not match"),
        (MARKER.format(path="a.py", sha256=sha256(b""), lines=0) + "stray\n", "need a file marker"),
    ],
)
def test_damage_is_named(text, problem):
    with pytest.raises(ValueError, match=problem):
        split_source(text)
    with pytest.raises(ValueError, match="newline"):
        join_source({"a.py": "A = 1"})
