"""Handlers of SIGINT and SIGTERM that let a run write the end of its log."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from speedrun.base.errors import Terminated

STOPS = (signal.SIGINT, signal.SIGTERM)


def stop(number: int, _frame: object) -> None:
    """Raise Terminated. A handler for `handled_by`.

    Python drops exceptions in callbacks of its garbage collector, and JAX has one, so a timer raises again.
    """

    def again(_alarm: int, _frame: object) -> None:
        handler = signal.getsignal(number)
        if callable(handler) and (handler is stop or isinstance(handler, Deferred)):  # still ours
            handler(number, None)

    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    raise _terminated(number)


def _terminated(number: int) -> Terminated:
    return Terminated(f"stopped by {signal.Signals(number).name}")


def ignore(_number: int, _frame: object) -> None:
    """Do nothing. A handler for `handled_by`."""


class Deferred:
    """A handler that remembers the first signal for `check`."""

    def __init__(self) -> None:
        self._got: int | None = None

    def __call__(self, number: int, _frame: object) -> None:
        """Remember the signal; raise KeyboardInterrupt if it is the second one."""
        if self._got is not None:
            raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}, the second signal")
        self._got = number

    @property
    def requested(self) -> bool:
        """Return whether a signal was received."""
        return self._got is not None

    def check(self) -> None:
        """Raise Terminated if a signal was received."""
        if self._got is not None:
            raise _terminated(self._got)


def hang_up_as_term() -> None:
    """Take the first SIGHUP, of a lost terminal, for SIGTERM: kernel and shell each send one. `nohup` ignores it."""

    def hung_up(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGTERM)

    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, hung_up)


@contextmanager
def handled_by(handler: Any, *numbers: int) -> Iterator[None]:
    """Handle both signals, or `numbers`, with `handler` inside the block."""
    before = {number: signal.signal(number, handler) for number in numbers or STOPS}
    try:
        yield
    finally:
        if handler is stop:  # its exception has arrived
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, old in before.items():
            signal.signal(number, old)


def interruptible(work: Callable[[], Any]) -> Any:
    """Run `work` in a thread, so that the main thread can handle signals while XLA compiles.

    After a signal, the thread continues until `output.leave`.
    """
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(work).result()
    finally:
        pool.shutdown(wait=False)
