"""A separate process sends the log of a run to wandb; wandb cannot affect the run."""

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading

import pytest
from small_run import SMALL, runs_of
from typed import as_words, invoke

from speedrun.base import subprocesses
from speedrun.base.clock import Stopwatch
from speedrun.base.errors import Terminated
from speedrun.board import exports

KEY = "canary00" * 5

#: A wandb that writes down what it is told; `{fault}` stands at the beginning of a run, `{stall}` at its end.
FAKE = """
import json, os, time
class CommError(Exception): ...
def Settings(**settings): return settings
def tell(*what):
    with open(os.environ["TOLD"], "a") as file:
        print(json.dumps(what), file=file)
def init(**words):
    {fault}
    tell("init", words["id"], words["project"], words["group"], words["mode"])
    return Run(words["id"])
def teardown(): ...
class Run:
    def __init__(self, id): self.id = id
    def log(self, row, step): tell("log", self.id, step, row)
    def finish(self, exit_code):
        {stall}
        tell("finish", self.id, exit_code)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Install a fake wandb; return a function that reads what it was sent."""
    site, told = tmp_path / "site", tmp_path / "told"
    site.mkdir()
    for name, value in {"TOLD": str(told), "WANDB_API_KEY": KEY}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *sys.path]))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(exports, "_LEAVE_S", 300.0)  # it ends by itself, later on a busy machine

    def make(fault: str = "pass", stall: str = "pass"):
        (site / "wandb.py").write_text(FAKE.format(fault=fault, stall=stall))
        return lambda: [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []

    return make


def test_what_grows_in_the_log_arrives(record, fake, tmp_path, capfd):
    """A log written in pieces arrives whole. An earlier run is not sent."""
    told = fake()
    growing = tmp_path / "growing"
    old, new = sorted((record / "runs").iterdir())
    shutil.copytree(old, growing / "runs" / old.name)
    raw = (new / "metrics.jsonl").read_bytes()
    with exports.relayed(growing, "mine"):
        (growing / "runs" / new.name).mkdir()
        with (growing / "runs" / new.name / "metrics.jsonl").open("wb", buffering=0) as log:
            for part in (raw[:200], raw[200:3000], raw[3000:]):
                log.write(part)
                threading.Event().wait(0.7)
    events = [json.loads(line)["event"] for line in raw.splitlines()]
    begun, *rows, ended = told()
    assert begun == ["init", new.name, "mine", "growing", "online"]
    assert ended == ["finish", new.name, 0]
    found = {(step, key): number for _, _, step, row in rows for key, number in row.items()}
    losses = {event["step"] + 1: event["loss"] for event in events if event["ev"] == "step"}
    assert {step: number for (step, key), number in found.items() if key == "train/loss"} == losses
    validations = {event["step"]: event["loss"] for event in events if event["ev"] == "val"}
    scored = {step: number for (step, key), number in found.items() if key == "val/loss"}
    assert scored == pytest.approx(validations)
    (held,) = (event["val"] for event in events if event["ev"] == "held_out")
    assert found[held["step"], "held_out/loss"] == pytest.approx(held["loss"])
    assert "warning" not in capfd.readouterr().err


def sent(record):
    """Send a record whose folder appears during the block."""
    fresh = record.with_name("fresh")
    with exports.relayed(fresh, "mine"):
        record.rename(fresh)
    return fresh


@pytest.mark.parametrize(
    ("fault", "said"),
    [("raise CommError('no server')", "no server"), ("os.kill(os.getpid(), 9)", "exit code -9 (signal 9)")],
)
def test_a_wandb_that_fails_is_one_line(record, fake, capfd, fault, said):
    told = fake(fault)
    fresh = sent(record)
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line
    assert line.startswith("warning: wandb: ")
    assert line.endswith(f"speedrun export {fresh} --to csv")
    assert not told()


@pytest.mark.parametrize("fails", [False, True])
def test_a_wandb_that_never_ends_is_left_behind(record, fake, tmp_path, capfd, monkeypatch, fails):
    told = fake(stall="time.sleep(600)")
    monkeypatch.setattr(*((subprocesses, "_HASTE_S") if fails else (exports, "_LEAVE_S")), 1.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "site"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "site"))
    fresh, watch = record.with_name("fresh"), Stopwatch()
    with contextlib.suppress(Terminated), exports.relayed(fresh, "mine"):
        record.rename(fresh)
        while not told() or told()[-1][0] != "log":
            threading.Event().wait(0.1)
        if fails:
            raise Terminated
    assert watch.seconds < 300, "half of what it stalls"
    (line,) = capfd.readouterr().err.splitlines()
    assert "it did not end within 1 s after the run; the record holds all numbers: " in line
    left = {path.name for path in (tmp_path / "site").iterdir()} - {"__pycache__"}
    assert left == {"wandb.py"}, "its scratch files"


def test_a_secret_in_what_would_be_sent_stops_it(record, fake, capfd):
    told = fake()
    for log in record.glob("runs/*/metrics.jsonl"):
        log.write_bytes(log.read_bytes().replace(b'"tiny"', f'"{KEY}"'.encode(), 1))
    sent(record)
    line = capfd.readouterr().err
    assert "holds the value of $WANDB_API_KEY; nothing of it is sent" in line
    assert KEY not in line
    assert not told()


def test_told_not_to_send_it_does_not(record, fake, capfd, monkeypatch):
    told = fake()
    monkeypatch.setenv("WANDB_MODE", "offline")
    with exports.relayed(record, "mine"):
        pass
    assert "WANDB_MODE=offline, which sends nothing" in capfd.readouterr().err
    assert not told()


@pytest.mark.compile
def test_a_run_is_the_same_with_the_real_wandb_and_a_dead_server(trained, smoke_data, tmp_path, monkeypatch):
    """State and losses are those of a run without it, and its record has no key."""
    pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    out = tmp_path / "with"
    done = invoke("run", "--data", smoke_data, "--out", out, *as_words(SMALL), "--wandb", "mine")
    assert done.exit_code == 1, done.output
    (run,), (without,) = runs_of(out), runs_of(trained.out)
    assert run.end.final_hash == without.end.final_hash
    assert "warning: wandb: " in done.stderr
    left = [path for path in out.rglob("*") if path.is_file()]
    assert not [path for path in left if KEY.encode() in path.read_bytes()]
