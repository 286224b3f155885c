"""docs/reliability.md: every row is there, and every test that it names."""

import ast
import re
from functools import cache
from pathlib import Path

from speedrun.base import faults
from speedrun.train import watchdog

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text()
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if re.match(r"\| \d", line)]


@cache
def functions(path: Path) -> dict[str, ast.FunctionDef]:
    return {
        node.name: node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
    }


def named(cell: str) -> list[ast.FunctionDef]:
    """The tests of a cell; a name without a file is of tests/test_faults.py."""
    found = []
    for name in re.findall(r"`([^`]+)`", cell):
        file, _, test = name.rpartition("::")
        found.append(functions(ROOT / "tests" / (file or "test_faults.py"))[test])
    return found


def test_every_row_of_the_table_is_there_once():
    numbers = [
        number
        for first, last in (cells[0].strip().partition("-")[::2] for cells in ROWS)
        for number in range(int(first), int(last or first) + 1)
    ]
    assert numbers == list(range(1, 72))


def test_every_row_has_a_test_and_a_date_or_says_why_not():
    for number, _, outcome, tests, date in ROWS:
        done = bool(named(tests)) or "the same" in tests or "the first of them" in tests
        assert bool(re.fullmatch(r"\d{4}-\d\d-\d\d", date.strip())) == done, number
        assert done or "two processes" in outcome or "no test" in outcome, number


def test_a_test_is_in_the_group_that_the_page_says():
    for _, _, _, tests, _ in ROWS:
        for one in re.split(r"; ", tests):
            marks = [ast.unparse(mark) for test in named(one) for mark in test.decorator_list]
            assert ("*compile*" in one) == ("pytest.mark.compile" in marks) or "10 of 12 steps" in one, one


def test_deadlines_are_as_the_page_says():
    short = ("start", "step", "data")
    assert {s for phase, s in watchdog.DEADLINES_S.items() if phase in short} == {15 * 60}
    assert {s for phase, s in watchdog.DEADLINES_S.items() if phase not in short} == {3600}
    assert faults.VARIABLE in PAGE
