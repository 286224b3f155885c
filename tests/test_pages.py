"""README and the pages of docs/ are run, not believed; their links lead somewhere.

Lines of ```bash blocks are executed, as they stand, one after the other. Lines of ```sh blocks install, take an
evening, or need what is not here: of those that call us, every option must exist and every value be one.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from speedrun import cli
from speedrun.base import console, faults, runlog

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 600
#: What stands in the tree for itself, and not for data, runs and records of the folder's own.
_OWN = ("data", "runs", "records", "README.md")


def blocks(language: str, text: str) -> list[list[str]]:
    """The lines of every fenced block of one language."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block.splitlines() for block in found]


def commands(language: str, text: str) -> list[str]:
    """Those lines that are commands."""
    return [line for block in blocks(language, text) for line in block if line and not line.startswith("#")]


def checkout(folder: Path) -> Path:
    """A folder with the files of the project, but with data, runs and records of its own."""
    for path in ROOT.iterdir():
        if path.name not in _OWN and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "records", folder / "records")
    shutil.copy(ROOT / "README.md", folder)
    return folder


def execute(lines: list[str], folder: Path) -> None:
    """Runs them as a shell would that stops at the first error; each has to say something."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env.pop("SPEEDRUN_DATA", None)
    given: Any = {"cwd": folder, "env": env, "stderr": subprocess.STDOUT, "timeout": TIMEOUT_S}
    for line in lines:
        argv = ["bash", "-euo", "pipefail", "-c", line]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False, **given)
        assert done.returncode == 0, f"$ {line}\n{done.stdout}"
        assert done.stdout.strip(), f"$ {line}\nsays nothing"


def read_options(line: str) -> None:
    """Reads a line that calls us as the command would; raises what a user would be told."""
    words = shlex.split(line, comments=True)[1:]
    command: click.Command = cli.command
    with click.Context(command) as ctx:
        while isinstance(command, click.Group):
            found = command.get_command(ctx, words.pop(0))
            assert found is not None
            command = found
        command.make_context("it", words)


FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path.name: path for path in FILES if path.name != "LOG.md"}
TEXTS = {name: path.read_text() for name, path in PAGES.items()}
README = TEXTS["README.md"]
SHOWN = ROOT / "records" / "smoke-cpu" / "2026-11-25-first"
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
    """Of README about a minute: the first is the whole smoke track."""
    execute(commands("bash", TEXTS[name]), checkout(tmp_path))


def test_commands_of_readme_do_what_they_say_of_a_record(tmp_path):
    """A committed record takes the place of the one that the first command would make."""
    run, *others = commands("bash", README)
    assert run == "speedrun run --track smoke-cpu --out runs/first"
    read_options(run)
    shutil.copytree(SHOWN, checkout(tmp_path) / "runs" / "first")
    execute(others, tmp_path)


@pytest.mark.parametrize("line", GIVEN)
def test_a_command_of_a_page_can_be_given(line):
    read_options(line)


def test_what_readme_shows_is_in_a_record():
    """The lines of a run; its card and checks are printed, and not kept."""
    (log,) = SHOWN.glob("runs/*/metrics.jsonl")
    (shown,) = blocks("console", README)
    lines = [line for line in shown if line.startswith(("step", "----", "result"))]
    assert len(lines) == 4
    assert not set(lines) - set(console.render(runlog.read(log)).splitlines())


@pytest.mark.parametrize("name", PAGES)
def test_its_links_lead_somewhere(name):
    local = [link for link in re.findall(r"\]\(([^)]+)\)", TEXTS[name]) if "://" not in link]
    assert not [link for link in local if not (PAGES[name].parent / link.partition("#")[0]).exists()]


# --- docs/reliability.md: every row is there, and every test that it names ------------------------------------

ROWS = [
    line.strip("|").split("|") for line in TEXTS["reliability.md"].splitlines() if re.match(r"\| \d", line)
]


@cache
def functions(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def named(cell: str) -> list[ast.FunctionDef]:
    """The tests of a cell; a name without a file is of tests/test_faults.py."""
    found = []
    for name in re.findall(r"`([^`]+)`", cell):
        file, _, test = name.rpartition("::")
        found.append(functions(ROOT / "tests" / (file or "test_faults.py"))[test])
    return found


def test_every_row_of_faults_is_there_once_and_has_a_test_and_a_date_or_says_why_not():
    numbers = []
    for number, _, outcome, tests, date in ROWS:
        first, _, last = number.strip().partition("-")
        numbers += range(int(first), int(last or first) + 1)
        done = bool(named(tests)) or "the same" in tests or "the first of them" in tests
        assert bool(re.fullmatch(r"\d{4}-\d\d-\d\d", date.strip())) == done, number
        assert done or "two processes" in outcome or "no test" in outcome, number
    assert numbers == sorted({*numbers})  # a dropped row leaves its number
    assert faults.VARIABLE in TEXTS["reliability.md"]


def test_a_test_of_a_fault_is_in_the_group_that_the_page_says():
    for _, _, _, tests, _ in ROWS:
        for one in re.split(r"; ", tests):
            marks = [ast.unparse(mark) for test in named(one) for mark in test.decorator_list]
            assert ("*compile*" in one) == ("pytest.mark.compile" in marks) or "10 of 12 steps" in one, one
