"""SIGINT and SIGTERM end a run, and nothing cuts short what is written about its end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from speedrun.errors import Terminated


def stop(number: int, _frame: object) -> None:
    """A handler that raises.

    Raises:
        KeyboardInterrupt: of SIGINT.
        Terminated: of SIGTERM.
    """
    raise (
        Terminated("stopped by SIGTERM")
        if number == signal.SIGTERM
        else KeyboardInterrupt("stopped by SIGINT")
    )


def ignore(_number: int, _frame: object) -> None:
    """A handler that lets things go on."""


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    """Inside the block, both signals go to `handler`; afterwards, to where they went before."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
