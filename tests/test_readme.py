"""The README is run, not believed (`pages`), and what it counts is counted."""

import os
import re
import shutil
from pathlib import Path

import pytest
from pages import ROOT, blocks, checkout, commands, execute, read_options

from speedrun.cli import COMMANDS
from speedrun.ground import console, runlog
from speedrun.ground.exit_codes import EXIT_CODES

README = (ROOT / "README.md").read_text()
COMMANDS_PAGE = (ROOT / "docs" / "commands.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
SHOWN = ROOT / "records" / "smoke-cpu" / "2026-11-22-one-run"
LONGEST = 135  #: lines of the README, the board included


@pytest.mark.compile
def test_its_commands_do_what_they_say(tmp_path: Path) -> None:
    """About a minute: the first is the whole smoke track."""
    execute(commands("bash", README), checkout(tmp_path))


def test_its_commands_do_what_they_say_of_a_record(tmp_path: Path) -> None:
    """A committed record takes the place of the one that the first command would make."""
    run, *others = commands("bash", README)
    assert run == "speedrun run --track smoke-cpu --out runs/first"
    read_options(run)
    shutil.copytree(SHOWN, checkout(tmp_path) / "runs" / "first")
    execute(others, tmp_path)


def test_its_first_commands_are_the_two_scripts() -> None:
    first = [line.split()[0] for line in blocks("sh", README)[0]]
    assert first == ["scripts/quickstart.sh", "scripts/test.sh"]
    assert all(os.access(ROOT / name, os.X_OK) for name in first)
    assert README.index(first[0]) < README.index("\n## ")


def test_the_page_of_commands_names_every_command_that_there_is() -> None:
    """In the table of docs/commands.md."""
    texts = re.findall(r"`(speedrun [^`]+)`", COMMANDS_PAGE)
    named = {text.split()[1] for text in texts if text.startswith("speedrun ")}
    assert named == set(COMMANDS)


def test_the_exit_codes_are_the_real_ones() -> None:
    rows = {
        int(code): meaning
        for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", COMMANDS_PAGE, re.MULTILINE)
    }
    assert {code: rows[code] for code in EXIT_CODES} == EXIT_CODES
    assert set(rows) == set(EXIT_CODES)


def test_what_it_shows_is_in_a_record() -> None:
    """The lines of a run; its card and checks are printed, and not kept."""
    (log,) = SHOWN.glob("runs/*/metrics.jsonl")
    (shown,) = blocks("console", README)
    lines = [line for line in shown if line.startswith(("step", "----", "result"))]
    assert len(lines) == 4
    assert not set(lines) - set(console.render(runlog.read(log)).splitlines())


def test_the_tree_is_the_tree() -> None:
    """Of CONTRIBUTING. Names at the start of each line; two spaces deeper means inside of the folder above."""
    tree = next(block for block in blocks("text", CONTRIBUTING) if "speedrun/" in block)
    named, folder = set[str](), ""
    for line in tree:
        names = [name for name in re.split(r" {2,}", line.strip()) if re.fullmatch(r"[\w./]+", name)]
        if not line.startswith("  "):
            folder = ""
        named |= {f"{folder}{name.rstrip('/')}" for name in names}
        if not line.startswith("  ") and names:
            folder = names[0]
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing
    parts = [path for path in (ROOT / "speedrun").iterdir() if not path.name.startswith("_")]
    assert {f"speedrun/{path.name}" for path in parts} <= named


def test_its_links_lead_somewhere() -> None:
    local = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert local
    assert not [link for link in local if not (ROOT / link.partition("#")[0]).exists()]


def test_nobody_is_told_to_install_what_is_not_published() -> None:
    pages = [
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("speedrun/**/*.py"),
        *ROOT.glob("scripts/*.sh"),
    ]
    assert not [path for path in pages if re.search(r"pip install '?speedrun\b", path.read_text())]


def test_its_reading_order_is_short() -> None:
    want = re.search(r"fewer than ([\d,]+) lines of code", README)
    assert want
    files = re.findall(r"\]\((speedrun/[^)]+\.py)\)", README)
    total = sum(bool(line) for name in files for line in (ROOT / name).read_text().splitlines())
    assert len(files) == 4
    assert total < int(want[1].replace(",", "")), f"{total} lines in {files}"
    assert len(README.splitlines()) <= LONGEST
