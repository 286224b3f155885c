"""Progress of a long transfer or check, on stderr: a bar on a terminal, else a line from time to time."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import click

from speedrun.ground import signals
from speedrun.ground.clock import Stopwatch
from speedrun.ground.console import clean, duration, quantity
from speedrun.ground.errors import Terminated

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_LINE_S = 10.0  #: between two lines without a terminal


@contextmanager
def resumable(what: str, folder: Path) -> Iterator["Progress"]:
    """Show the progress of a command that SIGINT and SIGTERM may stop, and how to continue it."""
    try:
        with signals.handled_by(signals.stop), Progress(what) as progress:
            yield progress
    except (KeyboardInterrupt, Terminated):
        click.echo(
            f"stopped; the shards in {folder} are whole; run the same command again to continue", err=True
        )
        raise


@contextmanager
def counted(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show the progress of work that says how much of a known total is done."""
    with Progress(what, unit) as progress:
        yield lambda done: progress.update(done, total)


class Progress:
    """Shows how much is done, the rate and the time left. Use as a context manager."""

    def __init__(self, what: str, unit: str = "B") -> None:
        """Start the clock at the first `update`."""
        self._what, self._unit = what, unit
        self._bar: Bar | None = None
        self._watch, self._line = Stopwatch(), Stopwatch()
        self._first: int | None = None

    def update(self, done: int, total: int, facts: str = "") -> None:
        """Show how much of how much is done, and other facts; `total` is 0 if unknown."""
        if self._first is None:
            self._first, self._watch, self._line = done, Stopwatch(), Stopwatch()
            if sys.stderr.isatty():
                self._bar = _open_bar()
        line = "  ".join(filter(None, [self._what, *self._shares(done, total), facts]))
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=done, total=total or None, description=clean(line))
        elif self._line.seconds >= _LINE_S:
            self._line = Stopwatch()
            self.say(line)

    def _shares(self, done: int, total: int) -> list[str]:
        if not total:
            return []
        rate = (done - (self._first or 0)) / self._watch.seconds
        left = f"eta {duration((total - done) / rate)}" if rate > 0 else "eta unknown"
        of = f"{quantity(done, self._unit)} of {quantity(total, self._unit)}"
        return [f"{done / total:.0%}", of, quantity(rate, f"{self._unit}/s"), left]

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


def _open_bar() -> "Bar":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    text = TextColumn("{task.description}", markup=False)
    bar = Progress(BarColumn(), text, console=console, transient=True, refresh_per_second=4)
    bar.add_task("", total=None)
    bar.start()
    return bar
