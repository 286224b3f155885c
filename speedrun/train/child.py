"""The child of a keeper: it joins its group, trains, and sends what happens.

python -m speedrun.train.child REQUEST.json EVENTS STACKS       descriptors of a pipe, and of a file
"""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from speedrun.base import messages, runlog, signals
from speedrun.base.clock import Phases
from speedrun.base.output import leave, reported
from speedrun.commands import added
from speedrun.train import connect
from speedrun.train.keeper import Job
from speedrun.train.run_config import decoded

_T = TypeVar("_T")


def end_with_parent(hear: Callable[[str], None]) -> None:
    """Kill this process when its standard input ends: a killed parent has left it alone. `hear` takes the input.

    Linux does so even while another thread holds the interpreter.
    """

    def wait() -> None:
        while said := os.read(0, 64):
            hear(said.decode())
        os.kill(os.getpid(), signal.SIGKILL)

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def attended(kind: type[_T]) -> Iterator[tuple[_T, dict[str, Any]]]:
    """Yield the request of the keeper, and what `recorded.train` needs to send all to it. End with the keeper."""
    faulthandler.register(signal.SIGUSR1, int(sys.argv[3]))
    with reported():
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue] - it is a TextIOWrapper
        sender = messages.Sender(int(sys.argv[2]))
        end_with_parent(sender.answers.put)

        def opened(path: Path | None) -> AbstractContextManager[messages.Log]:
            return nullcontext(sender if path else runlog.RunLog(None))

        yield (
            decoded(Path(sys.argv[1]).read_bytes(), kind),
            {"opened": opened, "phases": Phases(sender.entered)},
        )
        leave(0)  # a thread of a recipe may never end


def importing_jax() -> AbstractContextManager[None]:
    """Let signals end the process inside the block: their exceptions in JAX's C++ start would crash it."""
    return signals.handled_by(signal.SIG_DFL)


def main() -> None:
    """Train the job that the command line names."""
    with attended(Job) as (job, sent):
        with importing_jax():
            from speedrun.train.ranked import train
        config = job.config
        with connect.joined(job.group, job.heartbeat_s, job.meet_s):
            if job.init_from is not None:
                config = added("weights")(config, job.init_from)
            train(config, **sent)


if __name__ == "__main__":
    main()
