"""A description goes into manifest and README, and changes no measurement."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from record_forge import forge
from small_run import FIRST, files
from typed import invoke

from speedrun.record.reader import load
from speedrun.record.validate import validate

ROOT = Path(__file__).parents[2]


@pytest.fixture
def records(forged):
    (forged / "forged").mkdir()
    return forge(forged / "forged" / "child"), forge(forged / "forged" / "parent")


def described(*words) -> None:
    result = invoke("describe", *map(str, words))
    assert result.exit_code == 0, result.output


def test_what_no_record_could_hold_is_refused_before_anything_is_written(records):
    child, _ = records
    before = files(child)
    too_long = ["--change", "x" * 2**20], "at most 1,048,576"
    for words, said in ((["--parent", child], "is the record itself"), too_long):
        assert said in invoke("describe", str(child), *map(str, words)).stderr
    assert files(child) == before


def test_a_description_is_in_about_and_readme_and_the_rest_stays(records):
    child, parent = records
    before = load(child).id
    (child / "README.md").write_text((child / "README.md").read_text() + "\nWhy it works.\n")
    described(child, "--title", "less | of it", "--author", "ada", "--author", "bob", "--change", "one <b>")
    described(child, "--parent", parent)
    record = load(child)
    assert (record.about.title, record.about.authors) == ("less | of it", ("ada", "bob"))
    assert (record.about.changes, record.about.parent_record) == (("one <b>",), "forged/parent")
    assert record.id == before
    readme = (child / "README.md").read_text()
    assert readme.endswith("\nWhy it works.\n")
    assert "| parent | forged/parent |" in readme
    assert validate(child, strict=True).exit_code == 0


def test_a_title_that_the_locale_cannot_hold(tmp_path):
    record = shutil.copytree(FIRST, tmp_path / "gr\u00f6\u00dfer")
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    argv = [sys.executable, "-m", "speedrun", "describe", str(record), "--title", "noch größer"]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert done.stdout.decode() == f"record  {record}\n"
    assert "noch größer" in (record / "README.md").read_text("utf-8")
