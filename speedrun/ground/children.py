"""Waits for a process that a command started: signals go on to it, and it ends first."""

import subprocess

from speedrun.ground import signals
from speedrun.ground.errors import Terminated


def wait_for(child: subprocess.Popen[bytes]) -> int:
    """Waits for a child, forwarding SIGINT and SIGTERM; its exit code.

    Start it with `process_group=0`: else a terminal's Ctrl-C reaches it twice, and the second one is not heeded.

    A child that a signal ends before it has handlers, and one that ends well because the signal came too late for
    it, were stopped like any other: 75.
    """
    got: list[int] = []

    def forward(number: int, _frame: object) -> None:
        got.append(number)
        child.send_signal(number)

    with signals.handled_by(forward):
        code = child.wait()
    return Terminated.exit_code if -code in signals.STOPS or (got and not code) else code
