"""The console of a run: its text lines and, on a terminal, a progress bar with rate, loss, time left and ghost."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TextIO

from speedrun.ground.console import Printer, duration, quantity
from speedrun.ground.runlog import ClockStart, ClockStop, Line, RunStart, Step

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Live(Printer):
    """Print events as they come, with a progress bar if the stream is a terminal.

    Use as a context manager, and as the reader of a log.
    """

    def __init__(
        self,
        stream: TextIO,
        ghost: Callable[[Step], str] | None = None,
        legend: str = "",
        *,
        verbose: bool = False,
    ) -> None:
        """Print to `stream`.

        `ghost` is called with every step; it returns a text to append to its line, which is not logged. `legend` is
        printed when the run starts.
        """
        super().__init__(stream, verbose=verbose)
        self._ghost, self._legend = ghost, legend
        self._bar = _Bar(stream) if stream.isatty() else None

    def __call__(self, line: Line) -> None:
        """Show one event."""
        if self._legend and isinstance(line.event, RunStart):
            self.say(self._legend)
        shown, ghost = self._shown(line), ""
        if self._ghost is not None and isinstance(line.event, Step):
            ghost = f"  {self._ghost(line.event)}"
            shown = None if shown is None else shown + ghost
        if self._bar is not None:
            self._bar.show(line, shown, ghost)
        elif shown is not None:
            self._write(shown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()


class _Bar:
    """Steps done, rate, time left and loss, below the text lines."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._num_steps = 0

    def show(self, line: Line, text: str | None, ghost: str) -> None:
        if text is not None:
            self._console.print(text, markup=False)
        match line.event:
            case RunStart(num_steps=num_steps):
                self._num_steps = num_steps
            case ClockStart():
                self._open()
            case Step() as step if self._progress is not None and self._task is not None:
                left_s = step.train_time_s / (step.step + 1) * (self._num_steps - step.step - 1)
                rate = quantity(step.tokens_seen / max(1e-9, step.train_time_s), "tok/s")
                facts = f"{rate}  loss {step.loss:.4f}  eta {duration(left_s)}{ghost}"
                self._progress.update(self._task, completed=step.step + 1, facts=facts)
            case ClockStop():
                self.close()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _open(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        facts = TextColumn("{task.fields[facts]}")
        # A bar of fixed width would push the facts off a narrow terminal.
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), facts)
        # Few refreshes, so that the bar's thread does not slow the steps.
        progress = Progress(*columns, console=self._console, transient=True, refresh_per_second=4)
        self._task = progress.add_task("train", total=self._num_steps, facts="")
        self._progress = progress
        progress.start()
