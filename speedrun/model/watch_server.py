"""`speedrun watch`: serves a page, and the lines of all logs of some folders as events while the logs grow.

`run --watch` starts it as a process next to the run, which does not depend on it. A page that reconnects gets all lines
again.

    event: files    all files: {"files": [...], "folders": [...]}; again when they change
    event: lines    {"key", "anew", "lines"}: complete lines of a file; null for an invalid one
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
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from speedrun.base import accelerators, clock, runlog, subprocesses
from speedrun.base import track as tracks
from speedrun.base.errors import UsageError
from speedrun.base.log_follower import LogFollower, Piece
from speedrun.base.output import reported
from speedrun.base.serving import CONTENT_TYPES, Reply, file_below, serving
from speedrun.base.signals import handled_by, stop
from speedrun.board import ghost as ghosts

_LEAVE_S = 3.0  #: from the end of the run until the process is killed
_LAST_S = 1.5  #: to send the last lines
_PAGE = Path(__file__).resolve().parent / "watch_page"
_RECORDS = Path("records")
POLL_S = 0.25
BEAT_S = 3.0
#: Logs of a run, of a record, and of a folder of records, such as a sweep.
_LOGS = ("metrics.jsonl", "runs/*/metrics.jsonl", "*/runs/*/metrics.jsonl")


class File(msgspec.Struct):
    """A file whose lines a page gets."""

    key: str  #: hash of its path
    kind: Literal["log", "samples"]
    record: str
    record_key: str  #: hash of the record's path: records may have the same name
    run: str  #: empty for samples
    problem: str = ""  #: why the file cannot be read


def find(folders: Sequence[Path]) -> dict[Path, File]:
    """Return the logs and samples of folders."""
    found: dict[Path, File] = {}
    for log in (log for folder in folders for pattern in _LOGS for log in sorted(folder.glob(pattern))):
        path = Path(os.path.realpath(log))  # unlike a method of Path, it raises nothing
        run = path.parent
        record = run.parent.parent if run.parent.name == "runs" else run
        known = _name(record.name), _key(record)
        found[path] = File(_key(path), "log", *known, _name(run.name))
        samples = subprocesses.samples_of(record)
        if os.path.exists(samples):
            found[samples] = File(_key(samples), "samples", *known, "")
    return found


def _key(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


class Feed:
    """The events of one page."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Begin with the first lines."""
        self._folders, self._told = folders, b""
        self._tails: dict[Path, tuple[File, LogFollower]] = {}

    def events(self, is_over: threading.Event) -> Iterator[bytes]:
        """Yield events until `is_over`, and then the last ones."""
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
        """Yield events for new files and lines."""
        for path, file in find(self._folders).items():
            self._tails.setdefault(path, (file, LogFollower(path)))
        files = [file for file, _ in self._tails.values()]
        folders = [{"name": _name(str(folder)), "exists": folder.exists()} for folder in self._folders]
        told = _event("files", {"files": files, "folders": folders})
        if self._told != told:
            self._told = told
            yield told
        for file, tail in self._tails.values():
            while piece := _piece(file, tail):
                lines = [_text(raw, file.kind) for raw in piece.lines]
                # A client that does not read costs the memory of one piece.
                yield _event("lines", {"key": file.key, "anew": piece.anew, "lines": lines})


def _piece(file: File, tail: LogFollower) -> Piece | None:
    file.problem = ""
    try:
        return tail.read()
    except OSError as error:
        file.problem = error.strerror or type(error).__name__
        return None


def _name(text: str) -> str:
    """Return a file name as valid UTF-8."""
    return os.fsencode(text).decode(errors="replace")


def _text(raw: bytes, kind: str) -> str | None:
    """Return a line as text; None if it is not valid."""
    try:
        (runlog.decode if kind == "log" else msgspec.json.decode)(raw)
        return raw.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


def rules(choice: str | None, track: str) -> dict[str, Any]:
    """Return target and ghost of a track (name and version), and the bf16 peaks of devices in FLOP/s.

    `choice` is that of `--ghost`. What cannot be read is null, with the reason in `problems`.
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
    """Serve a page inside the block, with `ghost` as in `--ghost`; yield its address.

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
        finally:  # send the last lines
            is_over.set()
            spent = clock.Stopwatch()
            for reader in [*readers]:
                reader.join(max(0.0, _LAST_S - spent.seconds))


def watched(record: Path, port: int, ghost: str | None) -> AbstractContextManager[None]:
    """Serve the page of a run from a child process inside the block."""
    words = [str(record), str(port), *([] if ghost is None else [ghost])]
    again = shlex.join(["speedrun", "watch", str(record), "--port", "0"])
    remedy, module = f"the run needs no page; for another: {again}", "speedrun.model.watch_server"
    return subprocesses.beside("watch", module, words, remedy, leave_s=_LEAVE_S, is_heard=True)


def main(record: str, port: str, ghost: str | None = None) -> None:
    """Serve until standard input ends; raise UsageError if the port cannot be used."""
    try:
        with watching([Path(record)], int(port), ghost) as url, handled_by(stop):
            sys.stdout.write(f"watch   {url}\n")
            sys.stdout.flush()
            sys.stdin.buffer.read()
    except UsageError as error:  # a run has another option for the port
        raise UsageError(f"{str(error).partition(';')[0]}; choose another with --watch-port") from None


if __name__ == "__main__":
    with reported():
        os.nice(subprocesses.NICENESS)
        main(*sys.argv[1:])
