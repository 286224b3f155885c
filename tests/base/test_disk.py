"""A full disk, or a kill, at any moment of writing: existing files stay whole."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from record_forge import Spec, forge, write_run
from small_run import SMALL
from typed import as_words

from speedrun.base import track
from speedrun.base.atomic_files import LOCK, PARTIAL, lock_folder, make_folder, write_whole
from speedrun.base.errors import DataError, SpeedrunError, StorageError, UsageError
from speedrun.commands import is_here

HERE = Path(__file__).parents[1]
SOAK_S = float(os.environ.get("SPEEDRUN_SOAK_S", "300"))
SOAK_SEED = int(os.environ.get("SPEEDRUN_SOAK_SEED", "0"))


@pytest.fixture(scope="module")
def failing_disk(tmp_path_factory) -> Path:
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
def checkout(forged) -> Path:
    root = forged / "checkout"
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
        pytest.param(["leaderboard", "build"], 11, marks=pytest.mark.compile),
        pytest.param(
            ["submit", "records/forged/record", "--out", "sent", "--name", "x"], 1, marks=pytest.mark.compile
        ),
        pytest.param(["plot", "records/forged/record"], 3, marks=pytest.mark.compile),
    ]
    if is_here("board")
    else [(["batch", "--resume", "batch"], 17)],
    ids=lambda value: f"{value[0]} {value[-1]}" if isinstance(value, list) else "",
)
def test_the_next_call_mends_what_the_disk_did_to_the_last(failing_disk, checkout, tmp_path, words, step):
    (tmp_path / "work").mkdir()
    asked = {"tracks": tmp_path, "template": checkout, "work": tmp_path / "work"}
    asked |= {"words": words, "step": step}
    complaints, blows = answer(failing_disk, asked, tmp_path)
    assert not complaints, "\n".join(complaints)
    assert blows >= 3  # a submission is two files


def answer(failing_disk: Path, asked: dict[str, Any], tmp_path: Path) -> Any:
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


def tiny() -> str:
    text = (track.TRACKS_DIR / "smoke-cpu.toml").read_text()
    text = re.sub(r"\[data.sha256\]\n(.+\n)*", "", text)
    text = text.replace("smoke_", "tiny_").replace("smoke-cpu", "tiny")
    changes = {"folder": '"tiny"', "val_tokens": 8192, "loss": 8.0, "num_devices": 2, "min_runs": 2}
    for name, value in (
        changes | {"held_tokens": 8192, "val_lines": 2100, "shard_lines": 2000, "num_shards": 1}
    ).items():
        text = re.sub(rf"^{name} = .*", f"{name} = {value}", text, flags=re.MULTILINE)
    return text


@pytest.mark.compile
@pytest.mark.skipif(not is_here("board"), reason="it strikes commands of the board, too")
def test_a_soak_of_commands_struck_at_any_byte(failing_disk, tmp_path):
    """Killed, out of space, or refused by fsync; then the next documented command loses nothing and ends well."""
    (tmp_path / "work").mkdir()
    shutil.copytree(track.TRACKS_DIR, tmp_path / "tracks")
    (tmp_path / "tracks" / "tiny.toml").write_text(tiny())
    asked = {"tracks": tmp_path / "tracks", "work": tmp_path / "work", "data": tmp_path / "data"}
    asked |= {"settings": as_words(SMALL), "seed": SOAK_SEED, "seconds": SOAK_S}
    complaints, blows = answer(failing_disk, asked, tmp_path)
    sys.stderr.write(f"\nseed {SOAK_SEED}: {blows}\n")
    assert not complaints, f"seed {SOAK_SEED}\n" + "\n".join(complaints)
    assert sum(blows.values()) > SOAK_S / 30


@pytest.mark.parametrize("odd", [os.mkfifo, lambda path: path.symlink_to(path.with_name("precious"))])
def test_what_lies_in_the_place_of_a_lock_or_a_new_file_is_not_written_through(tmp_path, odd):
    """A pipe blocks, and a link leads to another file."""
    (precious := tmp_path / "precious").write_text("kept")
    odd(tmp_path / LOCK)
    with suppress(DataError), lock_folder(tmp_path):
        pass
    odd(tmp_path / ("file" + PARTIAL))
    write_whole(tmp_path / "file", b"new")
    assert (precious.read_text(), (tmp_path / "file").read_bytes()) == ("kept", b"new")
