"""Busy, overlapped and idle time of devices, from the intervals of a trace. Needs no device, and no JAX."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Interval = tuple[float, float]  #: start and end, ns


class Event(NamedTuple):
    """One kernel, or one instruction on a CPU."""

    name: str  #: of the instruction in the compiled program, else of the kernel
    device: int
    start_ns: float
    end_ns: float
    is_collective: bool


class Gap(NamedTuple):
    """An interval in which a device was idle."""

    device: int
    start_ns: float
    end_ns: float
    after: str  #: the event that ended last
    before: str  #: the one that came next

    @property
    def length_ns(self) -> float:
        """Its duration."""
        return self.end_ns - self.start_ns


class Usage(NamedTuple):
    """Time of one device, from the start of its first event to the end of its last."""

    device: int
    span_ns: float
    compute_ns: float  #: at least one event that is no collective
    collective_ns: float  #: at least one collective
    hidden_ns: float  #: both at once
    gaps: tuple[Gap, ...]  #: longest first

    @property
    def idle_ns(self) -> float:
        """Time without any event."""
        return self.span_ns - self.compute_ns - self.collective_ns + self.hidden_ns


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that touch, in order."""
    whole: list[Interval] = []
    for start, end in sorted(intervals):
        if whole and start <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(end, whole[-1][1])
        else:
            whole.append((start, end))
    return whole


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    return sum(end - start for start, end in merged(intervals))


def usage(events: Iterable[Event]) -> list[Usage]:
    """Return one entry per device, in the order of their numbers."""
    by_device: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_device[event.device].append(event)
    return [
        _usage(device, sorted(by_device[device], key=lambda event: event.start_ns))
        for device in sorted(by_device)
    ]


def _usage(device: int, events: Sequence[Event]) -> Usage:
    compute = [(one.start_ns, one.end_ns) for one in events if not one.is_collective]
    collective = [(one.start_ns, one.end_ns) for one in events if one.is_collective]
    span_ns = max(one.end_ns for one in events) - events[0].start_ns
    either = length([*compute, *collective])
    return Usage(
        device=device,
        span_ns=span_ns,
        compute_ns=length(compute),
        collective_ns=length(collective),
        hidden_ns=length(compute) + length(collective) - either,
        gaps=tuple(sorted(_gaps(device, events), key=lambda gap: -gap.length_ns)),
    )


def _gaps(device: int, events: Sequence[Event]) -> Iterable[Gap]:
    """Yield the gaps between events, which are in the order of their starts."""
    last = events[0]
    for event in events[1:]:
        if event.start_ns > last.end_ns:
            yield Gap(device, last.end_ns, event.start_ns, last.name, event.name)
        last = max(last, event, key=lambda one: one.end_ns)
