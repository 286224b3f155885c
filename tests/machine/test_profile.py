"""A profile tells of every instruction that the program executes, as often as the program says; and its arithmetic."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import hlo
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typed import as_words, invoke

from speedrun.base import accelerators
from speedrun.base.mesh import make_mesh
from speedrun.machine import profile as profiles
from speedrun.machine.bench_step import lowered_step
from speedrun.machine.profile import Event, Profile, profile, usage
from speedrun.plan import cost
from speedrun.science.recipe import Recipe
from speedrun.train.program import Program

STEPS = 2


@pytest.fixture(scope="module")
def program(tiny: Recipe) -> Program:
    """Two devices, four micro-batches each: there is a loop."""
    return Program(tiny, make_mesh(2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def found(program, folder) -> Profile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(accelerators.DEVICES, "toy", accelerators.load("h100")._replace(name="cpu"))
        return profile(program, num_steps=STEPS, folder=folder)


def test_products_run_as_often_as_the_program_says(program, found):
    schedule = hlo.parse(lowered_step(program, 0)[0].compile().as_text())
    dots = (one for one in schedule if one.instruction.kind == "dot")
    want = Counter({one.instruction.name: one.times for one in dots})
    got = {row.name: row.calls for row in found.rows if row.kind == "dot"}
    assert max(want.values()) > 1, "no product in a loop: the test shows nothing"
    assert got == want


def test_the_table_is_the_whole_time_of_devices_that_compute_and_send_and_the_trace_is_kept(found, folder):
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert [row.ms for row in found.rows] == sorted((row.ms for row in found.rows), reverse=True)
    assert {"all-gather", "reduce-scatter"} <= found.shares.keys()
    assert list(folder.rglob("*.xplane.pb"))
    assert [one.device for one in found.devices] == [0, 1]
    for one in found.devices:
        assert 0 < one.compute_ns <= one.span_ns
        assert 0 < one.collective_ns <= one.span_ns
        assert one.idle_ns == pytest.approx(sum(gap.length_ns for gap in one.gaps))
        assert one.span_ns <= found.step_ms * STEPS * 1e6 * (1 + 1e-9)


def test_kernels_are_compared_with_the_cost_model_by_kind(found):
    """Most of the time belongs to a kind, also on a busy machine; collectives wait, so they do not."""
    kernels_ms = sum(row.ms for row in found.rows if row.kind not in hlo.COLLECTIVES)
    assert 0.6 * kernels_ms < sum(one.ms for one in found.kinds) <= kernels_ms * (1 + 1e-9)
    assert {"GEMM f32", "elementwise"} <= {one.kind for one in found.kinds}
    assert all(one.predicted_ms > 0 for one in found.kinds)


SLICED = """\
HloModule step, is_scheduled=true

%dynamic-slice-fusion (p0: bf16[8,256,256], p1: bf16[256,256]) -> bf16[256,256] {
  %p0 = bf16[8,256,256]{2,1,0} parameter(0)
  %p1 = bf16[256,256]{1,0} parameter(1)
  %slice = bf16[1,256,256]{2,1,0} slice(%p0), slice={[7:8], [0:256], [0:256]}
  %taken = bf16[256,256]{1,0} bitcast(%slice)
  ROOT %matmul.0 = bf16[256,256]{1,0} custom-call(%p1, %taken), custom_call_target="kernel"
}

ENTRY %main (w: bf16[8,256,256], x: bf16[256,256]) -> bf16[256,256] {
  %w = bf16[8,256,256]{2,1,0} parameter(0)
  %x = bf16[256,256]{1,0} parameter(1)
  ROOT %fusion.9 = bf16[256,256]{1,0} fusion(%w, %x), kind=kCustom, calls=%dynamic-slice-fusion
}
"""


def test_a_call_inside_a_fusion_is_that_fusion_though_it_starts_two_kernels():
    """As cuBLAS and Mosaic do on a GPU, where a trace names the call."""

    def event(start_ns: int) -> SimpleNamespace:
        stats = {"hlo_op": "matmul.0"}
        return SimpleNamespace(name="nvjet", stats=stats, start_ns=start_ns, duration_ns=5)

    line = SimpleNamespace(name="Stream #7", events=[event(0), event(5)])
    data = SimpleNamespace(planes=[SimpleNamespace(name="/device:GPU:0", lines=[line])])
    known = profiles.parse(SLICED)
    rows = profiles.rows_of([*profiles.events_of(data, known)], known, num_runs=1)
    assert [(row.name, row.calls, row.ms) for row in rows] == [("fusion.9", 2, pytest.approx(1e-5))]
    counted = cost.table([cost.Work("elementwise", num_bytes=1e6)], accelerators.load("h100"))
    (kind,) = profiles.compared(rows, counted)
    assert msgspec.structs.astuple(kind) == (
        "elementwise",
        pytest.approx(1e-5),
        pytest.approx(1e3 * counted[0].seconds),
    )


@pytest.mark.compile
def test_the_command_shows_it(tmp_path):
    small = as_words({"config.model_dim": 16, "config.num_heads": 2, "config.head_dim": 8})
    args = ["profile", "--devices", "1", "--steps", "1", "--top", "3", *small]
    shown = invoke(*args)
    assert shown.exit_code == 0, shown.output
    assert "ms, 1 steps of smoke on 1 x cpu" in shown.output
    assert " others\n" in shown.output
    result = json.loads(invoke(*args, "--json").stdout)
    assert len(result["rows"]) == 3
    assert result["devices"][0]["span_ns"] == pytest.approx(result["step_ms"] * 1e6)


# --- its arithmetic, by counting instants -------------------------------------------------------------------

END = 40
intervals = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: (min(pair), max(pair)))


def instants(spans: list[tuple[int, int]]) -> set[int]:
    """Every unit of time that is covered, named by its start."""
    return {t for start, end in spans for t in range(start, end)}


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


def test_a_gap_is_named_by_what_ended_last_and_what_came_next_on_its_device():
    """The long collective ends after the product that began behind it."""
    spans = {"gather": (0, 10), "product": (2, 5), "norm": (12, 14), "copy": (15, 16)}
    events = [Event(name, 3, *span, name == "gather") for name, span in spans.items()]
    other, found = usage([*events, Event("b", 0, 100, 101, is_collective=False)])
    assert (other.device, other.span_ns, other.idle_ns, found.device) == (0, 1, 0, 3)
    gaps = [(gap.after, gap.before, gap.length_ns) for gap in found.gaps]
    assert gaps == [("gather", "norm", 2), ("norm", "copy", 1)]
    assert found.hidden_ns == 3
