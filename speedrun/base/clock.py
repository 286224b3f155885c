"""The only module that reads time.

`Clock` measures the ranked time of a run. Before it starts, pauses or stops, it calls a function that waits for all
devices.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal, NamedTuple

#: Total wall time counts from the import of the harness.
_IMPORT_NS = time.monotonic_ns()


class Stamp(NamedTuple):
    """A time."""

    mono_ns: int
    utc: str


def now() -> Stamp:
    """Return the current time."""
    return Stamp(time.monotonic_ns(), datetime.now(UTC).isoformat(timespec="microseconds"))


def cold_wall_s() -> float:
    """Return the seconds since the harness was imported."""
    return (time.monotonic_ns() - _IMPORT_NS) / 1e9


class Stopwatch:
    """Measures seconds since its creation; never the ranked time."""

    def __init__(self) -> None:
        self._start_ns = time.monotonic_ns()

    @property
    def seconds(self) -> float:
        """Return the seconds so far."""
        return (time.monotonic_ns() - self._start_ns) / 1e9


Phase = Literal["start", "compile", "warm-up", "step", "data", "evaluation", "checkpoint", "end"]


class Phases:
    """The phases of a run since the import. They add up to its wall time."""

    def __init__(self, tell: Callable[[Phase], None] = lambda _: None) -> None:
        """`tell` is called with each phase that begins."""
        self._spent_ns: dict[Phase, int] = {}
        self._current: tuple[Phase, int] = ("start", _IMPORT_NS)
        self._tell = tell

    def enter(self, phase: Phase) -> Phase:
        """Start a phase; return the previous one."""
        left, since_ns = self._current
        self._current = phase, time.monotonic_ns()
        self._spent_ns[left] = self._spent_ns.get(left, 0) + self._current[1] - since_ns
        self._tell(phase)
        return left

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Enter a phase, then restore the previous one."""
        left = self.enter(phase)
        try:
            yield
        finally:
            self.enter(left)

    def current(self) -> tuple[Phase, float]:
        """Return the current phase and its seconds so far."""
        phase, since_ns = self._current
        return phase, (time.monotonic_ns() - since_ns) / 1e9

    def seconds(self) -> dict[Phase, float]:
        """Return the seconds of each phase so far."""
        self.enter(self._current[0])
        return {phase: spent_ns / 1e9 for phase, spent_ns in self._spent_ns.items()}


class Clock:
    """The ranked training time."""

    def __init__(self) -> None:
        self._banked_ns = 0
        self._since_ns: int | None = None

    @property
    def seconds(self) -> float:
        """Return the ranked time so far."""
        running_ns = 0 if self._since_ns is None else time.monotonic_ns() - self._since_ns
        return (self._banked_ns + running_ns) / 1e9

    def resume_at(self, seconds: float) -> None:
        """Continue from the time of an earlier process. Call it before `start`."""
        if self._since_ns is not None or self._banked_ns:
            raise RuntimeError("the clock has been running already")
        self._banked_ns = round(seconds * 1e9)

    def start(self, sync: Callable[[], object]) -> None:
        """Start or resume after `sync`."""
        if self._since_ns is not None:
            raise RuntimeError("the clock is already running")
        sync()
        self._since_ns = time.monotonic_ns()

    def stop(self, sync: Callable[[], object]) -> None:
        """Stop after `sync`, so that unfinished work on a device counts."""
        if self._since_ns is None:
            raise RuntimeError("the clock is not running")
        sync()
        self._banked_ns += time.monotonic_ns() - self._since_ns
        self._since_ns = None

    @contextmanager
    def paused(self, sync: Callable[[], object]) -> Iterator[None]:
        """Pause inside the block; synchronise on both sides."""
        self.stop(sync)
        yield
        self.start(sync)
