"""A thread that ends the process when a phase exceeds its deadline, unless the main thread never releases the GIL."""

import faulthandler
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from speedrun.base import messages, processes, runlog
from speedrun.base.clock import Phase, Phases
from speedrun.base.errors import HANG

#: Limits for one stay in a phase, such as one step. The end has none.
DEADLINES_S: dict[Phase, float] = {
    **dict.fromkeys(("compile", "warm-up", "evaluation", "checkpoint"), 3600.0),
    **dict.fromkeys(("start", "step", "data"), 900.0),
}
_GRACE_S = 10.0  #: to write stacks and log, since disk or terminal may hang
_LINGER_S = 2.0  #: for the watchdogs of other processes, which would take this one for lost


@contextmanager
def watching(
    phases: Phases, deadlines_s: Mapping[str, float], log: messages.Log, stacks: Path
) -> Iterator[None]:
    """Watch a run inside the block. If it hangs, write the stacks of all threads to the file `stacks`.

    `deadlines_s` replaces entries of `DEADLINES_S`; 0 means none.
    """
    limits_s = {phase: s for phase, s in {**DEADLINES_S, **deadlines_s}.items() if s}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(min(1.0, *(s / 8 for s in limits_s.values()))):
            phase, spent_s = phases.current()
            deadline_s = limits_s.get(phase, math.inf)
            if spent_s > deadline_s:
                message = f"{phase} has taken {spent_s:.1f} s; its deadline is {deadline_s:g} s"
                hint = f"--deadline {phase}=SECONDS sets it; {stacks.name} has the stacks of all threads"
                _end(f"{message}; {hint}", log, stacks)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def starting(out: Path, deadlines_s: Mapping[str, float]) -> Iterator[None]:
    """Watch a run before it has a log, while it imports and traces a recipe."""
    phases = Phases()
    phases.enter("start")  # not from the import on: the process may be old
    with runlog.RunLog(None) as unwritten, watching(phases, deadlines_s, unwritten, stacks_of(out)):
        yield


def stacks_of(out: Path) -> Path:
    """Return the path for the stacks of this process, next to the record."""
    which = f".process-{processes.index()}" if processes.count() > 1 else ""
    return Path(f"{out.resolve()}{which}.stacks.txt")


def _end(message: str, log: messages.Log, stacks: Path) -> None:
    """Write stacks, log and error, the safest first, and end the process."""
    threading.Timer(_GRACE_S, os._exit, (HANG,)).start()
    try:
        with suppress(OSError):  # message and exit code matter more
            stacks.parent.mkdir(parents=True, exist_ok=True)
            with stacks.open("w") as file:
                faulthandler.dump_traceback(file)
        log.emit(runlog.Error("Hang", message))
        os.write(2, f"error: {message}\n".encode())
        faulthandler.dump_traceback(2)
        threading.Event().wait(_LINGER_S)
    finally:
        os._exit(HANG)
