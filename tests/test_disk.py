"""A disk that is full, or a process that is killed, at any moment of writing: what is there stays whole."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from record_forge import Spec, forge, install_track, write_run
from test_train import SMALL

from speedrun import track
from speedrun.checkpoint import folder_of
from speedrun.clock import Stopwatch
from speedrun.ledger.format import RunFile, decode
from speedrun.ledger.validate import validate

HERE = Path(__file__).parent
SOAK_S = float(os.environ.get("SPEEDRUN_SOAK_S", "300"))


@pytest.fixture(scope="module")
def failing_disk(tmp_path_factory) -> Path:
    """The library to preload."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("disk") / "failing_disk.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-o", library, HERE / "failing_disk.c", "-ldl"], check=True
    )
    return library


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A record of a batch, its board, and one more run of it that was killed."""
    install_track(tmp_path)
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)
    root = tmp_path / "checkout"
    (root / "records" / "forged").mkdir(parents=True)
    forge(root / "records" / "forged" / "record")
    shutil.copytree(root / "records" / "forged" / "record", root / "batch")
    killed = write_run(root / "batch", Spec(seed=2, attempt="k"))
    (killed / "run.json").unlink()
    log = (killed / "metrics.jsonl").read_bytes()
    (killed / "metrics.jsonl").write_bytes(log[: len(log) // 2])
    return root


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (["describe", "records/forged/record", "--title", "new", "--author", "ada"], 9),
        pytest.param(["batch", "--resume", "batch"], 17, marks=pytest.mark.slow),
        pytest.param(["leaderboard", "build"], 17, marks=pytest.mark.slow),
        pytest.param(
            ["submit", "records/forged/record", "--out", "sent", "--name", "x"], 1, marks=pytest.mark.slow
        ),
        pytest.param(["plot", "records/forged/record"], 17, marks=pytest.mark.slow),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_next_call_mends_what_the_disk_did_to_the_last(failing_disk, checkout, tmp_path, words, step):
    (tmp_path / "work").mkdir()
    request = tmp_path / "request.json"
    asked = {
        "tracks": tmp_path,
        "template": checkout,
        "work": tmp_path / "work",
        "words": words,
        "step": step,
    }
    request.write_text(json.dumps(asked, default=str))
    done = subprocess.run(
        [sys.executable, HERE / "struck.py", request],
        env=os.environ | {"LD_PRELOAD": str(failing_disk)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    complaints, blows = json.loads(done.stdout)
    assert blows >= 10
    assert not complaints, "\n".join(complaints)


@pytest.mark.slow
def test_a_soak_of_runs_struck_at_any_write(failing_disk, tmp_path, smoke_data):
    """Killed, or out of space, at a random change in a run, its checkpoints or its record; then it ends."""
    rnd, watch, rounds = random.Random(0), Stopwatch(), 0
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    begin = ["--data", str(smoke_data), "--checkpoint-every", "5", *settings]

    def ran(out: Path, words: list[str], at: int = 0, does: str = "kill") -> tuple[int, str]:
        (tmp_path / "count").write_bytes(bytes(8))
        env = {"LD_PRELOAD": failing_disk, "DISK_PATH": out, "DISK_COUNT": tmp_path / "count"}
        env |= {"DISK_AT": at, "DISK_DOES": does}
        argv = [sys.executable, "-m", "speedrun", "run", *words]
        env = os.environ | {name: str(value) for name, value in env.items()}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    def hashes(out: Path) -> set[str]:
        runs = [decode(path.read_bytes(), RunFile) for path in out.glob("runs/*/run.json")]
        return {run.final_hash for run in runs if run.outcome == "finished"}

    whole = tmp_path / "whole"
    assert ran(whole, ["--out", str(whole), *begin])[0] == 1, "twelve steps do not reach the target"
    changes = int.from_bytes((tmp_path / "count").read_bytes(), "little")
    while watch.seconds < SOAK_S:
        rounds += 1
        out, at, does = tmp_path / f"out{rounds}", rnd.randint(1, changes), rnd.choice(["kill", "full"])
        code, said = ran(out, ["--out", str(out), *begin], at, does)
        assert code in ((1, 4) if does == "full" else (1, -9)), (at, does, said)
        assert "Traceback" not in said, (at, does, said)
        if code != 1:
            begun = folder_of(out).joinpath("run.json").exists()
            code, said = ran(out, ["--resume", str(out)] if begun else ["--out", str(out), *begin])
        assert (code, "Traceback" in said) == (1, False), (at, does, said)
        assert hashes(out) == hashes(whole), (at, does)
        failed = {result.check.id for result in validate(out).having("failed")}
        assert failed == {result.check.id for result in validate(whole).having("failed")}, (at, does)
        left = [path.name for path in tmp_path.rglob("*") if path.name.endswith((".partial", ".lock"))]
        assert not left, (at, does)
    assert rounds
