"""Submitting: refused on a failed check or a secret; a reproducible archive; escaped text."""

import io
import json
import os
import subprocess
import tarfile
from functools import partial
from pathlib import Path

import pytest
from click.testing import Result
from forgeries import FORGERIES, preflight
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from record_forge import forge, rank
from small_run import files
from typed import invoke, program

from speedrun.base.console import clean
from speedrun.board import leaks, submission
from speedrun.record.summary import assemble
from speedrun.record.validate import validate

TOKEN = "hf_" + "aZ" * 17
HOSTILE = "a|b<img src=x onerror=1>](javascript:x)\n| x | @all `c` ``d`` #1 fixes #2 https://example.org **"
NAME = "2026-10-02-forged"


@pytest.fixture
def record(forged, monkeypatch) -> Path:
    """An honest batch of two runs, in the folder `runs` of a checkout."""
    monkeypatch.chdir(forged)
    Path("runs").mkdir()
    return forge(Path("runs/first"))


submit = partial(invoke, "submit")


def said(result: Result) -> str:
    """Return everything that was printed; raise what crashed."""
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.stdout + result.stderr


BUILD = {id: build for id, _, build in FORGERIES}


@pytest.mark.parametrize("id", ["V003", "V308"])  # one that fails, and one that warns
def test_a_record_that_fails_or_warns_is_refused_with_the_check_id(record, id):
    folder = Path("runs/forged")
    BUILD[id](folder)
    before = files(Path("runs"))
    result = submit(folder)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{id} " in said(result)
    assert f"'speedrun validate --strict {folder}' says why" in said(result)
    assert files(Path("runs")) == before


def edited_in_place(path: Path, more: str) -> None:
    path.write_text(path.read_text() + more)


def plotted(folder: Path) -> None:
    (folder / "plots").mkdir()
    (folder / "plots" / "loss.png").write_bytes(b"\x89PNG\r\n\x1a\n" + TOKEN.encode())


#: Ways for a token to get into a record that passes every check.
LEAKS = {
    "README.md": lambda folder: edited_in_place(folder / "README.md", f"\n\nlogin with {TOKEN}\n"),
    "about.json": lambda folder: assemble(folder, changes=[f"see https://somebody:{'p4ssword'}@example.org"]),
    "plots/loss.png": plotted,
    "runs/tiny-1-00a1/metrics.jsonl": preflight(device_kind=TOKEN),
}


def test_a_missed_target_needs_the_option(record):
    rank(False)
    missed = forge(Path("runs/missed"), seeds=(1,), val_losses=(5.5, 4.0, 3.4, 3.3))
    refused = submit(missed)
    assert refused.exit_code == 1
    assert "missed its target: mean loss 3.3000, need at most 3.28" in said(refused)
    sent = submit(missed, "--missed", "--dry-run", "--json")
    assert sent.exit_code == 0, said(sent)
    ready = json.loads(sent.stdout)
    assert ready["title"].endswith(", n = 1, missed 3.28")
    assert "| status | `missed` |" in ready["text"]


@pytest.mark.parametrize("path", LEAKS)
def test_a_secret_in_any_file_is_refused_and_never_shown(record, path):
    LEAKS[path](record)
    assert validate(record, strict=True).exit_code == 0, "only the secret is wrong with it"
    before = files(Path("runs"))
    result = submit(record)
    assert result.exit_code == 1
    assert f"secret  {path}:" in result.stdout
    machine = submit(record, "--json")
    report = json.loads(machine.stdout)
    assert (machine.exit_code, report["exit_code"]) == (1, 1)
    (finding,) = [one for one in report["findings"] if one["path"] == path]
    line = files(record)[path].split(b"\n")[finding["line"] - 1]
    assert TOKEN.encode() in line or b"p4ssword" in line
    for shown in (said(result), said(machine)):
        assert TOKEN not in shown
        assert "p4ssword" not in shown
    assert files(Path("runs")) == before


def test_secret_names_are_hidden_and_traces_of_a_person_are_warnings(record):
    (name,) = leaks.in_files({f"runs/{TOKEN}/log.txt": b""})
    assert (name.path, name.secret) == ("runs/(hidden)/log.txt", True)
    edited_in_place(record / "README.md", "\nread from /home/jane/data\n")
    result = submit(record)
    assert result.exit_code == 0, said(result)
    assert "warning README.md:" in result.stdout


@pytest.mark.parametrize(
    "words",
    ["missing", "runs/first --out runs/first/plots", "runs/first --name !!!", "runs/first --out forged.toml"],
)
def test_wrong_usage_exits_with_2(record, words):
    result = submit(*words.split())
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_the_archive_is_the_record_and_reproducible(record):
    first = submit(record)
    assert first.exit_code == 0, said(first)
    archive = Path(f"runs/{NAME}.tar.gz").read_bytes()
    for path in record.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    assert submit(record, "--out", "out").exit_code == 0
    assert Path(f"out/{NAME}.tar.gz").read_bytes() == archive
    assert {path.name for path in Path("out").iterdir()} == {f"{NAME}.pull-request.md", f"{NAME}.tar.gz"}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = tar.getmembers()
        packed = {one.name: reader.read() for one in members if (reader := tar.extractfile(one))}
    assert [member.name for member in members] == sorted(f"{NAME}/{path}" for path in files(record))
    owners = {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode, m.isreg()) for m in members}
    assert owners == {(0, 0, 0, "", "", 0o644, True)}
    assert packed == {f"{NAME}/{path}": content for path, content in files(record).items()}
    assert f"{len(archive):,} bytes" in first.stdout


def test_a_dry_run_prints_the_same_and_writes_nothing(record):
    before = files(Path.cwd())
    dry = json.loads(submit(record, "--dry-run", "--json").stdout)
    assert files(Path.cwd()) == before
    real = json.loads(submit(record, "--json").stdout)
    assert (dry.pop("written"), real.pop("written")) == (False, True)
    assert dry == real
    assert Path(real["text_path"]).read_text() == real["text"]
    assert Path(real["archive"]).stat().st_size == real["archive_bytes"]
    assert "(not written)" in submit(record, "--dry-run").stdout


def test_the_printed_commands_run_and_put_the_record_in_place(record, monkeypatch):
    """With fakes of git, gh and speedrun that log their arguments, and a folder name that attempts an injection."""
    out = Path("a folder; touch broken $(touch broken) 'x'")
    ready = json.loads(submit(record, "--out", out, "--json").stdout)
    assert not Path("records").exists(), "nothing was run"
    for name in ("git", "gh", "speedrun"):
        logs = f'#!/bin/sh\necho {name} >>said; for word; do echo " $word" >>said; done\n'
        program(Path("bin") / name, logs)
    env = {**os.environ, "PATH": f"{Path.cwd() / 'bin'}:{os.environ['PATH']}"}
    script = "\n".join(ready["commands"])
    text, record = f" {out.absolute() / NAME}.pull-request.md", record.absolute()
    other = forge(Path("runs/second").absolute(), step_s=(0.2,) * 10)
    Path("checkout").mkdir()
    monkeypatch.chdir("checkout")
    subprocess.run(["bash", "-eu", "-c", script], check=True, env=env)
    assert not Path("broken").exists()
    place = Path("records/forged") / NAME
    assert ready["place"] == str(place)
    assert files(place) == files(record)
    typed = Path("said").read_text().split("\n")
    assert text in typed
    assert typed.count(f" {ready['title']}") == 2, "of the commit and of the pull request"
    assert typed.index(" commit") < typed.index(" push") < typed.index(" pr")

    again = json.loads(submit(place, "--dry-run", "--json").stdout)["commands"]
    assert not [line for line in again if line.startswith(("mkdir", "tar"))], "it is there already"
    refused = submit(other)
    assert (refused.exit_code, "choose another --name" in said(refused)) == (2, True)
    assert submit(other, "--name", "second").exit_code == 0


def tokens(text: str) -> list[Token]:
    blocks = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    return [token for block in blocks for token in [block, *(block.children or [])]]


def test_hostile_text_is_escaped(record):
    plain = tokens(json.loads(submit(record, "--name", "x", "--dry-run", "--json").stdout)["text"])
    said = {"title": HOSTILE, "parent_record": HOSTILE, "changes": [HOSTILE, "``` x", "- [x]"]}
    assemble(record, authors=[HOSTILE, "`"], **said)
    ready = json.loads(submit(record, "--name", "x", "--dry-run", "--json").stdout)
    found = tokens(ready["text"])
    for kind in ("html_block", "html_inline", "image", "link_open", "em_open", "strong_open", "fence"):
        assert not [token for token in found if token.type == kind]
    for kind in ("tr_open", "td_open", "th_open", "heading_open"):
        assert sum(t.type == kind for t in found) == sum(t.type == kind for t in plain), kind
    code = [token.content for token in found if token.type == "code_inline"]
    assert code.count(clean(HOSTILE)) == 3, "the very characters: title, parent, a change"
    assert f"{clean(HOSTILE)}, `" in code
    assert {"``` x", "- [x]"} <= set(code)
    for token in found:
        if token.type == "text":
            assert not set("@<#|") & set(token.content), "mentions, references and markup only inside of code"
    assert not set("@#<`\n") & set(ready["title"])


@given(st.text(min_size=1))
def test_a_literal_shows_any_text_as_it_is(text):
    wanted = clean(text, limit=200)
    inline = [token for token in tokens(submission.literal(text)) if token.type in ("text", "code_inline")]
    assert [token.content for token in inline] == [wanted if wanted.strip() else "(empty)"]
    table = tokens(f"| a | b |\n|---|---|\n| {submission.cell(text)} | c |\n")
    assert [token.content for token in table if token.type == "td_open" or token.type == "code_inline"][-2:]
    assert sum(token.type == "td_open" for token in table) == 2
