"""What commands print with `--json` has a schema; `typed.invoke` compares what any test prints."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from small_run import FIRST, SMALL
from typed import as_words, invoke, promised

from speedrun import cli
from speedrun.base.exit_codes import EXIT_CODES, code_of
from speedrun.cli import schema
from speedrun.cli.options import Answer

COMMANDS = dict(schema.commands(cli.command))
ROOT = Path(__file__).parents[2]


def parts(node: Any) -> list[Any]:
    """A schema and all that are in it."""
    below = node if isinstance(node, list) else []
    if isinstance(node, dict):
        below = [part for name, part in node.items() if name != "default"]
    return [node, *(one for part in below for one in parts(part))]


def test_every_command_has_a_schema_without_gaps():
    assert json.loads(invoke("schema", "--json").stdout) == {"commands": [*COMMANDS]}
    for name in COMMANDS:
        told = json.loads(invoke("schema", *name.split()).stdout)
        *answers, failure = told["anyOf"]
        assert answers, f"{name}: say in its annotation what it answers"
        assert failure == {"$ref": "#/$defs/Failure"}
        assert {} not in parts(told), f"{name}: a part of its answer may be anything"
    assert "did you mean 'data list'?" in invoke("schema", "data", "lst").stderr


def test_a_command_that_says_something_else_is_found(monkeypatch):
    found = Answer({"url": 1}, ())
    monkeypatch.setattr(COMMANDS["validate"], "callback", lambda **_: found)
    words = ["validate", "x", "--json"]
    assert promised(words, CliRunner().invoke(cli.command, words).stdout) is None


def test_the_page_has_the_words_of_the_exit_codes():
    page = (ROOT / "docs" / "commands.md").read_text()
    rows = {int(code): word for code, word in re.findall(r"^\| (\d+) \| `([\w-]+)` \|", page, re.MULTILINE)}
    assert rows == {code: code_of(code) for code in EXIT_CODES}


@pytest.mark.skipif(not {"doctor", "submit"} <= COMMANDS.keys(), reason="rooms were taken out")
@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.compile)])
def test_a_script_reaches_a_validated_record_by_json_alone(tmp_path, monkeypatch, smoke_data, trains):
    """In twelve calls. Otherwise than in the group `compile`, its run is a finished one that it resumes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPEEDRUN_DATA", str(smoke_data.parent))
    calls = 0

    def ask(*words: object) -> Any:
        nonlocal calls
        calls += 1
        argv = [*map(str, words), "--json"]
        return promised(argv, invoke(*argv).stdout)

    assert {"doctor", "data list", "run", "validate", "submit"} <= {*ask("schema")["commands"]}
    assert ask("doctor", "--track", "smoke-cpu")["ready"]
    holding = {one.track.partition("@")[0]: one for one in ask("data", "list")["tracks"]}
    assert holding["smoke-cpu"].complete
    assert ask("recipes")["smoke"]["num_steps"] > 12
    assert "stages.0.num_steps" in ask("recipes", "smoke")
    small = as_words(SMALL)
    assert ask("run", "--track", "smoke-cpu", "--check", *small).fell
    shutil.copytree(FIRST, "runs/first")
    ran = ask("run", *(["--track", "smoke-cpu", *small] if trains else ["--resume", "runs/first"]))
    assert ran["failed_checks"] == {}
    assert ask("validate", ran["record"])["exit_code"] == 0
    described = ask("describe", ran["record"], "--title", "by a script", "--author", "nobody")
    ready = ask("submit", described["record"], "--dry-run", "--missed")
    assert (ready.place.startswith("records/smoke-cpu/"), ready.written) == (True, False)
    refused = ask("submit", "nowhere", "--dry-run")
    assert (refused.code, refused.exit_code) == ("usage", 2)
    assert calls <= 12


def test_a_refusal_that_a_child_has_found_is_an_answer_too(monkeypatch, tmp_path):
    monkeypatch.setattr("speedrun.data.generated.ensure", lambda *_: None)
    monkeypatch.setattr("speedrun.base.subprocesses.run_module", lambda *_: 3)
    found = invoke("batch", "--runs", "2", "--out", str(tmp_path / "new"), "--json")
    assert (found.exit_code, json.loads(found.stdout)["code"]) == (3, "data")
