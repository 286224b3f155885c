"""Strikes a command at every change that it makes on disk, and says what its next call did not mend.

    LD_PRELOAD=failing_disk.so python struck.py REQUEST.json

Each blow falls on a fork of this process, in a fresh copy of a folder. Afterwards the same command is called again,
on a sound disk: it must end as if nothing had happened. Prints a JSON list of complaints, and the number of blows.
"""

import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from speedrun import cli, track


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Blows:
    """A command, and a disk that fails it."""

    def __init__(self, template: Path, words: list[str], work: Path) -> None:
        self._template, self._words = template, words
        self._place, self._count, self._said = work / "place", work / "count", work / "said"
        self._arm = ctypes.CDLL(None).disk_arm
        self._count.write_bytes(bytes(8))
        self._copy()
        self._code = self._called()
        self._whole = files(self._place)

    def _copy(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.copytree(self._template, self._place)

    def _called(self, at: int = 0, *, full: bool = False) -> int:
        """The exit code of the command, struck at some change; below zero, the signal that ended it."""
        if pid := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out = os.open(self._said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(self._place)
        if at:
            self._count.write_bytes(bytes(8))
            self._arm(str(self._place).encode(), str(self._count).encode(), ctypes.c_long(at), int(full))
        try:
            cli.command(self._words)
        except SystemExit as end:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(end.code or 0))
        os._exit(99)

    def complaints(self, *, full: bool, step: int) -> Iterator[str]:
        """Of every `step`-th change."""
        at = 1
        while True:
            self._copy()
            code = self._called(at, full=full)
            if int.from_bytes(self._count.read_bytes(), "little") < at:
                return
            self.blows, said, name = at, self._said.read_text(), f"{'full' if full else 'kill'} {at}"
            if code not in ((4, self._code) if full else (-signal.SIGKILL,)):
                yield f"{name}: exit code {code}: {said}"
            if full and code == 4 and ("Traceback" in said or len(said.splitlines()) > 1):
                yield f"{name}: more than a line: {said}"
            if (code := self._called()) != self._code:
                yield f"{name}: then exit code {code}: {self._said.read_text()}"
            now = files(self._place)
            if wrong := {path for path in now.keys() | self._whole if now.get(path) != self._whole.get(path)}:
                yield f"{name}: then wrong: {sorted(wrong)}"
            at += step


def main(request: Path) -> None:
    """Prints what went wrong."""
    asked = json.loads(request.read_text())
    track.TRACKS_DIR = Path(asked["tracks"])
    blows = Blows(Path(asked["template"]), asked["words"], Path(asked["work"]))
    found = [one for full in (False, True) for one in blows.complaints(full=full, step=asked["step"])]
    sys.stdout.write(json.dumps([found, blows.blows]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
