"""Where a record's source runs: what a stranger's code can read, write and reach, and what comes back."""

import io
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import FIRST

from speedrun.base import output, track
from speedrun.base.errors import DataError, SpeedrunError, UsageError
from speedrun.data import shards
from speedrun.record.examine import sandbox
from speedrun.record.examine.replay import _owners
from speedrun.record.examine.rerun import Rerun, _bring, _without_text

needs_sandbox = pytest.mark.skipif(
    sandbox.problem() is not None, reason=f"namespaces cannot be had here: {sandbox.problem()}"
)


def in_there(code: str, tmp_path: Path, **changes) -> subprocess.CompletedProcess[str]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    said, argv = io.StringIO(), [sys.executable, "-S", "-c", code]
    given: dict[str, Any] = {"environment": {"PATH": os.environ["PATH"]}, "wall_s": 60.0, "stdout": said}
    ended = sandbox.run(argv, scratch, **{**given, "unsafe": False, **changes})
    return subprocess.CompletedProcess(argv, ended, said.getvalue(), "")


def test_a_source_does_not_hear_that_its_reader_has_left(tmp_path):
    """`speedrun reproduce RECORD | head -1`: an older source ends with 120 where it cannot write."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "print('all', flush=True); print('of it')"
    assert in_there(code, tmp_path, stdout=output.unfailing(writer), unsafe=True).returncode == 0
    os.close(writer)


HARMLESS = {
    "environment of others": """
import glob
for path in glob.glob("/proc/[0-9]*/environ"):
    try: print(open(path).read())
    except OSError: pass
""",
    "files of others": """
import os
for folder, inside, names in os.walk("/"):
    inside[:] = set(inside) - {"proc", "sys", "usr", "lib", "site-packages"}
    for name in names:
        if name == "canary": print(open(os.path.join(folder, name)).read())
""",
    "its own environment": "import os; print(dict(os.environ))",
}


@needs_sandbox
@pytest.mark.parametrize("what", HARMLESS)
def test_a_stranger_cannot_read(what, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_CANARY", "tweet-tweet")
    (tmp_path / "canary").write_text("tweet-tweet")
    done = in_there(HARMLESS[what], tmp_path)
    assert done.returncode == 0
    assert "tweet" not in done.stdout


@needs_sandbox
def test_a_stranger_cannot_write_outside_its_folder(tmp_path):
    places = [str(tmp_path / "x"), "/x", "/tmp/x", "/usr/x", f"{sys.prefix}/x", "/dev/x"]
    code = f"""
for path in {places}:
    try: open(path, "w").write("x")
    except OSError: continue
    print(path)
open("mine", "w").write("x")
"""
    done = in_there(code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "scratch" / "mine").read_text() == "x"
    assert not (tmp_path / "x").exists()


_TRIES = r"""
import fcntl, os, socket, termios
def tell(what, attempt):
    try:
        attempt()
    except OSError:
        return
    print("could", what)
def written(path):
    os.close(os.open(path, os.O_WRONLY))
tell("set the kernel", lambda: written("/proc/sys/kernel/core_pattern"))
tell("change a device", lambda: os.chmod("/dev/null", 0o666))
tell("make a control group", lambda: os.mkdir("/sys/fs/cgroup/stranger"))
for number in 0, 1, 2:
    tell("reach a terminal", lambda: fcntl.ioctl(number, termios.TIOCGPGRP, bytes(4)))
tell("find its terminal", lambda: written("/dev/tty"))
for host in "127.0.0.1", "1.1.1.1":
    tell("reach a network", lambda: socket.create_connection((host, 22), timeout=2))
tell("be another user", lambda: os.setuid(12345))
tell("change its root", lambda: os.chroot("."))
print("\x1b[2Jwords\x1b]0;title\x07")
"""


@needs_sandbox
@pytest.mark.parametrize("gpu", [False, True])
def test_a_stranger_reaches_neither_the_kernel_nor_the_terminal(tmp_path, gpu):
    done = in_there(_TRIES, tmp_path, gpu=gpu)
    assert (done.returncode, done.stdout) == (0, "\\x1b[2Jwords\\x1b]0;title\\x07\n")


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "found"),
    [("import sys; sys.exit(5)", 5), ("import os; os.kill(os.getpid(), 15)", -15), ("x" * 9, 1)],
)
def test_the_exit_code_is_the_strangers(code, found, tmp_path):
    assert in_there(code, tmp_path).returncode == found


@needs_sandbox
def test_a_stranger_ends_with_a_referee_that_is_killed(tmp_path):
    sleeper = f"import time; open('began', 'w').close(); time.sleep(600.{os.getpid()})"
    script = f"""
import pathlib, sys
from speedrun.record.examine import sandbox
sandbox.run([sys.executable, "-S", "-c", {sleeper!r}], pathlib.Path({str(tmp_path)!r}), environment={{}},
            stdout=sys.stdout, wall_s=600.0, unsafe=False)
"""
    referee = subprocess.Popen([sys.executable, "-c", script])
    while not (tmp_path / "began").exists():
        assert referee.poll() is None
        time.sleep(0.05)
    referee.kill()
    referee.wait()
    argv = ["pgrep", "-f", f"sleep.600.{os.getpid()}"]
    for _ in range(600):
        if subprocess.run(argv, capture_output=True, check=False).returncode:
            return
        time.sleep(0.1)
    raise AssertionError("it goes on")


@needs_sandbox
def test_a_stranger_that_never_ends_is_ended(tmp_path):
    with pytest.raises(SpeedrunError, match="was still running after 2 s"):
        in_there("while True: pass", tmp_path, wall_s=2.0)


def test_without_a_sandbox_nothing_runs_unless_the_user_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "problem", lambda: "unshare: Operation not permitted")
    with pytest.raises(UsageError, match=r"Operation not permitted.*container.*--unsafe-here"):
        in_there("print(1)", tmp_path)
    shutil.rmtree(tmp_path / "scratch")
    assert sandbox.protections(unsafe=True).startswith("NO SANDBOX (unshare: Operation not permitted)")
    assert in_there("print(1)", tmp_path, unsafe=True).stdout == "1\n"


def test_only_what_a_record_may_hold_is_brought_back(tmp_path):
    made, out = tmp_path / "made" / "record", tmp_path / "out" / "mine"
    (made / "runs" / "smoke-0-abcd").mkdir(parents=True)
    out.parent.mkdir()
    (made / "about.json").write_text("{}")
    (made / "tool.sh").write_text("#!/bin/sh\n")
    (made / "source.txt").symlink_to("/etc/hosts")
    os.mkfifo(made / "batch.json")
    (made.parent / "record-of-another").mkdir()
    (made.parent / "record-of-another" / "about.json").write_text("{}")
    _bring(made, out)
    found = {path.relative_to(out.parent).as_posix() for path in out.parent.rglob("*") if path.is_file()}
    assert found == {"mine/about.json"}


def test_checkpoints_that_are_no_files_are_refused(tmp_path):
    fills: dict[str, Callable[[Path], object]] = {
        "pipe": os.mkfifo,
        "deep": lambda path: path.write_text("[" * 100_000),
        "endless": lambda path: path.symlink_to("/dev/zero"),
    }
    for name, fill in fills.items():
        facts = tmp_path / name / "8" / "facts" / "metadata"
        facts.parent.mkdir(parents=True)
        (tmp_path / name / "1²").mkdir()
        fill(facts)
        with pytest.raises(UsageError, match="no checkpoints of a finished run"):
            _owners([tmp_path / name], {})


def test_source_sees_no_validation_text(smoke_data, tmp_path):
    rules, data = track.load("smoke-cpu").data, Path(shutil.copytree(smoke_data, tmp_path / "data"))
    (data / "validation.txt").write_text("the text")
    others = _without_text(data, tmp_path / "seen", rules)
    shard, blank = (shards.open_track(folder, rules).val[0] for folder in (data, tmp_path / "seen"))
    assert blank.num_tokens == shard.num_tokens
    assert not blank.read(0, blank.num_tokens).any()
    hidden = {path.name for path in data.iterdir()} - {path.name for path in others}
    assert hidden == {shard.path.name, "validation.txt"}


def test_damaged_shards_of_the_referee_are_not_held_against_a_record(smoke_data, tmp_path):
    shutil.copytree(smoke_data, tmp_path / "damaged")
    shard = min((tmp_path / "damaged").glob("*train*.bin"))
    raw = bytearray(shard.read_bytes())
    raw[1024 + 200] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(DataError, match=f"{shard.name}: .*; the run read one with sha256"):
        Rerun(FIRST, tmp_path / "damaged", io.StringIO()).check_data()
