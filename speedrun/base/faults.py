"""Fault injection for tests at named points of a run, by $SPEEDRUN_FAULTS.

    POINT[@N]=ACTION[:SECONDS],...    once, at the Nth call of the point, counted from 1

`kill`, `term` and `int` send a signal to this process, at once or after some seconds; `sleep` blocks. A run records the
variable, and V402 refuses the record.
"""

import os
import re
import signal
import sys
import threading
from collections import Counter

VARIABLE = "SPEEDRUN_FAULTS"

_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
_FAULTS = {
    (name, int(number or 1)): (action, float(seconds or 0))
    for name, number, action, seconds in re.findall(
        r"([\w.]+)(?:@(\d+))?=(\w+)(?::([\d.]+))?", os.environ.get(VARIABLE, "")
    )
}
_REACHED: Counter[str] = Counter()


def point(name: str) -> None:
    """Inject the fault for this call of the point, if any."""
    if not _FAULTS:
        return
    _REACHED[name] += 1
    action, seconds = _FAULTS.pop((name, _REACHED[name]), ("", 0.0))
    if not action:
        return
    sys.stderr.write(f"fault: {action} at {name}\n")
    if action == "sleep":
        threading.Event().wait(seconds)
    elif seconds:
        threading.Timer(seconds, os.kill, (os.getpid(), _SIGNALS[action])).start()
    else:
        signal.raise_signal(_SIGNALS[action])
