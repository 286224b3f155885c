"""The README is run, not believed.

Its ```bash blocks are executed line by line, as they stand, in one folder that looks like a checkout without
data. Commands that install, take an evening or need data of yours stand in ```sh blocks and are not run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from speedrun.cli import COMMANDS
from speedrun.errors import EXIT_CODES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
LONGEST = 250  #: lines of the README
TIMEOUT_S = 400


def blocks(language: str, text: str = README) -> list[list[str]]:
    """The lines of every fenced block of one language."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block.splitlines() for block in found]


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block if line and not line.startswith("#")]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the files of the project, but with data and runs of its own."""
    for path in ROOT.iterdir():
        if path.name not in ("data", "runs") and not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def test_its_commands_do_what_they_say(checkout: Path) -> None:
    """About a minute: one of them is the whole smoke track."""
    bin_dir = Path(sys.executable).parent
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    env = {**env, "PATH": f"{bin_dir}:{env['PATH']}"}
    env.pop("SPEEDRUN_DATA", None)
    assert any(command.startswith("speedrun run --track smoke-cpu") for command in commands())
    for command in commands():
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=checkout,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}"
        assert done.stdout.strip(), f"$ {command}\nsays nothing"


def test_its_first_commands_are_the_two_scripts() -> None:
    first = [line.split()[0] for line in blocks("sh")[0]]
    assert first == ["scripts/quickstart.sh", "scripts/test.sh"]
    assert all(os.access(ROOT / name, os.X_OK) for name in first)
    assert README.index(first[0]) < README.index("\n## ")


def test_it_names_every_command_that_there_is() -> None:
    """In the table and in the blocks that are not run."""
    texts = [*re.findall(r"`(speedrun [^`]+)`", README), *(line for block in blocks("sh") for line in block)]
    named = {text.split()[1] for text in texts if text.startswith("speedrun ")}
    assert named == set(COMMANDS)


def test_its_exit_codes_are_the_real_ones() -> None:
    rows = {
        int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", README, re.MULTILINE)
    }
    assert {code: rows[code] for code in EXIT_CODES} == EXIT_CODES
    assert set(rows) == set(EXIT_CODES)


def test_the_tree_is_the_tree() -> None:
    """Of CONTRIBUTING. Names at the start of each line; two spaces deeper means inside of the folder above."""
    tree = next(block for block in blocks("text", CONTRIBUTING) if "speedrun/" in block)
    named = {
        "/".join(["speedrun"] * line.startswith("  ") + [name.rstrip("/")])
        for line in tree
        for name in re.split(r" {2,}", line.strip())
        if re.fullmatch(r"[\w./]+", name)
    }
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing
    parts = [path for path in (ROOT / "speedrun").iterdir() if not path.name.startswith("_")]
    assert {f"speedrun/{path.name}" for path in parts} <= named


def test_its_links_lead_somewhere() -> None:
    local = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert local
    assert not [link for link in local if not (ROOT / link.partition("#")[0]).exists()]


def test_its_reading_order_is_short() -> None:
    want = re.search(r"fewer than ([\d,]+) lines together", README)
    assert want
    files = re.findall(r"\]\((speedrun/[^)]+\.py)\)", README)
    total = sum(len((ROOT / name).read_text().splitlines()) for name in files)
    assert len(files) == 4
    assert total < int(want[1].replace(",", "")), f"{total} lines in {files}"
    assert len(README.splitlines()) <= LONGEST
