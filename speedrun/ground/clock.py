"""The only reader of time.

`Clock` owns the ranked time of a run. It starts after a host fetch, pauses only for what the track
declares, and stops after a host fetch: the caller hands over a function that blocks until all devices
are done, and the clock calls it before it reads the time.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal, NamedTuple

#: Read when the harness is imported: the cold wall time of a run counts from here.
_BORN_NS = time.monotonic_ns()


class Stamp(NamedTuple):
    """One moment: for differences (`mono_ns`) and for people (`utc`)."""

    mono_ns: int
    utc: str


def now() -> Stamp:
    """This moment."""
    return Stamp(time.monotonic_ns(), datetime.now(UTC).isoformat(timespec="microseconds"))


def today() -> str:
    """The UTC date, as record folders are named."""
    return datetime.now(UTC).date().isoformat()


def cold_wall_s() -> float:
    """Seconds since the harness was imported."""
    return (time.monotonic_ns() - _BORN_NS) / 1e9


class Stopwatch:
    """Seconds since it was made; for compile, warm-up and waiting times, never for the ranked time."""

    def __init__(self) -> None:
        self._start_ns = time.monotonic_ns()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return (time.monotonic_ns() - self._start_ns) / 1e9


Phase = Literal["start", "compile", "warm-up", "step", "data", "evaluation", "checkpoint", "end"]


class Phases:
    """Where the wall time of a run goes, from the import on. It is always in one phase, so they add up to the whole."""

    def __init__(self) -> None:
        self._spent_ns: dict[Phase, int] = {}
        #: The phase, and since when. Always replaced as one: the watchdog's thread reads it without a lock.
        self._here: tuple[Phase, int] = ("start", _BORN_NS)

    def enter(self, phase: Phase) -> Phase:
        """Goes over to a phase; gives the one that was left."""
        left, since_ns = self._here
        self._here = phase, time.monotonic_ns()
        self._spent_ns[left] = self._spent_ns.get(left, 0) + self._here[1] - since_ns
        return left

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Enters a phase, then restores the previous one."""
        left = self.enter(phase)
        try:
            yield
        finally:
            self.enter(left)

    def standing(self) -> tuple[Phase, float]:
        """The phase, and seconds since it was entered; from any thread."""
        phase, since_ns = self._here
        return phase, (time.monotonic_ns() - since_ns) / 1e9

    def seconds(self) -> dict[Phase, float]:
        """Of each phase that there was, up to now."""
        self.enter(self._here[0])
        return {phase: spent_ns / 1e9 for phase, spent_ns in self._spent_ns.items()}


class Clock:
    """Ranked training time. Not running until `start`."""

    def __init__(self) -> None:
        self._banked_ns = 0
        self._since_ns: int | None = None

    @property
    def seconds(self) -> float:
        """Ranked time so far."""
        running_ns = 0 if self._since_ns is None else time.monotonic_ns() - self._since_ns
        return (self._banked_ns + running_ns) / 1e9

    def resume_at(self, seconds: float) -> None:
        """Goes on from the time of an earlier process, before the first `start`."""
        if self._since_ns is not None or self._banked_ns:
            raise RuntimeError("the clock has been running already")
        self._banked_ns = round(seconds * 1e9)

    def start(self, sync: Callable[[], object]) -> None:
        """Starts or resumes, after `sync` has returned."""
        if self._since_ns is not None:
            raise RuntimeError("the clock is already running")
        sync()
        self._since_ns = time.monotonic_ns()

    def stop(self, sync: Callable[[], object]) -> None:
        """Stops, after `sync` has returned: unfinished work on a device is counted."""
        if self._since_ns is None:
            raise RuntimeError("the clock is not running")
        sync()
        self._banked_ns += time.monotonic_ns() - self._since_ns
        self._since_ns = None

    @contextmanager
    def paused(self, sync: Callable[[], object]) -> Iterator[None]:
        """Stands still inside the block; synchronises on both sides."""
        self.stop(sync)
        yield
        self.start(sync)
