"""SIGINT and SIGTERM end a run, and nothing cuts short what is written about its end."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from speedrun.errors import INTERRUPTED, Terminated


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


def wait_for(child: subprocess.Popen[bytes]) -> int:
    """The exit code of a child, to which both signals go on.

    A child that a signal ends before it has handlers, and one that ends well because the signal came too late for
    it, were stopped like any other: 130 or 75.
    """
    got: list[int] = []

    def forward(number: int, _frame: object) -> None:
        got.append(number)
        child.send_signal(number)

    with handled_by(forward):
        code = child.wait()
    stopped_by = -code if code < 0 else got[-1] if got and not code else 0
    codes: dict[int, int] = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: Terminated.exit_code}
    return codes.get(stopped_by, code)
