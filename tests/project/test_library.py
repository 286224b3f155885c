"""The package as a library: what a notebook or a script does with it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_docs import DOCS, MADE

import speedrun as sr
from speedrun.api import settings_of
from speedrun.base.errors import DataError, SpeedrunError, UsageError
from speedrun.recipes import smoke

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def record(tmp_path_factory, smoke_data) -> sr.Record:
    """The record of docs/quickstart.ipynb, whose code cells a new Python executes in order."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "data").mkdir()
    (folder / "data" / "smoke").symlink_to(smoke_data)
    cells = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text())["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    env = {name: value for name, value in os.environ.items() if name != "SPEEDRUN_DATA"}
    argv = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(
        argv, cwd=folder, env={**env, "MPLBACKEND": "agg"}, stderr=-1, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return sr.Record(folder / "runs" / "notebook")


@pytest.mark.parametrize("name", MADE)
def test_a_page_is_what_is_made(name):
    assert (DOCS / name).read_text() == MADE[name](), "type: python tests/made_docs.py"


@pytest.mark.compile
def test_the_notebook_makes_a_good_record(record):
    report = record.validate()
    assert report.exit_code == 0
    assert repr(report) == f"<Report {report.verdict}>"
    assert report.verdict.startswith("good: ")
    (run,) = record.runs
    recipe = sr.load("smoke").override(run.start.overrides)
    assert run.start.overrides == settings_of(recipe)
    assert record.summary.num_steps == len(run.steps) == recipe.num_steps == 60
    assert (record.folder / "plots" / "loss.png").exists()
    assert repr(record) == f"Record({str(record.folder)!r})"
    with pytest.raises(UsageError, match="unknown kind of plot 'pie'; "):
        record.plot("pie")
    assert {path.name for path in record.plot("loss", "steps")} >= {"loss.png", "steps.png"}


@pytest.mark.parametrize("changes", [{}, {"stages.0.num_steps": 9}, {"optimizer.muon_lr": 0.5}])
def test_settings_are_found_again(changes):
    recipe = smoke.RECIPE.override(changes)
    assert settings_of(recipe) == {key: str(value) for key, value in changes.items()}


@pytest.mark.parametrize("changes", [{"logits": print}, {"summary": "another"}])
def test_a_recipe_without_a_file_is_refused(changes):
    with pytest.raises(UsageError, match="need another file"):
        settings_of(dataclasses.replace(smoke.RECIPE, **changes))


def test_a_run_that_is_refused_says_why(tmp_path, capfd):
    nowhere = tmp_path / "nowhere"
    with pytest.raises(SpeedrunError, match=f"{nowhere}: no such folder; ") as info:
        sr.run("smoke", track="smoke-cpu", out=tmp_path / "mine", data=nowhere, seed=3, quiet=True)
    assert info.value.exit_code == DataError.exit_code
    assert not (tmp_path / "mine").exists()
    assert not capfd.readouterr().out
    with pytest.raises(UsageError, match="unknown recipe 'smok'; did you mean 'smoke'"):
        sr.load("smok")


def test_a_run_that_leaves_nothing_is_an_error(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho step 7\nkill -9 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(SpeedrunError, match=r"signal 9"):
        sr.run(track="webmini", out=tmp_path / "mine", quiet=True)
