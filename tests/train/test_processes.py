"""Real processes on loopback: they train what one does, refuse to disagree, and stop together."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from small_run import SMALL, children_of, runs_of
from typed import as_words, free_port

from speedrun.base import errors, processes, runlog, subprocesses
from speedrun.base.errors import UsageError
from speedrun.train import connect, run_config
from speedrun.train.run_config import RunConfig

LONG = SMALL | {"stages.0.num_steps": "400"}
#: Row 21 and its like: a process that is lost is noticed after 10 s without a heartbeat.
QUICK = ["--heartbeat", "10", "--meet-within", "60"]
#: Exit codes of a process that lost another one: a transfer fails, or JAX misses the heartbeat.
ENDED = (1, subprocesses.shell_code(-signal.SIGABRT))


def lines(out: Path) -> list[Any]:
    """The events of the newest run, whole lines only."""
    paths = sorted(out.glob("runs/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [line.event for line in runlog.read(paths[-1])] if paths else []


def of(kind: type, out: Path) -> list[Any]:
    return [event for event in lines(out) if isinstance(event, kind)]


def started(argv: list[str]) -> subprocess.Popen[str]:
    pipe, tests = subprocess.PIPE, str(Path(__file__).parents[1])  # of `shared_run`
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), tests]))}
    return subprocess.Popen([sys.executable, "-m", *argv], stdout=pipe, stderr=pipe, text=True, env=env)


def ends(running: list[subprocess.Popen[str]], timeout: float = 600) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each; none is left."""
    try:
        told = [one.communicate(timeout=timeout) for one in running]
    finally:
        for one in running:
            one.kill()
    return [(one.returncode, *texts) for one, texts in zip(running, told, strict=True)]


def shared(configs: list[RunConfig], folder: Path) -> list[subprocess.Popen[str]]:
    port, running = free_port(), []
    for i, config in enumerate(configs):
        path = folder / f"config-{i}.json"
        path.write_bytes(msgspec.json.encode(config, enc_hook=str))
        where = [f"127.0.0.1:{port}", str(len(configs)), str(i), "60"]
        running.append(started(["shared_run", str(path), *where]))
    return running


def launched(out: Path, data: Path, *more: str) -> list[subprocess.Popen[str]]:
    return together(["--data", str(data), "--out", str(out), *as_words(LONG), *more])


def together(words: list[str]) -> list[subprocess.Popen[str]]:
    argv = ["speedrun", "run", *words, *QUICK, f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"]
    return [started([*argv, "--process", str(i)]) for i in range(2)]


def wait_for_steps(running: list[subprocess.Popen[str]], out: Path, number: int) -> None:
    while len(of(runlog.Step, out)) < number:
        assert all(one.poll() is None for one in running), ends(running)
        threading.Event().wait(0.05)


@pytest.fixture
def config(tmp_path, smoke_data) -> RunConfig:
    return RunConfig("smoke-cpu", tmp_path / "out", overrides=SMALL, data=smoke_data)


#: Python reads this file when it starts.
NODES = """
import json, socket, sys
words = sys.orig_argv
if "shared_run" in words or "speedrun.train.child" in words:
    process = int(words[-2]) if "shared_run" in words else json.load(open(words[-3]))["group"]["index"]
    socket.gethostname = lambda: f"node{{process // {per_node}}}"
"""


def with_start(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    (folder / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[2]}")


@pytest.mark.compile
@pytest.mark.parametrize(
    ("count", "per_node", "replicas", "asked"),
    [(2, 2, 1, None), (4, 4, 1, None), (2, 1, 2, None), (4, 2, 2, None), (4, 4, 4, 4)],
)
def test_several_processes_and_nodes_train_what_one_does(
    count, per_node, replicas, asked, trained, tmp_path, smoke_data, monkeypatch
):
    """Each node has a replica by default. The run compares the final states."""
    with_start(monkeypatch, tmp_path, NODES.format(per_node=per_node))
    config = RunConfig("smoke-cpu", tmp_path / "out", overrides=SMALL, data=smoke_data, replicas=asked)
    for code, stdout, stderr in ends(shared([config] * count, tmp_path)):
        assert code == 0, stderr
        assert "Gloo" not in stdout
    out, alone = config.out, trained.out
    got, want = ([step.loss for step in of(runlog.Step, one)] for one in (out, alone))
    np.testing.assert_allclose(got[:2], want[:2], rtol=1e-6)
    # Muon makes unit steps of gradients that are rounding at first; one process with 4 devices is as far from 8.
    np.testing.assert_allclose(got, want, rtol=2e-3)
    first, last = of(runlog.Val, out)
    first_alone, last_alone = of(runlog.Val, alone)
    assert (first.step, first.tokens, last.step) == (0, 131072, 12)
    assert first.loss == pytest.approx(first_alone.loss, rel=1e-6)
    assert last.loss == pytest.approx(last_alone.loss, rel=2e-3)
    mine, other = runs_of(out)[-1], runs_of(alone)[-1]
    assert mine.of(runlog.WarmupStart) == other.of(runlog.WarmupStart)
    assert (mine.data, mine.end.first_batch_sha256) == (other.data, other.end.first_batch_sha256)
    assert mine.start.source_sha256 == other.start.source_sha256
    assert mine.preflight.num_devices == other.preflight.num_devices
    assert (mine.start.config_sha256 == other.start.config_sha256) is (replicas == 1)
    assert [(hw.num_processes, hw.num_replicas) for hw in of(runlog.Preflight, out)] == [(count, replicas)]
    names = [type(event).__name__ for event in lines(out)]
    assert "Compile" not in names[names.index("ClockStart") : names.index("ClockStop")]
    assert len(list(out.glob("runs/*"))) == 1


DRIFTS = """
import sys
if "shared_run" in sys.orig_argv and sys.orig_argv[-2] == "1":
    from speedrun.train import run
    run.state_hash = lambda state: "0" * 16
"""


@pytest.mark.compile
def test_replicas_that_end_with_other_states_are_refused(tmp_path, smoke_data, monkeypatch):
    with_start(monkeypatch, tmp_path, DRIFTS)
    config = RunConfig("smoke-cpu", tmp_path / "out", overrides=SMALL, data=smoke_data, replicas=2)
    (code, _, said), (other_code, _, _) = ends(shared([config] * 2, tmp_path))
    assert (code, other_code) == (1, 1)
    assert said.startswith("error: process 1 has the final state of hash 0000000000000000, process 0 has ")
    assert "replicas drifted apart" in said
    assert runs_of(config.out)[-1].outcome == "aborted"


@pytest.mark.compile
def test_a_signal_to_one_stops_both_at_the_same_step_with_one_checkpoint(
    tmp_path, smoke_data, trained, monkeypatch
):
    """As two nodes with a replica each."""
    with_start(monkeypatch, tmp_path, NODES.format(per_node=1))
    out = tmp_path / "out"
    running = launched(out, smoke_data, "--checkpoint-every", "1000")
    wait_for_steps(running, out, 3)
    running[1].send_signal(signal.SIGTERM)
    (code, _, stderr), (other_code, _, other_stderr) = ends(running)
    assert (code, other_code) == (75, 75), stderr
    assert stderr.count("error: stopped by a signal to one of 2 processes") == 1
    assert "Traceback" not in stderr + other_stderr
    steps = of(runlog.Step, out)
    kept = [path.name for path in run_config.folder_of(out).iterdir() if path.name.isdigit()]
    assert kept == [str(steps[-1].step + 1)]
    assert [hw.num_replicas for hw in of(runlog.Preflight, out)] == [2]
    got, want = ([step.loss for step in of(runlog.Step, one)[:3]] for one in (out, trained.out))
    np.testing.assert_allclose(got, want, rtol=1e-5)  # few steps or many: the schedule begins alike
    assert runs_of(out)[-1].outcome == "aborted"


@pytest.mark.compile
@pytest.mark.parametrize(("sent", "replicas"), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_run_that_was_stopped_ends_with_the_bytes_of_one_that_was_not(tmp_path, smoke_data, sent, replicas):
    out = tmp_path / "out"
    few = SMALL | {"stages.0.num_steps": "60"}
    where = ["--data", str(smoke_data), "--out", str(out), "--replicas", str(replicas)]
    running = together([*where, *as_words(few), "--checkpoint-every", "1000"])
    wait_for_steps(running, out, 5)
    for one in running:
        one.send_signal(sent)
    assert [code for code, *_ in ends(running)] == [75, 75]
    (code, _, stderr), (other_code, *_) = ends(together(["--resume", str(out)]))
    assert (code, other_code) == (1, 0), stderr  # 60 steps of a tiny model miss the target
    unbroken = tmp_path / "unbroken"
    same = {"data": smoke_data, "checkpoint_every": 1000, "replicas": replicas}
    config = RunConfig("smoke-cpu", unbroken, overrides=few, **same)
    assert [code for code, *_ in ends(shared([config] * 2, tmp_path))] == [0, 0]
    assert [hw.num_replicas for hw in of(runlog.Preflight, out)] == [replicas]
    assert runs_of(out)[-1].end.final_hash == runs_of(unbroken)[-1].end.final_hash


@pytest.mark.compile
@pytest.mark.parametrize(("which", "sent"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_the_others_end_when_a_process_is_lost(which, sent, tmp_path, smoke_data):
    out = tmp_path / "out"
    running = launched(out, smoke_data)
    wait_for_steps(running, out, 3)
    (trains,) = children_of(running[which].pid)
    os.kill(trains, sent)
    try:
        assert running[1 - which].wait(300) in ENDED
    finally:
        for one in running:
            one.kill()
        ends(running)
    steps = [step.step for step in of(runlog.Step, out)]
    assert steps == list(range(len(steps)))
    assert len(steps) >= 3


#: What process 1 does at a step.
FAILS = """
import json, sys
words = sys.orig_argv
if "speedrun.train.child" in words and json.load(open(words[-3]))["group"]["index"] == 1:
    from speedrun.train import run
    def fail(executables, step, log):
        if step == 5:
            {what}
    run.log_stage_change = fail
"""


@pytest.mark.compile
def test_a_worker_with_an_error_of_its_own_tells_it(tmp_path, smoke_data, monkeypatch):
    with_start(monkeypatch, tmp_path, FAILS.format(what='raise RuntimeError("a worker of this test")'))
    (code, *_), (worker_code, _, stderr) = ends(launched(tmp_path / "out", smoke_data))
    assert code in ENDED
    assert worker_code == 1
    assert stderr.startswith("process 1: error: Traceback")
    assert "RuntimeError: a worker of this test" in stderr


@pytest.mark.compile
def test_a_worker_that_hangs_ends_both_at_their_deadlines_with_their_stacks(
    tmp_path, smoke_data, monkeypatch
):
    """Its heartbeat continues, so JAX does not notice; each process has a keeper."""
    with_start(monkeypatch, tmp_path, FAILS.format(what="import time; time.sleep(600)"))
    out = tmp_path / "out"
    running = launched(out, smoke_data, "--deadline", "step=5")
    for code, _, stderr in ends(running):
        assert code == errors.HANG, stderr
        assert stderr.count("error: step has taken 5.") == 1
    assert lines(out)[-1].kind == "Hang"
    stood = [(tmp_path / f"out.process-{i}.stacks.txt").read_text() for i in range(2)]
    assert ["sitecustomize.py" in text for text in stood] == [False, True]


def test_a_cluster_is_known_by_its_variables_and_nodes_by_the_machines_of_their_processes(monkeypatch):
    assert connect.num_nodes(["a 1"] * 4) == 1
    assert connect.num_nodes(["a 1", "a 1", "b 2", "b 2"]) == 2
    assert connect.num_nodes(["a 1", "b 1", "c 1"]) == 3  # containers with names of their own
    for machines, found in (
        (["a 1", "b 2", "a 1", "b 2"], "1 on a, 1 on b, 1 on a, 1 on b"),
        (["a 1", "a 1", "b 2"], "2 on a, 1 on b"),
    ):
        with pytest.raises(UsageError, match=f"in their order: {found}; need as many on each node"):
            connect.num_nodes(machines)
    for name in ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    assert connect.find_group(None, None, None) is None
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-2]")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert connect.find_group(None, None, None) is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert connect.find_group(None, None, None) == connect.Group(2, 1, found_by="SLURM")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    pod = connect.find_group("pod-0:1234", 2, None)
    assert pod == connect.Group(2, 1, "pod-0:1234", "flags and Kubernetes")
    assert connect.find_group("pod-0:1234", 1, 0) is None
    for flags in (("a:1", None, None), ("a", 2, 0), ("a:99999", 2, 0), ("a:1", 2, 2)):
        with pytest.raises(UsageError, match="need"):
            connect.find_group(*flags)


def test_processes_that_were_told_of_other_numbers_are_refused(monkeypatch):
    """Each notices before it waits for one that may not exist."""
    held = {f"speedrun machine/{i}": f"{count} node boot" for i, count in enumerate((3, 2, 3))}
    service = SimpleNamespace(key_value_set=held.__setitem__, blocking_key_value_get=lambda key, _: held[key])
    monkeypatch.setattr(processes, "client", lambda: service)
    monkeypatch.setattr(processes, "_group", (3, 2, 1))
    said = "--processes 3 in process 2 and 2 in process 1; need one number for all"
    with pytest.raises(UsageError, match=said):
        connect._machines(1)


@pytest.mark.compile
@pytest.mark.parametrize(("index", "taken"), [(0, False), (1, False), (0, True)])
def test_a_process_does_not_wait_for_ever_for_the_others(index, taken):
    """Nobody is at its address. A taken port is an error at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not taken:
            server.close()
        running = started(["shared_run", "nothing.json", f"127.0.0.1:{port}", "2", str(index), "3"])
        ((code, _, stderr),) = ends([running])
    assert code == 2
    assert ("Address already in use" if taken else f"met at 127.0.0.1:{port} within 3 s") in stderr
    assert stderr.count("\n") == 1


def disagree(tmp_path: Path, first: RunConfig, second: RunConfig, exit_code: int = 2) -> str:
    """The error of process 0. The other one is silent, and nothing is written."""
    (code, _, said), (other_code, _, other_said) = ends(shared([first, second], tmp_path))
    assert (code, other_code) == (exit_code, exit_code), (said, other_said)
    assert other_said == ""
    assert said.count("\n") == 1
    assert not first.out.exists()
    return said


@pytest.mark.compile
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"seed": 1}, "process 1 has seed 1, process 0 has 0;"),
        ({"overrides": SMALL | {"config.mlp_dim": "64"}}, "process 1 has settings of sha256"),
    ],
)
def test_processes_with_other_flags_are_refused(tmp_path, config, changes, what):
    said = disagree(tmp_path, config, msgspec.structs.replace(config, **changes))
    assert said.startswith(f"error: {what}")


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "what"), [("val_000000", "validation tokens"), ("train_000001", "training shards")]
)
def test_processes_with_other_data_are_refused(tmp_path, config, smoke_data, name, what):
    other = tmp_path / "data"
    other.mkdir()
    for path in smoke_data.iterdir():
        content = bytearray(path.read_bytes())
        if name in path.name:
            content[2000] ^= 1
        (other / path.name).write_bytes(bytes(content))
    if what == "training shards":  # that other data were made is known by its manifest
        manifest = json.loads((other / "manifest.json").read_text())
        manifest["shards"]["smoke_train_000001.bin"]["sha256"] = "0" * 64
        (other / "manifest.json").write_text(json.dumps(manifest))
    said = disagree(tmp_path, config, msgspec.structs.replace(config, data=other))
    assert said.startswith(f"error: process 1 has {what} ")


@pytest.mark.compile
def test_what_one_process_refuses_ends_all_with_its_code(tmp_path, config):
    nothing = msgspec.structs.replace(config, data=tmp_path / "nothing")
    assert disagree(tmp_path, config, nothing, 3).startswith("error: process 1: ")
