"""A batch: seeds, looks, killed runs, and the command from the declaration to the card."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from forgeries import BLEW_UP, BROKE, place_of, promised
from record_forge import PROGRAMS, Moments, Spec, declaration, declare, forge, write_run
from small_run import SMALL
from typed import as_words, invoke, speedrun

from speedrun.base import runlog, subprocesses
from speedrun.base.atomic_files import lock_record
from speedrun.base.errors import UsageError
from speedrun.base.sourcefile import RECIPES_VARIABLE
from speedrun.record import batch
from speedrun.record.archive import name_of
from speedrun.record.batch import Look
from speedrun.record.layout import RUNNING, sha256
from speedrun.record.reader import load
from speedrun.record.salvage import salvage
from speedrun.record.summary import assemble
from speedrun.record.validate import validate
from speedrun.train import keeper
from speedrun.train.compile import _latest


@pytest.fixture
def folder(forged) -> Path:
    return forged / "record"


def test_seeds_follow_from_source_and_config():
    seeds = batch.seeds_from("a" * 64, "b" * 64, 50)
    assert seeds == batch.seeds_from("a" * 64, "b" * 64, 50)
    assert seeds[:6] == batch.seeds_from("a" * 64, "b" * 64, 6), "a larger batch begins like a smaller one"
    assert len(set(seeds)) == 50
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert not set(seeds) & set(batch.seeds_from("a" * 64, "c" * 64, 50))


def test_two_looks_test_at_half_the_level_each():
    assert batch.looks(6, None, 0.0013) == (Look(6, 0.01),)
    assert batch.looks(6, 12, 0.0013) == (Look(6, 0.005), Look(12, 0.005))
    assert batch.looks(4, None, 0.0013) == (Look(4, 0.001),)
    assert batch.looks(4, None, None) == (Look(4, 0.01),), "without a known noise there is no rule for few"
    with pytest.raises(UsageError, match="must be larger"):
        batch.looks(6, 6, None)


TWO_LOOKS = promised(looks=(Look(2, 0.0005), Look(4, 0.0005)))


def far(folder: Path) -> Any:
    record: Any = load(folder)
    return batch.batch_status(record.declaration, record.runs, 3.28, 0.01)


def begun(folder: Path, *specs: Spec) -> Path:
    """A batch of four declared runs with a look after two, of which some exist."""
    declare(folder, TWO_LOOKS(declaration(Spec(), (1, 2, 3, 4))))
    for spec in specs:
        write_run(folder, spec)
    return folder


def resumed(folder: Path, *words: str) -> Result:
    return invoke("batch", "--resume", str(folder), *words)


def lost(seed: int, loss: float, **rest) -> Spec:
    return Spec(seed=seed, val_losses=(5.5, 4.0, 3.4, loss), **rest)


WIDE = [lost(1, 3.275), lost(2, 3.274), lost(3, 3.20), lost(4, 3.22)]


@pytest.mark.parametrize(
    ("specs", "losses", "missing", "tested", "passed"),
    [
        ([], (), (1, 2), None, False),
        ([lost(1, 3.25)], (3.25,), (2,), None, False),
        ([lost(1, 3.25), lost(2, 3.24)], (3.25, 3.24), (), 2, True),
        (WIDE[:2], (3.275, 3.274), (3, 4), 2, False),
        (WIDE[:3], (3.275, 3.274, 3.20), (4,), 2, False),
        (WIDE, (3.275, 3.274, 3.20, 3.22), (), 4, False),
        ([lost(1, 3.25), Spec(seed=2, edit_log=BLEW_UP)], (3.25, math.inf), (), 2, False),
        ([lost(1, 3.20), BROKE[0]], (3.20,), (2,), None, False),
        ([lost(1, 3.20), BROKE[0], lost(2, 3.20)], (3.20, 3.20), (), 2, True),
        # The first run of a seed counts, so nobody can repeat a seed until it fits.
        ([lost(1, 3.29), lost(1, 3.20, attempt="b"), lost(2, 3.25)], (3.29, 3.25), (3, 4), 2, False),
    ],
)
def test_how_far_a_batch_of_two_looks_is(folder, specs, losses, missing, tested, passed):
    found = far(begun(folder, *specs))
    assert (found.losses, found.missing, found.passed) == (losses, missing, passed)
    test = found.test and (found.test.rule, found.test.num_runs, found.test.alpha)
    assert test == (tested and ("z", tested, 0.0005))
    assert found.test is None or found.test.p < 1 or math.inf in losses


#: What a power cut or a kill leaves of a log: complete lines, a share of the next one, and other bytes.
CUTS = {
    "before its preflight": (1, 0, b""),
    "in its warm-up": (4, 0.5, b""),
    "in a step": (18, 0.5, b""),
    "zeros": (20, 0, b"\0" * 100 + b"\n"),
    # The loss and the end are one write, so V303 sees no known result.
    "nothing of its result": (-3, 0, b""),
    "half a loss": (-3, 0.5, b""),
    "a loss": (-3, 1, b""),
    "half an end": (-1, 0.5, b""),
}


def kept_at_the_end(log):
    """Insert a checkpoint of the last step before the result."""
    saved = log[-4]._replace(event=runlog.Checkpoint(10, "e" * 16, 0.01), mono_ns=log[-4].mono_ns + 500)
    return [*log[:-3], saved, *log[-3:]]


@pytest.mark.parametrize(("whole", "share", "tail"), CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("edit", [list, kept_at_the_end], ids=["", "with a checkpoint"])
def test_a_killed_run_stays_visible_as_one_that_broke_off(folder, edit, whole, share, tail):
    """It sorts first, but must not lead the record."""
    before = load(forge(folder)).reference_run
    killed = write_run(folder, Spec(seed=1, attempt="0", edit_log=edit))
    log = killed / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    at = whole % len(lines)
    log.write_bytes(b"".join(lines[:at]) + lines[at][: int(len(lines[at]) * share)] + tail)
    assert salvage(folder) == [killed.name]
    assert log.read_bytes() == b"".join(lines[: min(at, len(lines) - 3)])
    assemble(folder)
    report, record = validate(folder, strict=True), load(folder)
    assert not report.having("failed") + report.having("warning")
    assert (record.runs[0].outcome, record.reference_run) == ("aborted", before)
    assert killed.name in (folder / "README.md").read_text()


def test_salvage_removes_programs_of_nobody_and_nothing_else(folder):
    """Nobody can repeat a seed by cutting a byte off its log. A run without a first line goes."""
    forge(folder)
    texts = {"notes/a.txt": "mine", "b.txt": "mine", "tiny-2-00k2/metrics.jsonl": '{"i":0,"t_'}
    for path, text in texts.items():
        (folder / "runs" / path).parent.mkdir(exist_ok=True)
        (folder / "runs" / path).write_text(text)
    (folder / "programs-0123456789abcdef.xz").write_bytes(b"of nobody")
    log = folder / "runs" / "tiny-1-00a1" / "metrics.jsonl"
    raw = log.read_bytes()
    log.write_bytes(raw[:-1])
    assert salvage(folder) == []
    assert log.read_bytes() == raw
    assert [path.name for path in folder.glob("*.xz")] == [name_of(sha256(PROGRAMS))]
    assert {path.name for path in folder.glob("runs/*")} == {"notes", "b.txt", "tiny-1-00a1", "tiny-2-00a2"}
    assert (folder / "runs/notes/a.txt").read_text() == "mine"


def test_who_goes_on_names_the_last_run_that_began(folder):
    """Killed before its clock, one has trained nothing; the checks follow those that have."""

    def killed(name: str, at: type[runlog.Event], *resumes: str) -> None:
        def edit(log: Moments) -> Moments:
            goes_on = [runlog.Resume(run_id, 0, "d" * 16, 0.0, 0, (0, 0)) for run_id in resumes]
            start = place_of(log, runlog.ClockStart)
            log[start:start] = [
                log[start]._replace(event=event, mono_ns=log[start].mono_ns - 9) for event in goes_on
            ]
            return log[: place_of(log, at)]

        write_run(folder, Spec(seed=1, attempt=name, edit_log=edit))

    assert _latest(folder, but="") == ""
    killed("a", runlog.Step)
    first = _latest(folder, but="")
    killed("b", runlog.ClockStart, first)
    assert _latest(folder, but="") == first
    killed("c", runlog.Step, first)
    assert _latest(folder, but="") not in ("", first)


def test_a_log_that_is_damaged_before_its_end_stays_as_it_is(folder):
    """No kill does that, and what is left of it is evidence."""
    forge(folder)
    log = write_run(folder, Spec(seed=1, attempt="0", edit_log=list)) / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)[:-1]
    for at in (0, 9):
        log.write_bytes(raw := b"".join([*lines[:at], b"\0" + lines[at][1:], *lines[at + 1 :]]))
        with pytest.raises(UsageError, match=rf"line {at + 1} is damaged, .*; nothing was changed"):
            salvage(folder)
        assert log.read_bytes() == raw


@pytest.mark.parametrize("fill", [Path.mkdir, os.mkfifo])
def test_a_log_that_is_no_file_is_one_line(folder, fill):
    forge(folder)
    log = min(folder.glob("runs/*")) / "metrics.jsonl"
    log.unlink()
    fill(log)
    with pytest.raises(UsageError, match=r"metrics\.jsonl"):
        salvage(folder)


def test_a_killed_run_that_had_blown_up_is_not_run_again(folder):
    begun(folder, lost(1, 3.25))
    nan = runlog.Error("NonFiniteError", "step 5: loss is nan")
    killed = write_run(folder, Spec(seed=2, edit_log=lambda log: [*log[:20], log[20]._replace(event=nan)]))
    assert salvage(folder) == [killed.name]
    found = far(folder)
    assert (found.missing, found.passed) == ((), False)


def test_one_process_runs_a_batch_and_none_a_damaged_one(folder):
    forge(folder)
    with lock_record(folder, RUNNING):
        result = resumed(folder)
    assert (result.exit_code, "another program writes into it" in result.stderr) == (2, True)
    (folder / "batch.json").write_text("{}")
    result = resumed(folder)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "start anew with 'speedrun batch --runs N'" in result.stderr


#: A child that ignores signals and succeeds.
LATE = "import signal, time; [signal.signal(n, print) for n in (2, 15)]; print('up', flush=True); time.sleep(0.8)"


@pytest.mark.parametrize(
    ("program", "sent", "code"),
    [
        ("import time; print('up', flush=True); time.sleep(60)", signal.SIGTERM, 75),
        (LATE, signal.SIGINT, 75),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None, -9),
        ("import sys; sys.exit(3)", None, 3),
    ],
    ids=["no handler yet", "too late for it", "killed", "ended badly"],
)
def test_a_child_that_was_stopped_is_known_as_such(program, sent, code):
    """A signal while a run writes its end stops the batch, but not the run."""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    if sent is not None:
        assert child.stdout is not None
        child.stdout.readline()
        timer = threading.Timer(0.3, os.kill, (os.getpid(), sent))
        timer.start()
    with child:
        assert subprocesses.wait_for(child) == code


def test_a_child_ends_with_its_parent():
    """Its standard input ends when a parent is killed, however that happens."""
    program = (
        "from speedrun.train import child; child.end_with_parent(print); child.threading.Event().wait(60)"
    )
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(30) == -signal.SIGKILL


def test_a_child_that_ignores_signals_is_killed_by_the_second():
    ignores = "[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]"
    argv = [sys.executable, "-c", f"import signal, time; {ignores}; print(); time.sleep(60)"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, process_group=0) as child:
        assert child.stdout is not None
        child.stdout.readline()
        for delay_s, number in ((0.2, signal.SIGTERM), (0.4, signal.SIGINT)):
            threading.Timer(delay_s, os.kill, (os.getpid(), number)).start()
        assert subprocesses.wait_for(child, kill_after_s=0.2) == 130
        assert child.returncode == -signal.SIGKILL


def test_a_batch_that_blew_up_ends_in_words(folder):
    """After a good run, and as the first run, without a mean to print."""
    begun(folder, lost(1, 3.25), Spec(seed=2, edit_log=BLEW_UP))
    result = resumed(folder)
    assert result.exit_code == 1, result.exception
    assert "one became non-finite" in result.stdout
    assert "V309 failed" in result.stdout
    other = folder.with_name("a folder")
    begun(other, Spec(seed=1, edit_log=BLEW_UP))
    result = resumed(other)
    assert result.exit_code == 1, result.exception
    assert "no run finished" in result.stdout


def test_a_batch_that_was_described_keeps_its_title(folder):
    begun(folder, lost(1, 3.25), lost(2, 3.24))
    for words, title in (([], "tiny on forged@1"), (["--title", "mine"], "mine"), ([], "mine")):
        assert resumed(folder, *words).exit_code == 0
        assert load(folder).about.title == title


def test_a_resumed_batch_trains_what_is_missing(folder, monkeypatch):
    """A run that succeeds and leaves nothing is an error, too."""
    ran: list[str] = []
    begun(folder, lost(1, 3.25))
    own = "mend that, then resume with: env SPEEDRUN_RECIPES=/mine speedrun batch --resume"
    for code, folders, said in ((0, "", "resume with: speedrun batch --resume"), (2, "/mine", own)):
        monkeypatch.setenv(RECIPES_VARIABLE, folders)
        trained = lambda job, *_, code=code, **__: (ran.append(job.config.track) or code, "")  # noqa: E731
        monkeypatch.setattr(keeper, "trained", trained)
        result = resumed(folder)
        assert (result.exit_code, said in result.stderr) == (code or 1, True), result.stderr
    assert ran == ["forged", "forged"]
    write_run(folder, lost(2, 3.24))
    assert resumed(folder).exit_code == 0
    assert len(ran) == 2


@pytest.mark.compile
def test_a_batch_is_declared_run_killed_and_resumed(tmp_path):
    """The log of the second run is cut as by a kill, so its seed runs again."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    here: dict[str, Any] = {"cwd": tmp_path, "env": env}
    words = ["--runs", "2", *as_words(SMALL), "--out", "record"]
    first = speedrun("batch", *words, **here)
    assert first.returncode == 1, first.stderr
    assert "batch   0 of 2 runs" in first.stdout
    assert "batch   2 of 2 runs | mean" in first.stdout
    assert "target 3.15 NOT reached" in first.stdout
    record = tmp_path / "record"
    assert validate(record).exit_code == 0
    promise: Any = load(record).declaration
    killed = next(record.glob(f"runs/smoke-{promise.seeds[1]}-*"))
    log = (killed / "metrics.jsonl").read_bytes()
    (killed / "metrics.jsonl").write_bytes(log[: log.index(b'"clock_stop"')])  # its result was not known yet
    again = speedrun("batch", "--resume", "record", "--json", **here)
    assert f"{killed.name} was killed" in again.stderr
    assert json.loads(again.stdout)["summary"]["num_finished"] == 2
    report = validate(record)
    assert report.exit_code == 0, report.having("failed")
    assert len(list(record.glob("runs/*"))) == 3
