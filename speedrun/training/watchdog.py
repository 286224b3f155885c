"""No run hangs for ever: a thread holds every phase against its deadline, and ends the process that is past one.

The run pays nothing for it: the thread looks at where `clock.Phases` stands. What it cannot end is a run that holds
Python's own lock for ever, since then no thread of Python runs.
"""

import faulthandler
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from speedrun.ground import runlog
from speedrun.ground.clock import Phase, Phases
from speedrun.ground.errors import HANG

#: Seconds in one phase at a time: one step, one wait for data, all of one evaluation. Other phases may last.
DEADLINES_S: dict[Phase, float] = {
    **dict.fromkeys(("compile", "warm-up", "evaluation", "checkpoint"), 3600.0),
    **dict.fromkeys(("step", "data"), 900.0),
}
_SLOW = 0.5  #: of a deadline; a line says so, once for each phase
_GRACE_S = 10.0  #: to write down what is known; the disk or the terminal may be what hangs
_LINGER_S = 2.0  #: for the watchdogs of other processes: a process that ends before them looks lost


@contextmanager
def watching(
    phases: Phases, deadlines_s: Mapping[str, float], log: runlog.RunLog, stacks: Path
) -> Iterator[None]:
    """Watches inside the block.

    Args:
        phases: of the run.
        deadlines_s: of some phases, in place of `DEADLINES_S`; 0: none.
        log: is told of what is slow, and why the run ends.
        stacks: the file that shows where the threads of a run stood that hung.
    """
    wanted_s = {phase: s for phase, s in {**DEADLINES_S, **deadlines_s}.items() if s}
    done, told = threading.Event(), set[Phase]()

    def watch() -> None:
        while not done.wait(min(1.0, *(s / 8 for s in wanted_s.values()))):
            phase, stood_s = phases.standing()
            deadline_s = wanted_s.get(phase, math.inf)
            said = f"{phase} has taken {stood_s:.1f} s; its deadline is {deadline_s:g} s"
            if stood_s > deadline_s:
                _end(f"{said}; {stacks.name} shows where all threads stood", log, stacks)
            if stood_s > _SLOW * deadline_s and phase not in told:
                told.add(phase)
                log.emit(runlog.Warning(f"{said}; --deadline {phase}=SECONDS sets it"))

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _end(said: str, log: runlog.RunLog, stacks: Path) -> None:
    """Writes what is known, what is safest first, and ends the process."""
    threading.Timer(_GRACE_S, os._exit, (HANG,)).start()
    try:
        with stacks.open("w") as file:
            faulthandler.dump_traceback(file)
        log.emit(runlog.Error("Hang", said))
        os.write(2, f"error: {said}\n".encode())
        faulthandler.dump_traceback(2)
        threading.Event().wait(_LINGER_S)
    finally:
        os._exit(HANG)
