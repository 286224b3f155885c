"""Rooms beside the core can be taken out, one or all: the rest says what it lacks, and trains, proves and checks."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from small_run import SMALL
from test_architecture import CORE, FLOORS
from typed import as_words

from speedrun.commands import ADDED, COMMANDS

ROOT = Path(__file__).parents[2]
EXTRAS = sorted({room for room, _ in COMMANDS.values() if "." not in room})
Typed = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def without(tmp_path: Path) -> Callable[[Sequence[str]], Typed]:
    """Copies the package without some rooms; returns what runs Python on the copy, in a folder of its own."""

    def copied(rooms: Sequence[str]) -> Typed:
        shutil.copytree(
            ROOT / "speedrun", tmp_path / "speedrun", ignore=shutil.ignore_patterns("__pycache__")
        )
        # The finder of an editable installation would find what is gone in the checkout.
        (tmp_path / "sitecustomize.py").write_text(
            "import sys; sys.meta_path[:] = [one for one in sys.meta_path if 'ditable' not in repr(one)]"
        )
        for name in rooms:
            shutil.rmtree(tmp_path / "speedrun" / name)
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}

        def typed(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
            argv = [sys.executable, *map(str, words)]
            done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == code, f"{argv}\n{done.stdout}\n{done.stderr}"
            return done

        return typed

    return copied


def test_the_table_names_rooms_that_are_there():
    assert sorted({name for name in FLOORS if "." not in name} - CORE - {"commands"}) == EXTRAS
    assert {place.partition(".")[0] for place in ADDED.values()} <= {*EXTRAS}


@pytest.mark.parametrize("rooms", [*([name] for name in EXTRAS), EXTRAS], ids="-".join)
def test_help_lists_what_is_left_and_what_is_gone_says_what_it_needs(rooms, without):
    typed = without(rooms)
    shown = typed("-m", "speedrun", "--help").stdout
    gone = {name for name, (room, _) in COMMANDS.items() if room in rooms}
    assert {name for name in COMMANDS if f"\n  {name} " in shown} == COMMANDS.keys() - gone
    name = min(gone)
    said = typed("-m", "speedrun", name, code=2).stderr
    assert said.startswith(f"error: this needs speedrun.{COMMANDS[name][0]}, "), said


@pytest.mark.compile
def test_the_core_alone_trains_proves_and_checks_and_its_types_hold(without, tmp_path, smoke_data):
    typed = without(EXTRAS)
    speedrun = ("-m", "speedrun")
    small = ("--data", smoke_data, *as_words(SMALL))
    said = typed(*speedrun, "run", "--out", "one", *small, code=1).stdout
    assert "target 3.15 NOT reached" in said
    assert "plot" not in said.replace("speedrun plot", "")
    typed(*speedrun, "batch", "--out", "two", "--runs", 2, *small, code=1)
    typed(*speedrun, "validate", "one", "two")
    for option, room in {"--wandb=mine": "board", "--dry-run": "lab"}.items():
        said = typed(*speedrun, "run", "--out", "three", option, *small, code=2).stderr
        assert f"this needs speedrun.{room}, " in said
    typed("-c", "import speedrun as sr; assert len(sr.Record('two').runs) == 2")
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pyright]\ntypeCheckingMode = "standard"\ninclude = ["speedrun"]\n'
    )
    typed("-m", "pyright", "--threads", 2)


@pytest.mark.compile
def test_tests_of_the_core_need_no_other_room(without, tmp_path):
    """All are read; those run that type commands of other rooms where these are there."""
    typed = without(EXTRAS)
    others = shutil.ignore_patterns("__pycache__", "project", "test_workflows.py", *EXTRAS)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=others)
    for name in (".git", "pyproject.toml", "records", "docs", "README.md", "requirements", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    typed("-m", "pytest", "-q", "--collect-only", "-m", "")
    mended = (
        "base/test_output.py",
        "cli",
        "core/test_clock.py",
        "core/test_validate.py",
        "train/test_checkpoint.py",
    )
    typed("-m", "pytest", "-q", *(f"tests/{name}" for name in mended))
