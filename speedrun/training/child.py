"""A run in a process of its own: whoever asks for runs holds no device, and shows their logs.

python -m speedrun.training.train REQUEST.json
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Thread

import msgspec

from speedrun.ground import children
from speedrun.ground.console import Printer
from speedrun.ground.wholefile import write_whole
from speedrun.training.request import RunConfig


def trained(
    config: RunConfig, printer: Printer, *, keep_open: Sequence[int] = (), errors: int | None = None
) -> tuple[int, str]:
    """Train, and show each line of the log.

    Args:
        config: the request.
        printer: shows the log, and whatever else the process prints.
        keep_open: descriptors that it inherits.
        errors: where its standard error goes, as for `Popen`; None: to ours.

    Returns:
        What `children.wait_for` returns, and the last line that was none of the log.
    """
    with tempfile.TemporaryDirectory(prefix="speedrun-") as scratch:
        path, said = Path(scratch, "request.json"), [""]
        write_whole(path, msgspec.json.encode(config, enc_hook=str))
        argv = [sys.executable, "-m", "speedrun.training.train", str(path)]
        child = Popen(argv, stdout=PIPE, stderr=errors, text=True, pass_fds=keep_open, process_group=0)

        def show() -> None:
            assert child.stdout is not None
            with child.stdout as lines:
                for line in map(str.rstrip, lines):
                    if not printer.relay(line) and line:
                        said[0] = line

        shown = Thread(target=show)
        shown.start()
        code = children.wait_for(child)
        shown.join()
    return code, said[0]
