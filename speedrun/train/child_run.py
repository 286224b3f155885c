"""A run in a process of its own: whoever asks for runs holds no device, and shows their logs."""

from collections.abc import Sequence
from subprocess import PIPE
from threading import Thread

from speedrun.base import children
from speedrun.base.console import Printer
from speedrun.train.request import RunConfig


def trained(
    config: RunConfig, printer: Printer, *, keep_open: Sequence[int] = (), stderr: int | None = None
) -> tuple[int, str]:
    """Train in a process of its own; show each line of its log, and whatever else it prints.

    It inherits the descriptors `keep_open`. Its standard error goes to `stderr`, as for `Popen`; None: to ours.

    Returns:
        What `children.wait_for` returns, and the last line that was none of the log.
    """
    said, pipes = [""], {"stdout": PIPE, "stderr": stderr, "text": True, "pass_fds": keep_open}
    with children.started("speedrun.train.run", config, **pipes) as process:

        def show() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in map(str.rstrip, lines):
                    if not printer.relay(line) and line:
                        said[0] = line

        shown = Thread(target=show)
        shown.start()
        code = children.wait_for(process)
        shown.join()
    return code, said[0]
