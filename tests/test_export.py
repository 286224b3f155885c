"""Exports: they read back as the record, and contain nothing about the machine that exports."""

import errno
import os
import subprocess
import sys
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from record_forge import forge, install_track

from speedrun.cli.export import command
from speedrun.exchange import classic_log, curve_table, curves, exports, foreign
from speedrun.exchange.curves import Point, Problems
from speedrun.exchange.exports import FORMS, curves_of, export
from speedrun.ground import console, track
from speedrun.ground.errors import StorageError, UsageError
from speedrun.ledger.record import load

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "records" / "smoke-cpu" / "2026-11-21-first"


@pytest.fixture
def record(tmp_path, monkeypatch):
    install_track(tmp_path)
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)
    return load(forge(tmp_path / "record"))


def test_curves_are_those_of_the_log(record):
    """By hand: steps of 0.1 s, a validation every four steps and at the end, the first run's losses 0.01 higher."""
    run = curves_of(record.runs[0])
    assert (run.name, run.num_steps) == ("tiny-1-00a1", 10)
    assert [(point.step, point.loss) for point in run.validations] == [
        (0, 5.5),
        (4, 4.0),
        (8, 3.4),
        (10, 3.25),
    ]
    assert [point.train_time_s for point in run.validations] == pytest.approx([0.0, 0.4, 0.8, 1.0])
    assert [point.step for point in run.train_losses] == list(range(1, 11))
    assert run.train_losses[9].loss == pytest.approx(4.11)


def test_the_text_is_what_a_run_prints(record, tmp_path, capsys):
    paths = export(record, "text", tmp_path / "out")
    for path, run in zip(paths, record.runs, strict=True):
        printer = console.Printer(sys.stdout, verbose=True)
        for line in run.lines:
            printer(line)
        assert path.read_text() == capsys.readouterr().out


def test_classic_logs_read_back_rounded(record, tmp_path):
    paths = export(record, "classic", tmp_path / "out")
    assert [path.name for path in paths] == ["tiny-1-00a1.txt", "tiny-2-00a2.txt"]
    for path, run in zip(paths, record.runs, strict=True):
        found, want = foreign.import_file(path, "x"), curves_of(run)
        assert found.num_problems == 0
        (back,) = found.runs
        for points, wanted in ((back.validations, want.validations), (back.train_losses, want.train_losses)):
            same_points(points, wanted, loss=5.1e-5, time_s=5.1e-4)
    first = "step:0/10 val_loss:5.5000 train_time:0ms step_avg:0.00ms"
    assert first in paths[0].read_text().split("\n"), "the very words of the dialect"


def test_tables_read_back_exactly(record, tmp_path):
    validations, train_losses = export(record, "csv", tmp_path / "out")
    want = [curves_of(run) for run in record.runs]
    found = foreign.import_file(validations, "x")
    assert [run.name for run in found.runs] == [run.name for run in want]
    for back, run in zip(found.runs, want, strict=True):
        same_points(back.validations, run.validations, loss=0, time_s=1e-9)
    for back, run in zip(foreign.import_file(train_losses, "x").runs, want, strict=True):
        same_points(back.train_losses, run.train_losses, loss=0, time_s=1e-9)


def same_points(found, want, *, loss, time_s):
    assert [point.step for point in found] == [point.step for point in want]
    assert [point.loss for point in found] == pytest.approx([point.loss for point in want], abs=loss, rel=0)
    assert [point.train_time_s for point in found] == pytest.approx(
        [point.train_time_s for point in want], abs=time_s, rel=0
    )


_POINTS = st.lists(
    st.tuples(
        st.integers(0, 10**6), st.none() | st.floats(0, 1e3, allow_subnormal=False), st.none() | st.just(0.5)
    ),
    unique_by=lambda point: point[0],
    min_size=1,
    max_size=6,
).map(lambda points: tuple(Point(*point) for point in sorted(points)))


@settings(deadline=None)
@given(_POINTS, _POINTS, st.none() | st.integers(0, 10**6))
def test_what_is_written_is_read(validations, train_losses, num_steps):
    run = curves.context_run("a", num_steps, validations, train_losses)
    written = classic_log.write(run)
    found = classic_log.read("a", written, Problems())
    assert [(p.step, p.loss is None) for p in found[0].validations] == [
        (p.step, p.loss is None) for p in validations
    ]
    assert [p.step for p in found[0].train_losses] == [p.step for p in train_losses]
    (table,) = curve_table.read(curve_table.write([run]), Problems())
    assert (table.name, table.validations) == ("a", validations)


CANARIES = {
    "WANDB_API_KEY": "canary" * 7,
    "HF_TOKEN": "canary-token",
    "USER": "canary-user",
    "HOSTNAME": "canary-host",
}


@pytest.mark.parametrize("form", list(FORMS))
def test_an_export_holds_nothing_about_this_machine(form, tmp_path):
    if form == "wandb":
        pytest.importorskip("wandb", reason="needs wandb")
    home, cwd = tmp_path / "canary-home", tmp_path / "canary-cwd"
    home.mkdir()
    cwd.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "speedrun", "export", str(RECORD), "--to", form, "--out", "out"],
        cwd=cwd,
        env={
            **os.environ,
            **CANARIES,
            "HOME": str(home),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    paths = [path for path in (cwd / "out").rglob("*") if path.is_file()]
    assert len(paths) == len(done.stdout.splitlines())
    host = os.uname().nodename
    # "vm" is in any file of that size.
    machine = ["canary", str(tmp_path), *([host] if len(host) > 6 else [])]
    for path in paths:
        assert not [word for word in machine if word.encode() in path.read_bytes()]
    left = [
        path for folder in (home, cwd) for path in folder.rglob("*") if path.is_file() and path not in paths
    ]
    assert not left, "files beside the export"
    if form == "wandb":  # an offline run holds its numbers as JSON
        raw = paths[0].read_bytes()
        losses = [point.loss for point in curves_of(load(RECORD).runs[0]).validations]
        assert sum(repr(loss).encode() in raw for loss in losses) >= len(losses) - 1, (
            "one may lie across two blocks"
        )


@pytest.mark.parametrize("form", list(FORMS))
def test_a_record_with_a_secret_is_not_exported(form, record, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "forged@1")  # nobody's token, but it stands in the log
    with pytest.raises(UsageError, match=r"holds the value of \$SOME_TOKEN; nothing was written") as error:
        export(load(record.root), form, tmp_path / "out")
    assert "forged@1" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_without_wandb_it_says_what_to_install(record, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="pip install wandb"):
        export(record, "wandb", tmp_path / "out")


def test_an_export_changes_no_existing_file(record, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").touch()
    (tmp_path / "file").touch()
    for out in (record.root / "plots" / "x", tmp_path / "taken", tmp_path / "file" / "x"):
        with pytest.raises(UsageError):
            export(record, "csv", out)
    assert not (record.root / "plots").exists()
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["mine"]


@pytest.mark.parametrize("form", ["csv", "classic"])
def test_where_the_disk_is_full_there_is_a_whole_folder_or_none(form, record, tmp_path, monkeypatch):
    """At every rename and every sync."""
    monkeypatch.setattr(exports, "findings", lambda _: [])  # most of the time, and not the point here
    whole = {path.name: path.read_bytes() for path in export(record, form, tmp_path / "whole")}
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
                export(record, form, out)
                is_over = True
            except StorageError:
                assert not out.with_name(f"{out.name}.partial").exists()
                assert not out.exists() or {path.name: path.read_bytes() for path in out.iterdir()} == whole
    assert moment > 3 * len(whole) + 2


def test_a_record_that_cannot_be_read_is_refused(record, tmp_path):
    (record.root / "runs" / "tiny-1-00a1" / "metrics.jsonl").write_text("{")
    with pytest.raises(UsageError, match="cannot be read whole"):
        export(load(record.root), "csv", tmp_path / "out")


def test_the_folder_is_named_after_the_record(record, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, ["record", "--to", "csv"], catch_exceptions=False)
    assert result.stdout.split() == ["record-csv/validations.csv", "record-csv/train_losses.csv"]
