"""Strikes commands at what they change on disk, and says what the next documented command did not mend.

    LD_PRELOAD=failing_disk.so python struck.py REQUEST.json

Each command runs in a fork of this process. `Blows` strikes one command at every change, each time in a fresh copy of
a folder. `Soak` strikes random commands at random bytes, in one folder where records gather. Prints a JSON list of
complaints, and the number of blows.
"""

import ctypes
import importlib
import io
import json
import os
import random
import re
import runpy
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

from small_run import files

from speedrun import cli
from speedrun.base import clock, provenance, subprocesses, track
from speedrun.base.sourcefile import join_source
from speedrun.data import synthetic
from speedrun.record import git_history, layout
from speedrun.record.reader import load
from speedrun.record.source import split_source
from speedrun.record.validate import validate

TIMEOUT_S = 600
MOST_TRIES = 9
MOST_RECORDS = 5  #: that the soak keeps
DOES = ("kill", "full", "sync")
#: How a command ends that was struck; its child may have been, too.
CODES = {"kill": (-signal.SIGKILL, 128 + signal.SIGKILL), "full": (4,), "sync": (4,)}
LEFT = (".partial", ".lock")  #: names of what commands leave that were killed
_UNDONE = (
    r"\.checkpoints/|\.partial(/|$)|\.lock$"  #: what need not be as it was: nobody was told that it is done
)
ASSEMBLED = ("about.json", "README.md")  #: what assembling writes, in this order
COPIED = "V312"  #: the soak makes the same runs again and again, and copies records
# The commits of forged records are nowhere, as in a clone without history: V406 skips them.
git_history.files_at = lambda *_: None
git_history.is_complete = lambda: False
OWNERS = b"These words are the owner's.\n"


class Blow(NamedTuple):
    """At which change of a command the disk fails, and how."""

    at: int = 0  #: 0: at none
    does: str = "kill"
    share: float = 0.5  #: of the bytes of that write are written


NONE = Blow()


class Fork:
    """A function in a process of its own; also in place of a `Popen` of one of our modules."""

    def __init__(self, argv: list[str], **_: object) -> None:
        self.stdout, self.stderr = io.StringIO(), io.StringIO()  # nothing to read: it prints where we do
        words = argv[argv.index("-m") + 1 :]
        read, write = os.pipe()

        def run() -> None:
            os.setpgid(0, 0)
            os.close(write)
            os.dup2(read, 0)
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)

        self.pid = forked(run, words)
        os.close(read)
        self.stdin = os.fdopen(write, "w")

    def wait(self, _timeout_s: float | None = None) -> int:
        return code_of(self.pid)

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


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


def closure(real: Callable[..., str], modules: list[str], extra: list[Path]) -> str:
    """A record's source, also with a track that lies outside of the checkout."""
    texts = {f"speedrun/tracks/{path.name}": path.read_text() for path in extra}
    return join_source({**split_source(real(modules, [])), **texts})


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
        does, millionths = DOES.index(blow.does), int(blow.share * 1_000_000)
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


class Round:
    """One command of the soak, the blows that fall on it, and the commands that mend it."""

    def __init__(self, words: list[str], out: str = "", rewrites: tuple[str, ...] = ()) -> None:
        self.words, self.out = words, out  #: `out`: the record that it makes or completes, if it does
        self.rewrites = rewrites  #: which files of those that were there
        self.begun = words
        #: How the names begin of what lies beside records that may be deleted.
        self.abandoned: tuple[str, ...] = ()
        self.tries: list[tuple[str, Blow]] = []
        self.seen: list[dict[str, bytes]] = []  #: the whole folder: before, and after each try

    def lost(self) -> Iterator[str]:
        """What was there, and is not any more or was not for a moment."""
        before, *_, final = self.seen
        for path, held in before.items():
            mine = path in self.rewrites or (self.out and path.startswith(self.out + "/"))
            for number, now in enumerate(self.seen):
                if path not in now or now[path] not in (held, final.get(path) if mine else held):
                    yield f"after try {number}: {path} is not what it was"
                elif held.endswith(OWNERS) and not now[path].endswith(OWNERS):
                    yield f"after try {number}: {path} lost its owner's words"
        for number, now in enumerate(self.seen):
            for path in filter(lambda path: not re.search(_UNDONE, path), now):
                if what := self._torn(path, now, final):
                    yield f"after try {number}: {path} {what}"

    def _torn(self, path: str, now: dict[str, bytes], final: dict[str, bytes]) -> str:
        """What is wrong with a file that appeared meanwhile."""
        folder, _, name = path.rpartition("/")
        same = "" if final.get(path) == now[path] else "is another one at the end"
        if name == "metrics.jsonl":
            return same if ended(now, folder) else _lost_lines(f"{folder}/metrics.jsonl", now, final)
        if name in ("batch.json", "source.txt"):
            return same
        return "" if now[path].endswith((b"\n", b"}", b">", b"YZ")) or name.endswith(".png") else "is torn"


def told(log: bytes) -> list[bytes]:
    """Its whole lines."""
    return log.split(b"\n")[:-1]


def ended(now: dict[str, bytes], folder: str) -> bool:
    """Whether a run had come to its end."""
    return any(b'"ev":"run_end"' in line for line in told(now.get(f"{folder}/metrics.jsonl", b""))[-1:])


def _lost_lines(path: str, now: dict[str, bytes], final: dict[str, bytes]) -> str:
    """Of a log without its end every line is kept, but for a result that was being written with that end."""
    lines = [line for line in told(now.get(path, b"")) if b'"ev":"run_end"' not in line]
    if b'"ev":"clock_stop"' in b"".join(lines[-2:-1]) and b'"ev":"val"' in lines[-1]:
        lines.pop()
    return "" if told(final.get(path, b""))[: len(lines)] == lines else "lost lines"


class Soak:
    """Random commands in one folder, struck at random bytes of what they write."""

    #: With how often each is chosen: those that train take seconds.
    KINDS: ClassVar = {
        "run": 2,
        "run --checkpoint-every": 2,
        "batch": 2,
        "assemble": 4,
        "leaderboard": 4,
        "describe": 6,
    }

    def __init__(self, place: Path, work: Path, data: str, settings: list[str], seed: int) -> None:
        for name in ("train.declare", "train.batch", "train.ranked", "board.plots"):
            importlib.import_module(f"speedrun.{name}")
        importlib.import_module("orbax.checkpoint")
        provenance.closure = partial(closure, provenance.closure)
        subprocesses.Popen = Fork
        self._place, self._data, self._number = place, ["--data", data], 0
        self._settings = ["--track", "tiny", *self._data, *settings]
        self._rnd, self._call = random.Random(seed), Caller(place, work)
        self._changes: Counter[str] = Counter()
        self._hashes: dict[str, set[str]] = {}
        self.blows: Counter[str] = Counter()
        synthetic.write(track.load("tiny"), Path(data))
        (place / "records" / "tiny").mkdir(parents=True)
        (place / "README.md").write_text(f"# A fork\n\n{OWNERS.decode()}")

    def complaints(self, seconds: float) -> Iterator[str]:
        """Of every kind once without a blow, and then of random ones until the time is over."""
        for kind in self.KINDS:
            yield from self._round(kind, struck=False)
            if not self._changes[kind]:
                return
        watch = clock.Stopwatch()
        while watch.seconds < seconds:
            kind = self._rnd.choices([*self.KINDS], [*self.KINDS.values()])[0]
            yield from self._round(kind, struck=True)

    def _round(self, kind: str, *, struck: bool) -> Iterator[str]:
        """A command and those that mend it, and what they left wrong."""
        self._number += 1
        now, code = self._begun(kind, f"runs/{self._number}"), -1
        now.seen.append(files(self._place))
        while code and len(now.tries) < MOST_TRIES:
            # Once, of a batch: too many runs that crashed are no record.
            again = not now.tries or (kind != "batch" and self._rnd.random() < 0.3)
            blow = self._blow(kind) if struck and again else NONE
            now.tries.append((" ".join(now.words[:4]), blow))
            code = self._call(now.words, blow)
            now.seen.append(files(self._place))
            if hit := 0 < blow.at <= self._call.changes:
                self.blows[f"{kind}: {blow.does}"] += 1
            if not code:
                self._changes[kind] = max(self._changes[kind], self._call.changes)
            elif not self._mend(kind, now, code) and not (hit and code in CODES[blow.does]):
                wrong = [f"exit code {code}: {self._call.said}"]
                break
            if "Traceback" in self._call.said:
                wrong = [self._call.said]
                break
        else:
            wrong = ["no end"] if code else [*now.lost(), *self._wrong(kind, now)]
        yield from (f"round {self._number}, {now.tries}: {what}" for what in wrong)
        self._put_away(now, code)

    def _begun(self, kind: str, out: str) -> Round:
        records = sorted(str(path.relative_to(self._place)) for path in self._place.glob("records/tiny/*"))
        match kind:
            case "batch":
                return Round(["batch", "--out", out, "--runs", "2", *self._settings], out)
            case "leaderboard":
                board = ("LEADERBOARD.md", "leaderboard.json")
                rewrites = tuple(f"records/{name}" for name in board)
                return Round(["leaderboard", "build"], "", rewrites)
            case "describe":
                record = self._rnd.choice(records)
                words = ["describe", record, "--title", f"round {self._number}", "--author", "ada"]
                return Round(words, "", tuple(f"{record}/{name}" for name in ASSEMBLED))
            case "assemble":
                shutil.copytree(self._place / self._rnd.choice(records), self._place / out)
                for name in ASSEMBLED[self._rnd.randrange(len(ASSEMBLED)) :]:
                    (self._place / out / name).unlink()
                is_batch = (self._place / out / layout.BATCH).exists()
                words = ["batch", "--resume", out, *self._data] if is_batch else ["run", "--resume", out]
                return Round(words, out)
        every = ["--checkpoint-every", "5"] if "checkpoint" in kind else []
        return Round(["run", "--out", out, *self._settings, *every], out)

    def _blow(self, kind: str) -> Blow:
        does = self._rnd.choice(("kill", "kill", "kill", "full", "sync"))
        return Blow(self._rnd.randint(1, self._changes[kind]), does, self._rnd.random())

    def _mend(self, kind: str, now: Round, code: int) -> bool:
        """Sets the next command, as in docs/reliability.md; returns whether there was nothing to resume."""
        out = self._place / now.out
        if kind == "batch" and (out / layout.BATCH).exists():
            now.words = ["batch", "--resume", now.out, *self._data]
        if not kind.startswith("run"):
            return False
        if now.words[1] != "--resume":
            now.words = ["run", "--resume", now.out]
            return False
        if code == 2 and re.search("start it again|no such run", self._call.said):
            now.words = [*now.begun[:2], now.out, *now.begun[3:]]
            return True
        if code != 2 or "start a new run with another --out" not in self._call.said:
            return False
        if out.exists():
            now.abandoned += (f"{out.name}.",)
            now.out += "b"
        now.words = [*now.begun[:2], now.out, *now.begun[3:]]
        return "checkpoint" not in kind or not out.exists()

    def _wrong(self, kind: str, now: Round) -> Iterator[str]:
        """What is not as it must be at the end."""
        left = [path for path in self._place.rglob("*") if path.name.endswith(LEFT) or "-tmp" in path.name]
        if left := [str(path) for path in left if not path.name.startswith(now.abandoned)]:
            yield f"left over: {left}"
        if kind == "leaderboard":
            if code := self._call(["leaderboard", "check"]):
                yield f"leaderboard check: exit code {code}: {self._call.said}"
            return
        record = self._place / (now.out or now.words[1])
        failed = [(one.check.id, one.messages) for one in validate(record).having("failed")]
        if failed := [one for one in failed if one[0] != COPIED]:
            yield f"validate: {failed}"
        if kind not in ("assemble", "describe"):
            hashes = {run.end.final_hash for run in load(record).finished}
            if hashes != self._hashes.setdefault(kind, hashes):
                yield f"ended with {hashes}, unbroken with {self._hashes[kind]}"

    def _put_away(self, now: Round, code: int) -> None:
        """Good records become those that must not be lost; the oldest ones make room."""
        if now.out and not code:
            with (self._place / now.out / "README.md").open("ab") as readme:
                readme.write(OWNERS)
            (self._place / now.out).rename(self._place / "records" / "tiny" / f"{self._number:04}")
        shutil.rmtree(self._place / "runs", ignore_errors=True)
        for old in sorted(self._place.glob("records/tiny/*"))[:-MOST_RECORDS]:
            shutil.rmtree(old)


def main(asked: dict[str, Any]) -> None:
    """Prints what went wrong."""
    track.TRACKS_DIR = Path(asked["tracks"])
    work = Path(asked["work"])
    if "seed" in asked:
        soak = Soak(work / "place", work, asked["data"], asked["settings"], asked["seed"])
        answer = [list(soak.complaints(asked["seconds"])), soak.blows]
    else:
        blows = Blows(Path(asked["template"]), asked["words"], work)
        answer = [[one for does in DOES for one in blows.complaints(does, step=asked["step"])], blows.blows]
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
