"""`speedrun watch`: serves the page and the feed of its runs. With `run --watch`, from a process beside the run.

The run depends on none of it: the process only reads its log, at low priority, and ends with it.

python -m speedrun.model.watch_server RECORD PORT [GHOST]      ends with its standard input
"""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from speedrun.base import accelerators, children
from speedrun.base import track as tracks
from speedrun.base.clock import Stopwatch
from speedrun.base.errors import UsageError
from speedrun.base.output import reported
from speedrun.base.serving import Reply, content_type, file_below, serving
from speedrun.base.signals import handled_by, stop
from speedrun.board import ghost as ghosts
from speedrun.model.watch_feed import Feed

_LEAVE_S = 3.0  #: from the end of the run until the process is killed
_LAST_S = 1.5  #: for pages to get the last lines
_PAGE = Path(__file__).resolve().parent / "watch_page"
_RECORDS = Path("records")


@lru_cache(maxsize=64)
def rules(choice: str | None, track: str) -> dict[str, Any]:
    """Return target and ghost of a track, and the peak rates of devices: bf16 with sums in float32, per second.

    What cannot be read is null, with the reason in `problems`.

    Args:
        choice: the folder of a record, or 'best': the fastest qualified record of the track in `records/`.
        track: name and version.
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
            return Reply(msgspec.json.encode(found), content_type("rules.json"))
        return file_below(_PAGE, path[1:] or "index.html")

    with serving(answer, port) as url:
        try:
            yield url
        finally:  # send all pages what is left, and wait for them a moment
            is_over.set()
            spent = Stopwatch()
            for reader in [*readers]:
                reader.join(max(0.0, _LAST_S - spent.seconds))


def watched(record: Path, port: int | None, ghost: str | None) -> AbstractContextManager[None]:
    """Serve the page of a run from another process inside the block; without a port, do nothing.

    Its address is printed once it is served. Whatever goes wrong is one warning.
    """
    if port is None:
        return nullcontext()
    words = [str(record), str(port), *([] if ghost is None else [ghost])]
    again = ["speedrun", "watch", str(record), "--port", "0"]
    remedy = children.Remedy("watch", "the run needs no page; for another", again)
    return children.beside("speedrun.model.watch_server", words, remedy, leave_s=_LEAVE_S, is_heard=True)


def main(record: str, port: str, ghost: str | None = None) -> None:
    """Serve until standard input ends.

    Raises:
        UsageError: if the port cannot be used.
        Terminated: at a signal.
    """
    with ExitStack() as stack:
        try:
            url = stack.enter_context(watching([Path(record)], int(port), ghost))
        except UsageError as error:
            problem = str(error).partition(";")[0]  # the option of a run has another name
            raise UsageError(f"{problem}; choose another with --watch-port") from None
        with handled_by(stop):
            sys.stdout.write(f"watch   {url}\n")
            sys.stdout.flush()
            sys.stdin.buffer.read()


if __name__ == "__main__":
    with reported():
        os.nice(children.NICENESS)
        main(*sys.argv[1:])
