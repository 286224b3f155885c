"""A disk that is full, or a process that is killed, at any moment of writing: what is there stays whole."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from record_forge import Spec, forge, install_track, write_run

from speedrun import track

HERE = Path(__file__).parent
PREP = ["--source", "rows.jsonl", "--tokenizer", "bytes", "--out", "shards", "--shard-tokens", "5000"]


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
    (root / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} words " * 9}) + "\n" for i in range(200))
    )
    return root


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (["describe", "records/forged/record", "--title", "new", "--author", "ada"], 5),
        pytest.param(["batch", "--resume", "batch"], 1, marks=pytest.mark.slow),
        pytest.param(["leaderboard", "build"], 1, marks=pytest.mark.slow),
        pytest.param(
            ["submit", "records/forged/record", "--out", "sent", "--name", "x"], 1, marks=pytest.mark.slow
        ),
        pytest.param(["plot", "records/forged/record"], 1, marks=pytest.mark.slow),
        pytest.param(["data", "prep", *PREP], 1, marks=pytest.mark.slow),
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
    assert blows > 10
    assert not complaints, "\n".join(complaints)
