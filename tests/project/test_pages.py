"""Commands in README, AGENTS.md and docs/ work, and their links lead somewhere.

Lines of ```bash blocks are executed in order. Lines of ```sh blocks install, take an evening, or need what is not here:
their options are parsed.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_run import FIRST
from typed import read_options

from speedrun.base import console, runlog

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600
#: Not linked into a checkout of a test: it gets its own.
_OWN = ("data", "runs", "records", "README.md")


def blocks(language: str, text: str) -> list[list[str]]:
    """The lines of every fenced block in a language."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block.splitlines() for block in found]


def commands(language: str, text: str) -> list[str]:
    """Lines of such blocks that are commands."""
    return [line for block in blocks(language, text) for line in block if line and not line.startswith("#")]


def checkout(folder: Path) -> Path:
    """Make a folder with the files of the project, and its own data, runs and records."""
    for path in ROOT.iterdir():
        if path.name not in _OWN and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "records", folder / "records")
    shutil.copy(ROOT / "README.md", folder)
    return folder


def execute(lines: list[str], folder: Path) -> None:
    """Run commands; each must succeed and print something."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env.pop("SPEEDRUN_DATA", None)
    given: Any = {"cwd": folder, "env": env, "stderr": subprocess.STDOUT, "timeout": TIMEOUT_S}
    for line in lines:
        argv = ["bash", "-euo", "pipefail", "-c", line]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False, **given)
        assert done.returncode == 0, f"$ {line}\n{done.stdout}"
        assert done.stdout.strip(), f"$ {line}\nsays nothing"


FILES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path.name: path for path in FILES if path.name != "LOG.md"}
TEXTS = {name: path.read_text() for name, path in PAGES.items()}
README = TEXTS["README.md"]
SCRIPT = "python data/fineweb_prep.py"

RUN = [name for name, text in TEXTS.items() if commands("bash", text)]
GIVEN = sorted(
    {
        line.replace(SCRIPT, "speedrun data prep")
        for text in TEXTS.values()
        for line in commands("sh", text)
        if line.startswith(("speedrun ", SCRIPT)) and "path/to" not in line
    }
)


@pytest.mark.compile
@pytest.mark.parametrize("name", RUN)
def test_its_commands_do_what_they_say(name, tmp_path):
    execute(commands("bash", TEXTS[name]), checkout(tmp_path))


def test_commands_of_readme_do_what_they_say_of_a_record(tmp_path):
    """A committed record replaces the one that the first command would make."""
    run, *others = commands("bash", README)
    assert run == "speedrun run --track smoke-cpu --out runs/first"
    read_options(run)
    shutil.copytree(FIRST, checkout(tmp_path) / "runs" / "first")
    execute(others, tmp_path)


@pytest.mark.parametrize("line", GIVEN)
def test_a_command_of_a_page_can_be_given(line):
    read_options(line)


def test_what_readme_shows_is_in_a_record():
    (log,) = FIRST.glob("runs/*/metrics.jsonl")
    (shown,) = blocks("console", README)
    lines = [line for line in shown if line.startswith(("step", "----", "result"))]
    assert len(lines) == 5
    assert not set(lines) - set(console.render(runlog.read(log)).splitlines())


@pytest.mark.parametrize("name", PAGES)
def test_its_links_lead_somewhere(name):
    local = [link for link in re.findall(r"\]\(([^)]+)\)", TEXTS[name]) if "://" not in link]
    assert not [link for link in local if not (PAGES[name].parent / link.partition("#")[0]).exists()]
