"""Progress of a long transfer or check, on stderr: a bar on a terminal, else a line from time to time."""

import sys
from typing import TYPE_CHECKING, Self

import click

from speedrun.ground.clock import Stopwatch
from speedrun.ground.console import clean, duration, quantity

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_LINE_S = 10.0  #: between two lines without a terminal


class Progress:
    """Shows bytes, rate and time left. Use as a context manager."""

    def __init__(self, what: str) -> None:
        """Start the clock at the first `update`."""
        self._what = what
        self._bar: Bar | None = None
        self._watch, self._line = Stopwatch(), Stopwatch()
        self._first: int | None = None

    def update(self, done: int, total: int) -> None:
        """Show `done` bytes of `total`."""
        if self._first is None:
            self._first, self._watch, self._line = done, Stopwatch(), Stopwatch()
            if sys.stderr.isatty():
                self._bar = _open_bar(self._what, total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)
        elif self._line.seconds >= _LINE_S:
            self._line = Stopwatch()
            rate = (done - self._first) / self._watch.seconds
            left = f"eta {duration((total - done) / rate)}" if rate > 0 else "eta unknown"
            of = f"{quantity(done, 'B')} of {quantity(total, 'B')}"
            self.say(f"{self._what}  {done / max(1, total):.0%}  {of}  {quantity(rate, 'B/s')}  {left}")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(clean(line), markup=False)
        else:
            click.echo(clean(line), err=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _open_bar(what: str, total: int) -> "Bar":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    bar = Progress(what, *columns, console=console, transient=True, refresh_per_second=4)
    bar.add_task(what, total=total)
    bar.start()
    return bar
