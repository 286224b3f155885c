"""What CI does with other people's records: reads them with the base branch's validator, and runs nothing of them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import FIRST
from typed import git, invoke

ROOT = Path(__file__).parent.parent
#: With other runs: the same run in two records is refused.
ANOTHER = FIRST.with_name("2026-11-29-six-seeds")
SCRIPT = ROOT / "scripts" / "validate_changed.sh"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    clone = tmp_path_factory.mktemp("first") / "clone"
    shutil.copytree(FIRST, clone / "records" / "smoke-cpu" / "old")
    git(clone, "init", "-q", "-b", "main")
    build_board(clone)
    commit(clone)
    return clone


@pytest.fixture
def clone(first: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first, tmp_path / "clone"))


def build_board(clone: Path) -> None:
    found = invoke("leaderboard", "build", "--records", clone / "records")
    assert found.exit_code == 0, found.output


def commit(clone: Path) -> None:
    git(clone, "add", "-A")
    git(clone, "commit", "-q", "-m", "x", "--allow-empty")


def check(clone: Path, base: str = "HEAD^1") -> tuple[int, str]:
    """Exit code and output of the script, as GitHub would see them."""
    commit(clone)
    python = Path(sys.executable).parent
    env = {**os.environ, "GITHUB_ACTIONS": "true", "PYTHONPATH": str(ROOT)}
    env["PATH"] = f"{python}:{os.environ['PATH']}"
    args = [str(SCRIPT), clone.name, base]
    done = subprocess.run(args, cwd=clone.parent, env=env, capture_output=True, check=False)
    assert done.stderr == b"", "two streams have no order: one could be read before commands are stopped"
    return done.returncode, done.stdout.decode(errors="replace")


def obeyed(output: str) -> list[str]:
    """The workflow commands in an output that GitHub's runner would obey.

    Of a line with spaces before it, `::name ...::`; anywhere in a line, `##[name]`. After stop-commands only the
    marker it named counts. Source: ActionCommandManager and ActionCommand of actions/runner.
    """
    found, marker = [], None
    for line in output.splitlines():
        command = re.match(r"\s*::([^ :]+)[^:]*::(.*)", line) or re.search(r"##\[([^ \]]+)[^\]]*\](.*)", line)
        if command is None or (marker is not None and command[1] != marker):
            continue
        if marker is None:
            found.append(command[1])
        marker = command[2] if command[1] == "stop-commands" else None
    return found


def test_good_records_pass_and_others_are_not_asked(clone):
    shutil.copytree(ANOTHER, clone / "records" / "smoke-cpu" / "new")
    build_board(clone)
    code, output = check(clone)
    assert (code, "1 records added or changed\n" in output) == (0, True), output
    assert "smoke-cpu/old" not in output
    assert "good: " in output


@pytest.mark.parametrize("what", ["a record", "the board"])
def test_a_branch_neither_removes_a_record_nor_writes_the_board(clone, what):
    if what == "a record":
        shutil.copytree(ANOTHER, clone / "records" / "smoke-cpu" / "new")
        build_board(clone)
        commit(clone)
        shutil.rmtree(clone / "records" / "smoke-cpu" / "old")
        build_board(clone)
    else:
        board = clone / "records" / "LEADERBOARD.md"
        board.write_text(board.read_text().replace("smoke", "fast"))
    code, output = check(clone)
    assert (code, "0 records added or changed\n" in output) == (1, True), output


def test_a_changed_record_is_validated_again(clone):
    (log,) = clone.glob("records/smoke-cpu/old/runs/*/metrics.jsonl")
    log.write_text(log.read_text().replace('"loss":5.', '"loss":4.', 1))
    shutil.copytree(ANOTHER, clone / "records" / "smoke-cpu" / "new")
    code, output = check(clone)
    assert (code, "2 records added or changed\n" in output) == (1, True), output
    assert re.search(r"failed +V002", output)
    assert "good: " in output, "the other one is not kept from its answer"


@pytest.mark.parametrize("form", ["link", "linked records", "file", "name", "no log", "no commit"])
def test_what_is_no_record_is_refused(clone, form):
    place = clone / "records" / "smoke-cpu" / "new"
    match form:
        case "link":
            place.symlink_to("old")
        case "linked records":
            (clone / "records").rename(clone / "elsewhere")
            (clone / "records").symlink_to("elsewhere")
        case "file":
            place.write_text("archive")
        case "no log":
            next(clone.glob("records/smoke-cpu/old/runs/*/metrics.jsonl")).unlink()
        case "name":
            shutil.copytree(FIRST, place.with_name("a\nb"))
            (place.with_name("a\nb") / "about.json").write_text("{}")
    code, output = check(clone, base="HEAD^9" if form == "no commit" else "HEAD^1")
    assert code != 0, output


def test_nothing_of_it_is_run_and_none_of_its_words_is_a_command(clone):
    canary = clone.parent / "ran"
    code = f"open({str(canary)!r}, 'w')\n"
    hostile = clone / "records" / "smoke-cpu" / "::error::boo"
    shutil.copytree(FIRST, hostile)
    for name in ("::add-mask::3", "##[group]x", "\r::add-path::x"):
        (hostile / name).write_text("stray")
    (hostile / "sitecustomize.py").write_text(code)
    for path in ("sitecustomize.py", "speedrun/__init__.py", "speedrun.py", "conftest.py", "click.py"):
        (clone / path).parent.mkdir(exist_ok=True)
        (clone / path).write_text(code)
    (clone / ".gitattributes").write_text("* diff=evil\n")
    exit_code, output = check(clone)
    assert exit_code == 1
    assert "::add-mask::3" in output, "it is named, and nobody obeys"
    first, last = output.splitlines()[0], output.splitlines()[-1]
    marker = first.removeprefix("::stop-commands::")
    assert re.fullmatch("[0-9a-f]{32}", marker)
    assert last == f"::{marker}::"
    assert obeyed(output) == ["stop-commands"]
    assert not canary.exists()
