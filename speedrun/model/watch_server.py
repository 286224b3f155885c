"""`speedrun watch`: serves a page, and the lines of all logs of some folders as events while the logs grow.

With `run --watch`, from a process beside the run. The run depends on none of it: the process only reads its log, at low
priority, and ends with it.

A page that connects again gets all of it again. Files are only read; a line that is no event of a log is not shown.

    event: files    all files that there are: {"files": [...], "folders": [...]}; again when one appears
    event: lines    {"key", "anew", "lines"}: complete lines of one file; null for one that cannot be shown
    event: beat     {"now": UTC}: at the start, and every few seconds; without any, the connection is dead
    event: end      the server is about to end

python -m speedrun.model.watch_server RECORD PORT [GHOST]      ends with its standard input
"""

import hashlib
import os
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from speedrun.base import accelerators, children, clock, runlog
from speedrun.base import track as tracks
from speedrun.base.errors import UsageError, translate_read_errors
from speedrun.base.output import reported
from speedrun.base.serving import CONTENT_TYPES, Reply, file_below, serving
from speedrun.base.signals import handled_by, stop
from speedrun.base.tail import Piece, Tail
from speedrun.board import ghost as ghosts

_LEAVE_S = 3.0  #: from the end of the run until the process is killed
_LAST_S = 1.5  #: for pages to get the last lines
_PAGE = Path(__file__).resolve().parent / "watch_page"
_RECORDS = Path("records")
POLL_S = 0.25
BEAT_S = 3.0
#: Where the logs of a folder are: in a run, a record, or a folder of records, such as a sweep.
_LOGS = ("metrics.jsonl", "runs/*/metrics.jsonl", "*/runs/*/metrics.jsonl")
#: Files of a record whose first run has no log yet.
_BEGUN = ("source.txt", "batch.json", "runs")


class File(NamedTuple):
    """A file of lines that a page gets."""

    key: str  #: stands for its path
    kind: Literal["log", "samples"]
    record: Path  #: the record's folder, which has the samples beside it
    run: str  #: name of the run's folder; empty for samples
    path: Path


def check(folder: Path) -> None:
    """Raise UsageError for what exists and can be no run. A folder that does not exist may become one."""
    with translate_read_errors(folder, "name the folder of a run or record", kind=UsageError):
        if not folder.exists() or (folder.is_dir() and (_logs(folder) or not any(folder.iterdir()))):
            return
        is_begun = any((folder / name).exists() for name in _BEGUN)
    if not is_begun:
        raise UsageError(f"{folder} is no run; need the folder of a run or record, as run --out makes")


def _logs(folder: Path) -> list[Path]:
    return [path for pattern in _LOGS for path in sorted(folder.glob(pattern))]


def find(folders: Sequence[Path]) -> list[File]:
    """Return the logs and samples of folders of runs, each once."""
    found: dict[Path, File] = {}
    for log in (log for folder in folders for log in _logs(folder)):
        path = Path(os.path.realpath(log))  # raises nothing if links change meanwhile
        run = path.parent
        record = run.parent.parent if run.parent.name == "runs" else run
        found[path] = File(_key(path), "log", record, run.name, path)
        samples = children.samples_of(record)
        if os.path.exists(samples):  # no method of Path, which fails for a name that is too long
            found[samples] = File(_key(samples), "samples", record, "", samples)
    return list(found.values())


def _key(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


class Feed:
    """What one page gets."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Begin with the first lines."""
        self._folders, self._told = folders, dict[str, Any]()
        self._tails: dict[str, tuple[File, Tail]] = {}
        self._problems: dict[str, str] = {}

    def events(self, is_over: threading.Event) -> Iterator[bytes]:
        """Yield events until it is over, and once more what has come until then."""
        silent_s = BEAT_S
        while True:
            is_last = is_over.is_set()
            yield from self.news()
            if silent_s >= BEAT_S:
                yield _event("beat", {"now": clock.now().utc})
                silent_s = 0.0
            if is_last:
                yield _event("end", {})
                return
            is_over.wait(POLL_S)
            silent_s += POLL_S

    def news(self) -> Iterator[bytes]:
        """Yield events for what is new in all files."""
        for file in find(self._folders):
            if file.key not in self._tails:
                self._tails[file.key] = file, Tail(file.path)
        files = [
            {"key": key, "kind": file.kind, "record": _name(file.record.name), "run": _name(file.run)}
            | {"record_key": _key(file.record), "problem": self._problems.get(key, "")}
            for key, (file, _) in self._tails.items()
        ]
        folders = [{"name": _name(str(folder)), "exists": folder.exists()} for folder in self._folders]
        if self._told != (told := {"files": files, "folders": folders}):
            self._told = told
            yield _event("files", told)
        for file, tail in self._tails.values():
            while piece := self._piece(file.key, tail):
                lines = [_text(raw, file.kind) for raw in piece.lines]
                # A client that does not read holds this, and no more.
                yield _event("lines", {"key": file.key, "anew": piece.anew, "lines": lines})

    def _piece(self, key: str, tail: Tail) -> Piece | None:
        self._problems.pop(key, None)
        try:
            return tail.read()
        except OSError as error:
            self._problems[key] = error.strerror or type(error).__name__
            return None


def _name(text: str) -> str:
    """Return the name of a file as text that has a form in UTF-8."""
    return os.fsencode(text).decode(errors="replace")


class _Sample(msgspec.Struct):
    step: float
    text: str
    prompt: str = ""


def _text(raw: bytes, kind: str) -> str | None:
    """Return a line as text; None if it is no UTF-8, or no line of such a file: nothing else is shown."""
    try:
        if kind == "log":
            runlog.decode(raw)
        else:
            msgspec.json.decode(raw, type=_Sample)
        return raw.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


@lru_cache(maxsize=64)
def rules(choice: str | None, track: str) -> dict[str, Any]:
    """Return target and ghost of a track (name and version), and the peak rates of devices in bf16, per second.

    What cannot be read is null, with the reason in `problems`; `choice` is that of `--ghost`.
    """
    target, ghost, problems = None, None, []
    try:
        known = tracks.load(track.partition("@")[0])
        if known.id != track:
            raise UsageError(f"the run is on {track}; this version has {known.id}, whose target may differ")
        target = known.target.loss
    except UsageError as error:
        problems.append(f"no target: {error}")
    if target is not None and choice is not None:
        try:
            folder = ghosts.best(_RECORDS, track) if choice == "best" else Path(choice)
            if folder is None:
                raise UsageError(f"{_RECORDS}/ has no qualified record of {track}")
            ghost = {"record": folder.name, **ghosts.read(folder, track).points()}
        except UsageError as error:
            problems.append(f"no ghost: {error}")
    peaks = [[device.name, device.bf16_flops] for device in accelerators.DEVICES.values()]
    return {"target": target, "ghost": ghost, "peaks": peaks, "problems": problems}


@contextmanager
def watching(folders: Sequence[Path], port: int, ghost: str | None) -> Iterator[str]:
    """Serve the page of these folders inside the block, with `ghost` as in `--ghost`; yield its address.

    Raises:
        UsageError: if the port cannot be used.
    """
    is_over, readers = threading.Event(), set[threading.Thread]()

    def fed() -> Iterator[bytes]:
        readers.add(threading.current_thread())
        try:
            yield from Feed(folders).events(is_over)
        finally:
            readers.discard(threading.current_thread())

    def answer(path: str, query: dict[str, str]) -> Reply | None:
        if path == "/feed":
            return Reply(fed(), "text/event-stream; charset=utf-8")
        if path == "/rules":
            found = rules(ghost, query.get("track", ""))
            return Reply([msgspec.json.encode(found)], CONTENT_TYPES["json"])
        return file_below(_PAGE, path[1:] or "index.html")

    with serving(answer, port) as url:
        try:
            yield url
        finally:  # send all pages what is left, and wait for them a moment
            is_over.set()
            spent = clock.Stopwatch()
            for reader in [*readers]:
                reader.join(max(0.0, _LAST_S - spent.seconds))


def watched(record: Path, port: int | None, ghost: str | None) -> AbstractContextManager[None]:
    """Serve the page of a run from another process inside the block; without a port, do nothing.

    Its address is printed once it is served. Whatever goes wrong is one warning.
    """
    if port is None:
        return nullcontext()
    words = [str(record), str(port), *([] if ghost is None else [ghost])]
    again = shlex.join(["speedrun", "watch", str(record), "--port", "0"])
    remedy, module = f"the run needs no page; for another: {again}", "speedrun.model.watch_server"
    return children.beside("watch", module, words, remedy, leave_s=_LEAVE_S, is_heard=True)


def main(record: str, port: str, ghost: str | None = None) -> None:
    """Serve until standard input ends; raise UsageError if the port cannot be used, Terminated at a signal."""
    try:
        with watching([Path(record)], int(port), ghost) as url, handled_by(stop):
            sys.stdout.write(f"watch   {url}\n")
            sys.stdout.flush()
            sys.stdin.buffer.read()
    except UsageError as error:  # of the port: the option of a run has another name
        raise UsageError(f"{str(error).partition(';')[0]}; choose another with --watch-port") from None


if __name__ == "__main__":
    with reported():
        os.nice(children.NICENESS)
        main(*sys.argv[1:])
