"""A disk that is full, or a process that is killed, at any moment of writing: what is there stays whole."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from record_forge import Spec, forge, install_track, write_run

from speedrun.ground import track
from speedrun.ground.errors import DataError, SpeedrunError, StorageError, UsageError
from speedrun.ground.lock import LOCK, lock_folder
from speedrun.ground.wholefile import PARTIAL, make_folder, write_whole

HERE = Path(__file__).parent


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


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, StorageError), (errno.EIO, StorageError), (errno.EACCES, UsageError)]
)
def test_a_folder_that_cannot_be_made_is_a_fault_of_the_disk_or_of_the_user(
    tmp_path, monkeypatch, number, kind
):
    def rename(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(SpeedrunError) as caught:
        make_folder(tmp_path / "out", {"source.txt": b""})
    assert type(caught.value) is kind
    assert not list(tmp_path.iterdir())


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
    log = (killed / "metrics.jsonl").read_bytes()
    (killed / "metrics.jsonl").write_bytes(log[: len(log) // 2])
    return root


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (["describe", "records/forged/record", "--title", "new", "--author", "ada"], 13),
        pytest.param(["batch", "--resume", "batch"], 17, marks=pytest.mark.compile),
        pytest.param(["leaderboard", "build"], 17, marks=pytest.mark.compile),
        pytest.param(
            ["submit", "records/forged/record", "--out", "sent", "--name", "x"], 1, marks=pytest.mark.compile
        ),
        pytest.param(["plot", "records/forged/record"], 3, marks=pytest.mark.compile),
    ],
    ids=lambda value: f"{value[0]} {value[-1]}" if isinstance(value, list) else "",
)
def test_the_next_call_mends_what_the_disk_did_to_the_last(failing_disk, checkout, tmp_path, words, step):
    (tmp_path / "work").mkdir()
    asked = {
        "tracks": tmp_path,
        "template": checkout,
        "work": tmp_path / "work",
        "words": words,
        "step": step,
    }
    complaints, blows = answer(failing_disk, asked, tmp_path)
    assert blows >= 3  # a submission is two files
    assert not complaints, "\n".join(complaints)


def answer(failing_disk: Path, asked: dict[str, Any], tmp_path: Path) -> Any:
    """What struck.py says."""
    request = tmp_path / "request.json"
    request.write_text(json.dumps(asked, default=str))
    done = subprocess.run(
        [sys.executable, HERE / "struck.py", request],
        env=os.environ | {"LD_PRELOAD": str(failing_disk)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("odd", [os.mkfifo, lambda path: path.symlink_to(path.with_name("precious"))])
def test_what_lies_in_the_place_of_a_lock_or_a_new_file_is_not_written_through(tmp_path, odd):
    """A pipe would never open, and a link leads to another file."""
    (precious := tmp_path / "precious").write_text("kept")
    odd(tmp_path / LOCK)
    with pytest.raises(DataError, match=r"No such device|Too many levels"), lock_folder(tmp_path):
        pass
    odd(tmp_path / ("file" + PARTIAL))
    write_whole(tmp_path / "file", b"new")
    assert (precious.read_text(), (tmp_path / "file").read_bytes()) == ("kept", b"new")
