"""Islands as real processes, which are killed, stopped and told to leave. In the group that takes minutes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_run import runs_of
from test_islands import SMALLER

from speedrun.base import runlog, subprocesses
from speedrun.record.validate import validate

ray = pytest.importorskip("ray", reason="needs Ray: scripts/test.sh --compile installs it")
pytestmark = pytest.mark.compile


def speedrun(*words: str, **environment: str) -> subprocess.Popen[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "speedrun", *words], env={**own, **environment}, **pipes)


def run(out: Path, *words: str, steps: int = 60, **environment: str) -> subprocess.Popen[str]:
    changed = {**SMALLER, "stages.0.num_steps": str(steps)}
    settings = [word for name, value in changed.items() for word in ("--set", f"{name}={value}")]
    return speedrun("islands", "run", "--out", str(out), "--every", "5", *settings, *words, **environment)


def said(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=300)
    return process.returncode, stdout, stderr


def rounds(out: Path) -> list[runlog.Round]:
    logs = sorted(out.glob("runs/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    return [line.event for log in logs for line in runlog.read(log) if isinstance(line.event, runlog.Round)]


def wait_for(found: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while not found():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def actors(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The islands of a command that brought its own Ray."""
    below = psutil.Process(process.pid).children(recursive=True)
    return sorted((one for one in below if "ray::Actor" in " ".join(one.cmdline())), key=lambda one: one.pid)


def islands(out: Path) -> list[runlog.Island]:
    return [one for each in runs_of(out) for one in each.of(runlog.Island)]


def replayed(out: Path) -> None:
    code, stdout, stderr = said(speedrun("islands", "replay", str(out)))
    assert code == 0, stdout + stderr
    assert validate(out).having("failed") == []


def test_a_killed_island_costs_its_round_and_another_takes_its_place(tmp_path):
    out = tmp_path / "out"
    process = run(out, "--islands", "3", "--json", steps=600)  # a newcomer starts in 20 s
    wait_for(lambda: len(rounds(out)) > 1, process)
    below = actors(process)
    below[-1].kill()
    code, stdout, stderr = said(process)
    assert code == 1, stderr
    assert json.loads(stdout)["record"] == str(out), "nothing else is on standard output"
    gone = [one for one in islands(out) if one.why]
    assert len(gone) == 1
    assert "died" in gone[0].why
    after = [one for one in rounds(out) if one.version == gone[0].version]
    assert [len(one.works) for one in after] == [2]
    newcomers = {one.island for one in islands(out) if not one.why and one.version > gone[0].version}
    works = [work for one in rounds(out) for work in one.works]
    assert newcomers & {work.island for work in works if not work.refused}, "its answer counts"
    leases = [work.lease for work in works if not work.refused]
    assert len(leases) == len(set(leases))
    replayed(out)
    _, left = psutil.wait_procs(below, timeout=60)  # one that compiles ends later than Ray
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE], "Ray ends with the command"


def test_an_island_that_is_late_is_refused_and_comes_back(tmp_path):
    out = tmp_path / "out"
    process = run(out, "--islands", "3", "--deadline", "3", steps=100)
    wait_for(lambda: len(rounds(out)) > 1, process)
    actors(process)[-1].suspend()
    wait_for(lambda: any(len(one.works) == 2 for one in rounds(out)), process)
    actors(process)[-1].resume()
    code, _, stderr = said(process)
    assert code == 1, stderr
    works = [work for one in rounds(out) for work in one.works]
    (late,) = [work for work in works if work.refused]
    assert late.refused.startswith("stale")
    assert [work for work in works if work.island == late.island and work.version > late.version]
    replayed(out)


def test_an_island_leaves_on_request_after_its_answer(tmp_path):
    out = tmp_path / "out"
    process = run(out, "--islands", "3")
    wait_for(lambda: len(rounds(out)) > 1, process)
    actors(process)[-1].terminate()
    code, _, stderr = said(process)
    assert code == 1, stderr
    (gone,) = [one for one in islands(out) if one.why]
    assert gone.why == "it received SIGTERM"
    works = [work for one in rounds(out) for work in one.works]
    last = max(work.version for work in works if work.island == gone.island)
    assert gone.version - last in (0, 1)
    assert [len(one.works) for one in rounds(out) if one.version <= last] == [3] * (last + 1), (
        "nothing is lost"
    )
    replayed(out)


@pytest.mark.parametrize("point", ["round", "snapshot"])
def test_a_driver_that_is_killed_goes_on(point, tmp_path):
    out = tmp_path / "out"
    code, *_ = said(run(out, "--islands", "2", steps=25, SPEEDRUN_FAULTS=f"{point}@3=kill"))
    assert code == subprocesses.shell_code(-signal.SIGKILL)
    assert len(rounds(out)) == 2
    code, _, stderr = said(speedrun("islands", "run", "--resume", str(out)))
    assert code == 1, stderr
    assert [one.version for one in rounds(out)] == [0, 1, 2, 3, 4]
    shutil.rmtree(f"{out}.islands")
    code, stdout, _ = said(speedrun("islands", "replay", str(out)))
    assert (code, stdout.splitlines()[-1]) == (0, "replay   10 answers repeated, 0 differences")


@contextmanager
def head(token: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        "--head",
        "--node-ip-address=127.0.0.1",
        f"--port={port}",
        "--num-cpus=2",
        "--include-dashboard=false",
    ]
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*ray, "start", *words, "--block"], env=environment, **quiet)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.5)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def test_a_ray_that_runs_already_asks_for_its_token(tmp_path):
    token = "k" * 40
    with head(token) as address:
        code, _, stderr = said(run(tmp_path / "a", "--address", address))
        assert (code, "$RAY_AUTH_TOKEN is not set" in stderr) == (2, True)
        code, _, stderr = said(run(tmp_path / "a", "--address", address, RAY_AUTH_TOKEN="w" * 40))
        assert (code, "may differ from the head's" in stderr) == (2, True)
        assert not (tmp_path / "a").exists()
        given = run(tmp_path / "a", "--address", address, "--islands", "2", steps=10, RAY_AUTH_TOKEN=token)
        code, _, stderr = said(given)
        assert code == 1, stderr
        assert len(rounds(tmp_path / "a")) == 2
    code, _, stderr = said(run(tmp_path / "b", "--address", address, RAY_AUTH_TOKEN=token))
    assert (code, "it does not answer" in stderr) == (2, True)


def test_a_batch_loses_a_node_and_no_run(tmp_path):
    token, out = "k" * 40, tmp_path / "batch"
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    with head(token) as address:
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--num-cpus=1"]
        second = subprocess.Popen(
            [*ray, "--block"], env={**os.environ, **environment}, stdout=subprocess.DEVNULL
        )
        changed = {**SMALLER, "stages.0.num_steps": "200"}
        words = [word for name, value in changed.items() for word in ("--set", f"{name}={value}")]
        process = speedrun("batch", "--runs", "3", "--on", address, "--out", str(out), *words, **environment)

        def training() -> list[psutil.Process]:
            every = psutil.process_iter(["cmdline"])  # None for one that has just ended
            return [one for one in every if "ray::_train" in " ".join(one.info["cmdline"] or [])]

        wait_for(lambda: len(training()) == 2, process)
        below = psutil.Process(second.pid).children(recursive=True)
        (raylet,) = [one for one in below if one.name() == "raylet"]
        raylet.kill()
        code, stdout, stderr = said(process)
        second.wait(60)
        assert not training()
    assert code == 1, stderr  # so few steps miss the target
    assert "is lost, or fails" in stdout
    runs = runs_of(out)
    assert len({run.start.seed for run in runs}) == len(runs) == 3
    assert all(run.finished for run in runs)
    assert [one.check.id for one in validate(out).having("failed")] == []
