"""The wheel holds the whole package; what it installs trains and validates away from any checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
from small_run import SMALL
from typed import as_words

ROOT = Path(__file__).parents[2]


def run(argv: list[str | Path], folder: Path, code: int = 0) -> str:
    """Output of a command that runs in a folder and ends with this code."""
    outside = {"PYTHONPATH", "SPEEDRUN_DATA", "XLA_FLAGS", "SPEEDRUN_TEST_PLATFORM"}
    env = {name: value for name, value in os.environ.items() if name not in outside}
    env |= {"PIP_NO_INDEX": "1"}
    done = subprocess.run(argv, cwd=folder, env=env, stdout=-1, stderr=-2, text=True, check=False)
    assert done.returncode == code, f"{argv}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of a copy of what the build reads, as setuptools leaves a folder behind."""
    folder, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("out")
    shutil.copytree(ROOT / "speedrun", folder / "speedrun", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out, "."], folder)
    return next(out.glob("*.whl"))


def install(wheel: Path, folder: Path) -> Path:
    """The folder of programs of a new environment that holds the wheel, and sees the packages that are here."""
    venv.create(folder, with_pip=False)
    there = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # A folder named in a .pth file is searched, but its own .pth files, such as that of this checkout, are not read.
    (there / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel], folder)
    return folder / "bin"


def test_the_wheel_is_the_package(wheel):
    """Every file of it, tracks and types included; nothing else but metadata."""
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = (path for path in (ROOT / "speedrun").rglob("*") if path.is_file())
    assert names == {path.relative_to(ROOT).as_posix() for path in package if path.suffix != ".pyc"}


@pytest.mark.compile
def test_an_installed_wheel_trains_and_validates(wheel, tmp_path):
    """From an empty folder: no checkout, no git, no lock files."""
    bin_dir = install(wheel, tmp_path / "venv")
    folder = tmp_path / "empty"
    folder.mkdir()
    where = [bin_dir / "python", "-c", "import speedrun; print(speedrun.__file__)"]
    assert Path(run(where, folder).strip()).is_relative_to(tmp_path)
    words = ["run", "--track", "smoke-cpu", "--out", "mine", *as_words(SMALL)]
    said = run([bin_dir / "speedrun", *words], folder, 1)
    assert "target 3.15 NOT reached" in said, said
    assert "good: " in run([bin_dir / "speedrun", "validate", "--strict", "mine"], folder)
    assert {path.name for path in folder.iterdir()} == {"data", "mine"}
