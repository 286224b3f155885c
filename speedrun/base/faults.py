"""Fault injection for tests: named points in a run, and $SPEEDRUN_FAULTS. Without the variable, `point` does nothing.

    POINT[@N]=ACTION[:SECONDS],...    at the Nth call of the point, counted from 1; once

`kill`, `term` and `int` send a signal to this process, at once or after some seconds; `sleep` blocks. A run records the
variable, and V402 refuses the record.
"""

import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable

VARIABLE = "SPEEDRUN_FAULTS"

_FAULT = re.compile(r"([\w.]+)(?:@(\d+))?=(\w+)(?::([\d.]+))?")
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}


def _absent(name: str) -> None:
    """Do nothing."""


class _Armed:
    def __init__(self, text: str) -> None:
        self._faults: dict[tuple[str, int], tuple[str, float]] = {}
        self._reached: Counter[str] = Counter()
        for name, number, action, seconds in _FAULT.findall(text):
            self._faults[name, int(number or 1)] = action, float(seconds or 0)

    def __call__(self, name: str) -> None:
        self._reached[name] += 1
        action, seconds = self._faults.pop((name, self._reached[name]), ("", 0.0))
        if not action:
            return
        sys.stderr.write(f"fault: {action} at {name}\n")
        if action == "sleep":
            threading.Event().wait(seconds)
        elif seconds:
            threading.Timer(seconds, os.kill, (os.getpid(), _SIGNALS[action])).start()
        else:
            signal.raise_signal(_SIGNALS[action])


point: Callable[[str], None] = _Armed(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else _absent
