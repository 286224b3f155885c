"""The README is run, not believed (`pages`)."""

import re
import shutil
from pathlib import Path

import pytest
from pages import ROOT, blocks, checkout, commands, execute, read_options

from speedrun.base import console, runlog

README = (ROOT / "README.md").read_text()
SHOWN = ROOT / "records" / "smoke-cpu" / "2026-11-25-first"


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


def test_what_it_shows_is_in_a_record() -> None:
    """The lines of a run; its card and checks are printed, and not kept."""
    (log,) = SHOWN.glob("runs/*/metrics.jsonl")
    (shown,) = blocks("console", README)
    lines = [line for line in shown if line.startswith(("step", "----", "result"))]
    assert len(lines) == 4
    assert not set(lines) - set(console.render(runlog.read(log)).splitlines())


def test_its_links_lead_somewhere() -> None:
    local = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert local
    assert not [link for link in local if not (ROOT / link.partition("#")[0]).exists()]
