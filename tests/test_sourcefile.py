import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedrun.base.sourcefile import MARKER, check_path, join_source
from speedrun.record.layout import sha256
from speedrun.record.source import split_source

NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(lambda parts: "/".join(parts) + ".py")
TEXTS = st.text(st.characters(codec="utf-8")).map(lambda text: f"{text}\n") | st.just("")


@given(st.dictionaries(PATHS, TEXTS, max_size=4))
def test_round_trip(files):
    assert split_source(join_source(files)) == files
    assert list(split_source(join_source(files))) == list(files)


def test_a_line_that_looks_like_a_marker_is_text():
    inner = join_source({"b.py": "B = 1\n"})
    assert split_source(join_source({"a.py": inner, "c.toml": "c = 1\n"}))["a.py"] == inner


@pytest.mark.parametrize(
    "path",
    ["/a.py", "../a.py", "a/../b.py", "./a.py", "a//b.py", "a\\b.py", "a.sh", ".py", "a b.py", "a.py\n", ""],
)
def test_paths_that_could_escape_are_refused(path):
    with pytest.raises(ValueError, match="source path"):
        check_path(path)


def test_a_text_without_last_newline_is_refused():
    with pytest.raises(ValueError, match="newline"):
        join_source({"a.py": "A = 1"})


GOOD = join_source({"a.py": "A = 1\n", "b.py": "B = 2\n"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (GOOD.replace("A = 1", "A = 2"), "not the one"),
        (GOOD.replace("a.py", "b.py"), "twice"),
        (GOOD.replace("a.py", "../a.py"), "source path"),
        (GOOD.replace("lines:1", "lines:9"), "not the one"),
        (GOOD.replace("lines:1", "lines:99999999999"), "want a file marker"),
        ("hello\n" + GOOD, "want a file marker"),
        (GOOD[:-1], "newline"),
        (GOOD[: -len("B = 2\n")], "not the one"),
        (MARKER.format(path="a.py", sha256=sha256(b""), lines=0) + "stray\n", "want a file marker"),
    ],
)
def test_damage_is_named(text, problem):
    with pytest.raises(ValueError, match=problem):
        split_source(text)
