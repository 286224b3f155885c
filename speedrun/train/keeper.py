"""The process beside a run: it stamps what the run tells with its own clock, and writes the log.

The run is a child process, with JAX and the recipe. It sends events through a pipe and has neither this clock nor this
file. A child that dies in any way leaves a log that says so. Imports no JAX.
"""

import os
from subprocess import PIPE
from threading import Lock, Thread
from typing import IO

import msgspec

from speedrun.base import children, messages, runlog
from speedrun.base.console import Printer
from speedrun.base.errors import SpeedrunError
from speedrun.base.exit_codes import meaning
from speedrun.record import layout
from speedrun.train.request import RunConfig


def trained(config: RunConfig, printer: Printer, *, stderr: int | None = None) -> tuple[int, str]:
    """Train in a child process, which ends with this one; write and print its log, and print its other output.

    `stderr` is as for `Popen`.

    Returns:
        The exit code, as from `children.wait_for`, or that of an error of writing the log, and the last line that the
        child printed.
    """
    events, theirs = os.pipe()
    pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": stderr, "text": True, "pass_fds": [theirs]}
    with children.started("speedrun.train.ranked", config, str(theirs), **pipes) as child:
        os.close(theirs)
        assert child.stdin is not None
        assert child.stdout is not None
        turn, kept, said = Lock(), Kept(config, printer), [""]

        def show(lines: IO[str]) -> None:
            with lines:
                for line in map(str.rstrip, lines):
                    if line:
                        said[0] = line
                        with turn:
                            printer.say(line)

        def keep() -> None:
            with open(events, "rb") as messages:
                for message in messages:
                    with turn:
                        kept.take(message)
                    if kept.error is not None:
                        child.terminate()

        threads = Thread(target=show, args=[child.stdout]), Thread(target=keep)
        for thread in threads:
            thread.start()
        with child.stdin:  # its end would end the child
            code = children.wait_for(child)
        for thread in threads:
            thread.join()
    kept.close(code)
    if kept.error is None:
        return code, said[0]
    children.say(line := f"error: {kept.error}")
    return kept.error.exit_code, line


class Kept:
    """The log of a child, as it comes."""

    def __init__(self, config: RunConfig, printer: Printer) -> None:
        self._out, self._printer = config.out, printer
        self._log: runlog.RunLog | None = None
        self._held: list[runlog.AnyEvent] = []
        self._is_whole = False
        self.error: SpeedrunError | None = None  #: the first one

    def take(self, raw: bytes) -> None:
        """Write what a message says. The first one names the folder of the run, which the child has made."""
        try:
            message = messages.received(raw)
            if self._log is None:
                self._log = self._opened(message.event)
            self._held.append(message.event)
            while self._held and not message.hold:
                event = self._held.pop(0)
                self._log.emit(event, hold=bool(self._held))
                self._is_whole = isinstance(event, runlog.RunEnd)
        except SpeedrunError as error:
            self.error = self.error or error
        except msgspec.DecodeError as error:
            self.error = self.error or SpeedrunError(
                f"the run sent what is no event: {error}; see its recipe"
            )

    def _opened(self, first: runlog.AnyEvent) -> runlog.RunLog:
        if not isinstance(first, runlog.RunStart):
            raise SpeedrunError(f"the run began with a {type(first).__name__}; see its recipe")
        return runlog.RunLog(self._out / "runs" / first.run_id / layout.LOG, self._printer)

    def close(self, code: int) -> None:
        """Say why a log has no end, without a result that nobody has seen; check that the file is as written."""
        if self._log is None:
            return
        with self._log as log:
            try:
                if not self._is_whole:
                    log.emit(runlog.Error("Killed", f"the process of the run ended with {meaning(code)}"))
                if not self.error and not log.is_as_written():
                    self.error = SpeedrunError("something else wrote into the log of the run; see its recipe")
            except SpeedrunError as error:
                self.error = self.error or error
