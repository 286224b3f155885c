"""SIGINT and SIGTERM end a run, and nothing cuts short what is written about its end."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

from speedrun.ground.errors import INTERRUPTED, Terminated

STOPS = (signal.SIGINT, signal.SIGTERM)


def stop(number: int, _frame: object) -> None:
    """A handler that raises, inside `handled_by`.

    Where Python drops what is raised, as in a callback of its collector (JAX has one), it raises again soon.

    Raises:
        Terminated: of either signal.
    """

    def again(_alarm: int, _frame: object) -> None:
        handler = signal.getsignal(number)
        if callable(handler) and (handler is stop or isinstance(handler, Later)):  # still ours
            handler(number, None)

    _prepare_to_raise_again()
    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    raise _terminated(number)


def _terminated(number: int) -> Terminated:
    return Terminated(f"stopped by {signal.Signals(number).name}")


@cache
def _prepare_to_raise_again() -> None:
    """What is dropped need not be told."""
    tell = sys.unraisablehook
    sys.unraisablehook = lambda told: None if isinstance(told.exc_value, Terminated) else tell(told)


def ignore(_number: int, _frame: object) -> None:
    """A handler that lets things go on."""


class Later:
    """A handler that waits for a good moment: `check` raises. A second signal does not wait."""

    def __init__(self) -> None:
        self._got: int | None = None

    def __call__(self, number: int, _frame: object) -> None:
        """Handles a signal.

        Raises:
            KeyboardInterrupt: of the second one.
        """
        if self._got is not None:
            raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}, the second signal")
        self._got = number

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self._got is not None

    def check(self) -> None:
        """A moment at which the run can stop.

        Raises:
            Terminated: if a signal came.
        """
        if self._got is not None:
            raise _terminated(self._got)


@contextmanager
def handled_by(handler: Any, *numbers: int) -> Iterator[None]:
    """Inside the block, both signals, or those given, go to `handler`; afterwards, to where they went before."""
    before = {number: signal.signal(number, handler) for number in numbers or STOPS}
    try:
        yield
    finally:
        if handler is stop:  # what it raised has come through
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def heeded() -> Iterator[None]:
    """`handled_by(stop)` around a whole command. A signal that comes while it is leaving ends it at once."""
    try:
        with handled_by(stop):
            yield
    except Terminated:
        for number in STOPS:
            signal.signal(number, lambda *_: os._exit(INTERRUPTED))
        raise


def beside(work: Callable[[], Any]) -> Any:
    """Runs `work` in a thread, so that the main thread can handle signals while XLA compiles.

    A thread that was abandoned runs on until `output.leave`.
    """
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(work).result()
    finally:
        pool.shutdown(wait=False)
