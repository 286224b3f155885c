"""Trains in a child process, so that the caller holds no device, and shows its log."""

from subprocess import PIPE
from threading import Thread

from speedrun.base import children
from speedrun.base.console import Printer
from speedrun.base.signals import ATTENDED
from speedrun.train.request import RunConfig


def trained(config: RunConfig, printer: Printer, *, stderr: int | None = None) -> tuple[int, str]:
    """Train in a child process, which ends with this one; print its log and its other output.

    `stderr` is as for `Popen`.

    Returns:
        The exit code, as from `children.wait_for`, and the last line that was not an event of the log.
    """
    said, pipes = [""], {"stdin": PIPE, "stdout": PIPE, "stderr": stderr, "text": True}
    with children.started("speedrun.train.ranked", config, ATTENDED, **pipes) as process:

        def show() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in map(str.rstrip, lines):
                    if not printer.relay(line) and line:
                        said[0] = line

        shown = Thread(target=show)
        shown.start()
        assert process.stdin is not None
        with process.stdin:  # its end would end the child
            code = children.wait_for(process)
        shown.join()
    return code, said[0]
