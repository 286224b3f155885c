"""The progress of what takes long, on stderr: one line on a terminal, elsewhere a line every ten seconds."""

import shutil
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import click

from speedrun.base import signals
from speedrun.base.clock import Stopwatch
from speedrun.base.console import clean, duration, quantity
from speedrun.base.errors import Terminated

_Item = TypeVar("_Item")
_LINE_S, _REWRITE_S = 10.0, 0.25  #: between two lines, and on a terminal
_ERASE = "\r\x1b[K"  #: the line of the cursor


@contextmanager
def resumable(what: str, folder: Path) -> Iterator["Progress"]:
    """Show the progress of a command; if a signal stops it, say how to continue."""
    try:
        with signals.handled_by(signals.stop), Progress(what) as progress:
            yield progress
    except (KeyboardInterrupt, Terminated):
        click.echo(
            f"stopped; the shards in {folder} are whole; run the same command again to continue", err=True
        )
        raise


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say every ten seconds that a command without other progress is still working."""
    watch, done = Stopwatch(), threading.Event()

    def tell() -> None:
        while not done.wait(_LINE_S):
            click.echo(f"{what}  {duration(watch.seconds)} so far", err=True)

    threading.Thread(target=tell, name=what, daemon=True).start()
    try:
        yield
    finally:
        done.set()


class Progress(AbstractContextManager["Progress"]):
    """A display of the progress, its rate and the time left."""

    def __init__(self, what: str, unit: str = "B") -> None:
        """Start the clock at the first `update`."""
        self._what, self._unit = what, unit
        self._erase = _ERASE if sys.stderr.isatty() else ""
        self._watch, self._line = Stopwatch(), Stopwatch()
        self._first: int | None = None

    def update(self, done: int, total: int, facts: str = "") -> None:
        """Show the progress and other facts; `total` is 0 if unknown."""
        if self._first is None:
            self._first, self._watch, self._line = done, Stopwatch(), Stopwatch()
        elif self._line.seconds >= (_REWRITE_S if self._erase else _LINE_S):
            self._line = Stopwatch()
            line = clean("  ".join(filter(None, [self._what, *self._shares(done, total), facts])))
            if self._erase:
                line = self._erase + line[: shutil.get_terminal_size().columns - 1]
            click.echo(line, err=True, nl=not self._erase)

    def _shares(self, done: int, total: int) -> list[str]:
        if not total:
            return []
        rate = (done - (self._first or 0)) / self._watch.seconds
        left = f"eta {duration((total - done) / rate)}" if rate > 0 else "eta unknown"
        of = f"{quantity(done, self._unit)} of {quantity(total, self._unit)}"
        return [f"{done / total:.0%}", of, quantity(rate, f"{self._unit}/s"), left]

    def say(self, line: str) -> None:
        """Print a separate line."""
        click.echo(self._erase + clean(line), err=True)

    def __exit__(self, *exc: object) -> None:
        click.echo(self._erase, err=True, nl=False)


def over(what: str, items: Collection[_Item], unit: str) -> Iterator[_Item]:
    """Yield items, and show how many are done."""
    with Progress(what, unit) as progress:
        for number, item in enumerate(items):
            progress.update(number, len(items))
            yield item
