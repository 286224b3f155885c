"""The arithmetic of a profile: against counting instants one by one, and on small cases drawn by hand."""

from hypothesis import given
from hypothesis import strategies as st

from speedrun.machine.profile import Event, length, usage

END = 40
intervals = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: (min(pair), max(pair)))


def instants(spans: list[tuple[int, int]]) -> set[int]:
    """Every unit of time that is covered, named by its start."""
    return {t for start, end in spans for t in range(start, end)}


@given(st.lists(intervals))
def test_length_is_the_number_of_covered_instants(spans):
    assert length(spans) == len(instants(spans))


events = st.builds(
    lambda span, sends: Event("op", 0, span[0], span[1], sends), intervals, st.booleans()
).filter(lambda event: event.end_ns > event.start_ns)


@given(st.lists(events, min_size=1))
def test_a_device_is_busy_hidden_or_idle_as_its_instants_are(events):
    (found,) = usage(events)
    compute = instants([(int(e.start_ns), int(e.end_ns)) for e in events if not e.is_collective])
    sent = instants([(int(e.start_ns), int(e.end_ns)) for e in events if e.is_collective])
    whole = range(int(min(e.start_ns for e in events)), int(max(e.end_ns for e in events)))
    assert (found.span_ns, found.compute_ns, found.collective_ns) == (len(whole), len(compute), len(sent))
    assert found.hidden_ns == len(compute & sent)
    assert found.idle_ns == len(set(whole) - compute - sent)
    assert found.idle_ns == sum(gap.length_ns for gap in found.gaps)


def test_a_gap_is_named_by_what_ended_last_and_what_came_next():
    """The long collective ends after the product that began behind it."""
    spans = {"gather": (0, 10), "product": (2, 5), "norm": (12, 14), "copy": (15, 16)}
    (found,) = usage(Event(name, 3, *span, name == "gather") for name, span in spans.items())
    gaps = [(gap.after, gap.before, gap.length_ns) for gap in found.gaps]
    assert gaps == [("gather", "norm", 2), ("norm", "copy", 1)]
    assert found.hidden_ns == 3


def test_devices_are_counted_apart():
    events = Event("a", 1, 0, 4, is_collective=False), Event("b", 0, 100, 101, is_collective=False)
    one, other = usage(events)
    assert [(u.device, u.span_ns, u.idle_ns) for u in (one, other)] == [(0, 1, 0), (1, 4, 0)]
