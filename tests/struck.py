"""Strikes commands at what they change on disk, and says what the next documented command did not mend.

    LD_PRELOAD=failing_disk.so python struck.py REQUEST.json

Each command runs in a fork of this process. It is struck at every change, each time in a fresh copy of a folder. Prints
a JSON list of complaints, and the number of blows.
"""

import ctypes
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from speedrun import cli
from speedrun.ground import clock, track

TIMEOUT_S = 120
DOES = ("kill", "full", "sync")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Blow(NamedTuple):
    """At which change of a command the disk fails, and how."""

    at: int = 0  #: 0: at none
    does: str = "kill"


NONE = Blow()


def forked(function: Callable[[], object], argv: list[str]) -> int:
    """The id of a process that calls a function and ends with its exit code."""
    if pid := os.fork():
        return pid
    clock._IMPORT_NS, sys.argv = clock.now().mono_ns, argv
    code = None
    try:
        function()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        if code is None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(99 if code is None else code)


def code_of(pid: int) -> int:
    """The exit code of a process; below zero, the signal that ended it."""

    def give_up(*_: object) -> NoReturn:
        os.kill(pid, signal.SIGKILL)
        raise TimeoutError(f"no end after {TIMEOUT_S} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TIMEOUT_S)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        signal.alarm(0)


class Caller:
    """Calls commands in a folder, on a disk that fails."""

    def __init__(self, place: Path, work: Path) -> None:
        self.place, self._count, self._said = place, work / "count", work / "said"
        self._arm = ctypes.CDLL(None).disk_arm

    def __call__(self, words: list[str], blow: Blow = NONE) -> int:
        """The exit code of a command."""
        self._count.write_bytes(bytes(8))
        return code_of(forked(lambda: self._called(words, blow), ["speedrun", *words]))

    def _called(self, words: list[str], blow: Blow) -> None:
        out = os.open(self._said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(self.place)
        does, millionths = DOES.index(blow.does), 500_000  # of the bytes of that write are written
        path, count = str(self.place).encode(), str(self._count).encode()
        self._arm(path, count, ctypes.c_long(blow.at), does, ctypes.c_long(millionths))
        cli.command(words)

    @property
    def changes(self) -> int:
        """How many the last command made."""
        return int.from_bytes(self._count.read_bytes(), "little")

    @property
    def said(self) -> str:
        return self._said.read_text()


class Blows:
    """A command, and a disk that fails it."""

    def __init__(self, template: Path, words: list[str], work: Path) -> None:
        self._template, self._words, self.blows = template, words, 0
        self._call = Caller(work / "place", work)
        self._copy()
        self._code = self._call(words)
        self._whole = files(self._call.place)

    def _copy(self) -> None:
        shutil.rmtree(self._call.place, ignore_errors=True)
        shutil.copytree(self._template, self._call.place)

    def complaints(self, does: str, *, step: int) -> Iterator[str]:
        """Of every `step`-th change."""
        at = 1
        while True:
            self._copy()
            code = self._call(self._words, Blow(at, does))
            if self._call.changes < at:
                return
            self.blows, said, name = at, self._call.said, f"{does} {at}"
            if code not in ((-signal.SIGKILL,) if does == "kill" else (4, self._code)):
                yield f"{name}: exit code {code}: {said}"
            if does != "kill" and code == 4 and ("Traceback" in said or said.count("error: ") != 1):
                yield f"{name}: not one line: {said}"
            if (code := self._call(self._words)) != self._code:
                yield f"{name}: then exit code {code}: {self._call.said}"
            now = files(self._call.place)
            if wrong := {path for path in now.keys() | self._whole if now.get(path) != self._whole.get(path)}:
                yield f"{name}: then wrong: {sorted(wrong)}"
            at += step


def main(asked: dict[str, Any]) -> None:
    """Prints what went wrong."""
    track.TRACKS_DIR = Path(asked["tracks"])
    work = Path(asked["work"])
    blows = Blows(Path(asked["template"]), asked["words"], work)
    complaints = [one for does in DOES for one in blows.complaints(does, step=asked["step"])]
    sys.stdout.write(json.dumps([complaints, blows.blows]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
