"""Exports: they read back as the record, and contain nothing about the machine that exports."""

import csv
import errno
import os
import subprocess
import sys
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from small_run import FIRST

from speedrun.base import console, runlog
from speedrun.base.errors import StorageError, UsageError
from speedrun.board import exports, foreign_logs
from speedrun.board.exports import FORMS, export
from speedrun.record.logged_run import loss_of
from speedrun.record.reader import Record, load

ROOT = Path(__file__).parents[2]


@pytest.fixture
def record(record) -> Record:
    return load(record)


def test_the_text_is_what_a_run_prints(record, tmp_path, capsys):
    paths = export(record, "text", tmp_path / "out")
    for path, run in zip(paths, record.runs, strict=True):
        printer = console.Printer(sys.stdout)
        for line in run.lines:
            printer(line)
        assert path.read_text() == capsys.readouterr().out


def test_tables_read_back_exactly(record, tmp_path):
    validations, train_losses = export(record, "csv", tmp_path / "out")
    found = foreign_logs.import_file(validations, "x")
    with train_losses.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for run, back in zip(record.runs, found.runs, strict=True):
        vals = [event for line in run.lines if isinstance(event := line.event, runlog.Val)]
        expected = [(val.step, loss_of(val)) for val in vals]
        assert [(point.step, point.loss) for point in back.validations] == expected
        assert [point.train_time_s for point in back.validations] == pytest.approx([0.0, 0.4, 0.8, 1.0])
        steps = [row for row in rows if row["log"] == run.folder]
        assert [float(row["train_loss"]) for row in steps] == [step.loss for step in run.steps]
        times_s = [float(row["train_time_ms"]) / 1e3 for row in steps]
        assert times_s == pytest.approx([step.train_time_s for step in run.steps], abs=1e-9)
        assert back.name == run.folder


CANARIES = {"WANDB_API_KEY": "canary" * 7, "HF_TOKEN": "canary", "USER": "canary", "HOSTNAME": "canary"}


def test_an_export_holds_nothing_about_this_machine(tmp_path):
    home, cwd = tmp_path / "canary-home", tmp_path / "canary-cwd"
    home.mkdir()
    cwd.mkdir()
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, **CANARIES, "HOME": str(home), "PYTHONPATH": path}
    script = "import sys\nfrom speedrun.cli import command\nfor form in sys.argv[2:]:\n"
    script += "    command(['export', sys.argv[1], '--to', form, '--out', form], standalone_mode=False)\n"
    argv = [sys.executable, "-c", script, FIRST, *FORMS]
    done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    paths = [path for form in FORMS for path in (cwd / form).rglob("*") if path.is_file()]
    assert len(paths) == len(done.stdout.splitlines())
    host = os.uname().nodename
    # "vm" is in any file of that size.
    machine = ["canary", str(tmp_path), *([host] if len(host) > 6 else [])]
    for path in paths:
        assert not [word for word in machine if word.encode() in path.read_bytes()]
    everything = [path for folder in (home, cwd) for path in folder.rglob("*") if path.is_file()]
    assert sorted(everything) == sorted(paths), "no files beside the export"


def test_a_record_with_a_secret_is_not_exported(record, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "forged@1")  # nobody's token, but it stands in the log
    with pytest.raises(UsageError, match=r"holds the value of \$SOME_TOKEN; nothing was written") as error:
        export(load(record.root), "csv", tmp_path / "out")
    assert "forged@1" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_changes_no_file(record, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").touch()
    (tmp_path / "file").touch()
    for out in (record.root / "plots" / "x", tmp_path / "taken", tmp_path / "file" / "x"):
        with pytest.raises(UsageError):
            export(record, "csv", out)
    assert not (record.root / "plots").exists()
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["mine"]
    (record.root / "runs" / "tiny-1-00a1" / "metrics.jsonl").write_text("{")
    with pytest.raises(UsageError, match="cannot be read whole"):
        export(load(record.root), "csv", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_where_the_disk_is_full_there_is_a_whole_folder_or_none(record, tmp_path, monkeypatch):
    """At every rename and every sync."""
    monkeypatch.setattr(exports.leaks, "refuse_secrets", lambda *_: None)  # it takes most of the time
    whole = {path.name: path.read_bytes() for path in export(record, "csv", tmp_path / "whole")}
    moment, is_over = 0, False
    while not is_over:
        moment += 1
        out, calls = tmp_path / f"{moment}", count(1)

        def strike(real, *args, calls=calls, moment=moment):
            if next(calls) == moment:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        with monkeypatch.context() as disk:
            for name in ("rename", "replace", "fsync"):
                disk.setattr(os, name, partial(strike, getattr(os, name)))
            try:
                export(record, "csv", out)
                is_over = True
            except StorageError:
                assert not out.with_name(f"{out.name}.partial").exists()
                assert not out.exists() or {path.name: path.read_bytes() for path in out.iterdir()} == whole
    assert moment > 3 * len(whole) + 2


@pytest.mark.parametrize("folder", ["record", "record.checkpoints"])
def test_a_record_and_its_checkpoints_hold_nothing_else(record, tmp_path, folder):
    with pytest.raises(UsageError, match="is inside the record"):
        export(record, "csv", record.root.with_name(folder) / "50")
