"""The pages of docs/: what they tell people to type works, and their links lead somewhere."""

import re
from pathlib import Path

import pytest
from pages import ROOT, checkout, commands, execute, read_options

PAGES = {
    path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "LOG.md"
}
SCRIPT = "python data/fineweb_prep.py"

RUN = [name for name, text in PAGES.items() if commands("bash", text)]
GIVEN = sorted(
    {
        line.replace(SCRIPT, "speedrun data prep")
        for text in PAGES.values()
        for line in commands("sh", text)
        if line.startswith(("speedrun ", SCRIPT)) and "path/to" not in line
    }
)


@pytest.mark.compile
@pytest.mark.parametrize("name", RUN)
def test_its_commands_do_what_they_say(name: str, tmp_path: Path) -> None:
    execute(commands("bash", PAGES[name]), checkout(tmp_path))


@pytest.mark.parametrize("line", GIVEN)
def test_a_command_of_a_page_can_be_given(line: str) -> None:
    read_options(line)


@pytest.mark.parametrize("name", PAGES)
def test_its_links_lead_somewhere(name: str) -> None:
    local = [link for link in re.findall(r"\]\(([^)]+)\)", PAGES[name]) if "://" not in link]
    assert not [link for link in local if not (ROOT / "docs" / link.partition("#")[0]).exists()]
