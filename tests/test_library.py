"""The package as a library: what a notebook or a script does with it."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_train import SMALL

import speedrun as sr
from speedrun.ground.errors import SpeedrunError, UsageError
from speedrun.library import settings_of
from speedrun.science.recipes import smoke


def test_a_recipe_is_loaded_changed_run_checked_and_drawn(tmp_path: Path, smoke_data: Path) -> None:
    recipe = sr.load("smoke").override(SMALL)
    record = sr.run(recipe, track="smoke-cpu", out=tmp_path / "mine", data=smoke_data, seed=3, quiet=True)
    report = record.validate()
    assert report.exit_code == 0
    assert repr(report) == f"<Report {report.verdict}>"
    assert report.verdict.startswith("good: ")
    with pytest.raises(UsageError, match="unknown kind of plot 'pie'; "):
        record.plot("pie")  # pyright: ignore[reportArgumentType]
    (run,) = record.runs
    assert (run.file.seed, run.file.overrides) == (3, settings_of(recipe))
    assert run.file.overrides.keys() <= SMALL.keys()
    assert record.summary.num_steps == len(run.steps) == recipe.num_steps
    assert {path.name for path in record.plot("loss", "steps")} >= {"loss.png", "steps.png"}
    assert repr(record) == f"Record({str(tmp_path / 'mine')!r})"


@pytest.mark.parametrize("changes", [{}, {"stages.0.num_steps": 9}, {"optimizer.muon_lr": 0.5}])
def test_settings_are_found_again(changes: dict[str, float]) -> None:
    recipe = smoke.RECIPE.override(changes)
    assert settings_of(recipe) == {key: str(value) for key, value in changes.items()}


@pytest.mark.parametrize("changes", [{"logits": print}, {"summary": "another"}])
def test_a_recipe_without_a_file_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="need a file of its own"):
        settings_of(dataclasses.replace(smoke.RECIPE, **changes))


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(AttributeError, match="it exports Record, load, run"):
        getattr(sr, "train")  # noqa: B009 - no type checker lets the name pass


def test_the_package_is_imported_without_what_it_may_need() -> None:
    script = (
        "import sys, speedrun; print(*sorted({'jax', 'numpy', 'click', 'speedrun.library'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not done.stdout.split()


def test_a_record_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(UsageError, match="exists already; need a new folder"):
        sr.run(track="smoke-cpu", out=tmp_path / "mine")
    assert not list((tmp_path / "mine").iterdir())


def test_a_run_that_is_refused_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpeedrunError, match="unknown recipe 'smok'; did you mean 'smoke'") as info:
        sr.run("smok", track="smoke-cpu", out=tmp_path / "mine", quiet=True)
    assert info.value.exit_code == UsageError.exit_code
    assert not (tmp_path / "mine").exists()
    assert not capfd.readouterr().out
