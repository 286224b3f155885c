"""Profile training steps: join a trace with the compiled program; count busy, overlapped and idle time of devices."""

import math
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax

from speedrun.base import accelerators
from speedrun.base.errors import SpeedrunError
from speedrun.machine.bench_step import lowered_step
from speedrun.plan import cost, fusion, hlo
from speedrun.plan.cost import Line
from speedrun.plan.shares import GEMMS, Unit
from speedrun.plan.traced import step_jaxpr
from speedrun.train.program import Program, finite_step

#: Kinds of the cost model by scope of the operation.
_SCOPES = {"attention": "attention", "loss_head": "head passes"}
_CONTROL = {"while", "conditional", "call"}  #: a CPU also reports the events inside these


class Event(NamedTuple):
    """One kernel, or one instruction on a CPU."""

    name: str  #: of the instruction in the compiled program, else of the kernel
    device: int
    start_ns: float
    end_ns: float
    is_collective: bool


class Gap(NamedTuple):
    """An interval in which a device was idle."""

    length_ns: float
    after: str  #: the event that ended last
    before: str  #: the one that came next


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


class Row(NamedTuple):
    """One instruction of the program, averaged over devices."""

    name: str
    kind: str  #: opcode, or target of a custom call
    source: str  #: JAX's name of the operation
    calls: float  #: per step and device
    ms: float  #: per step and device
    share: float  #: of the time of all instructions
    gb_per_s: float | None  #: memory traffic by `hlo`; None if unknown


class Compared(NamedTuple):
    """Kernels of one kind: a step of one device, against the cost model."""

    kind: str
    ms: float
    predicted_ms: float


class Profile(NamedTuple):
    """Profile of some steps of a recipe."""

    step_ms: float  #: from the first kernel to the last over the number of steps; of the slowest device
    rows: list[Row]  #: longest first
    devices: list[Usage]
    num_steps: int
    kinds: list[Compared]  #: without collectives; empty for a device without rates

    @property
    def shares(self) -> dict[str, float]:
        """Share of the time by kind, largest first."""
        total: defaultdict[str, float] = defaultdict(float)
        for row in self.rows:
            total[row.kind] += row.share
        return dict(sorted(total.items(), key=lambda item: -item[1]))


def profile(program: Program, *, num_steps: int, first_step: int = 0, folder: Path | None = None) -> Profile:
    """Run steps on synthetic ids under JAX's profiler, after two steps of warm-up.

    Kernels are launched one by one: a trace shows a command buffer as one event. `first_step` of the schedule decides
    the window. `folder` keeps the trace, for XProf or Perfetto; None deletes it.

    Raises:
        SpeedrunError: if the profiler reports no instruction.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as scratch:
            return profile(program, num_steps=num_steps, first_step=first_step, folder=Path(scratch))
    lowered, (state, *batch, schedule) = lowered_step(program, first_step)
    train_step = program.compiled(lowered, xla_gpu_enable_command_buffer="")
    for _ in range(2):
        state, metrics = train_step(state, *batch, schedule)
        finite_step(program, metrics, f"step {first_step}")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it takes longer than the steps
    with jax.profiler.trace(folder, profiler_options=options):
        for _ in range(num_steps):
            state, _ = train_step(state, *batch, schedule)
        jax.block_until_ready(state)
    schedule = hlo.parse(train_step.as_text())
    found = _read(folder, schedule, num_steps)
    if device := accelerators.named(program.mesh.devices.flat[0].device_kind):
        counted, _ = fusion.count(step_jaxpr(program, first_step, device))
        found = found._replace(kinds=compared(found.rows, schedule, cost.table(counted, device)))
    return found


def compared(rows: list[Row], schedule: list[hlo.Executed], counted: Iterable[Line]) -> list[Compared]:
    """Compare measured kernels with counted ones, by kind, longest first."""
    kinds = {step.instruction.name: _cost_kind(step) for step in schedule}
    sums: defaultdict[str | None, float] = defaultdict(float)
    for row in rows:
        sums[kinds.get(row.name)] += row.ms
    found = [
        Compared(line.kind, sums[line.kind], 1e3 * line.seconds) for line in counted if line.kind in sums
    ]
    return sorted(found, key=lambda one: -one.ms)


def _cost_kind(step: hlo.Executed) -> str | None:
    """Return the cost model's kind of a kernel; None for a collective, and for what starts no kernel."""
    one = step.instruction
    if not step.traffic_bytes or one.kind in hlo.COLLECTIVES:
        return None
    scope = next((kind for name, kind in _SCOPES.items() if name in one.source), None)
    if scope and one.target and not one.target.startswith("__cublas"):
        return scope
    for call in step.inside.values():
        if call.opcode == "dot" or call.target.startswith(("__cublas", "mosaic_gpu")):
            unit = cost.product(step.around[call.operands[0]].arrays[0].dtype, 1, (1, 1), 0.0).unit
            of_mosaic: Unit = "mosaic fp8" if unit == "fp8" else "mosaic"
            return GEMMS[of_mosaic if call.target.startswith("mosaic_gpu") else unit]
    return scope or "elementwise"


def _read(folder: Path, schedule: list[hlo.Executed], num_steps: int) -> Profile:
    """Join the newest trace in a folder with the program."""
    path = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    events = [*events_of(jax.profiler.ProfileData.from_file(str(path)), schedule)]
    if not events:
        raise SpeedrunError(f"{path}: no instruction in the trace; need a backend that records them")
    devices = usage(events)
    step_ms = max(device.span_ns for device in devices) / num_steps / 1e6
    return Profile(step_ms, rows_of(events, schedule, num_steps * len(devices)), devices, num_steps, [])


def rows_of(events: Sequence[Event], schedule: list[hlo.Executed], num_runs: int) -> list[Row]:
    """Sum events by instruction, longest first, for one of `num_runs` steps of a device."""
    known = {step.instruction.name: step for step in schedule}
    calls = Counter(event.name for event in events)
    total_ns: defaultdict[str, float] = defaultdict(float)
    for event in events:
        total_ns[event.name] += event.end_ns - event.start_ns
    whole_ns, rows = sum(total_ns.values()), []
    for name, ns in sorted(total_ns.items(), key=lambda item: -item[1]):
        step = known.get(name)
        moved = step.traffic_bytes * step.times * num_runs if step else 0
        rows.append(
            Row(
                name=name,
                kind=_kind(step),
                source=re.sub(r"^jit\([^)]*\)/(shard_map/)?", "", step.instruction.source if step else ""),
                calls=calls[name] / num_runs,
                ms=ns / num_runs / 1e6,
                share=ns / whole_ns,
                gb_per_s=moved / ns if moved and ns else None,
            )
        )
    return rows


def events_of(data: Any, schedule: list[hlo.Executed]) -> Iterator[Event]:
    """Yield kernels of GPUs, which have a plane each, or instructions from threads of a CPU."""
    # A trace has the name of a custom call that is inside a fusion, because it reads a slice.
    known = {one.name: step for step in schedule for one in step.inside.values() if one.target}
    known |= {step.instruction.name: step for step in schedule}
    for plane in data.planes:
        gpu = re.fullmatch(r"/device:GPU:(\d+)", plane.name)
        for line in plane.lines:
            if gpu and not line.name.startswith("Stream"):
                continue  # a summary of the same kernels
            for event in line.events:
                stats = dict(event.stats)
                if gpu or "hlo_op" in stats:
                    step = known.get(name := str(stats.get("hlo_op", event.name)))
                    name, kind = (step.instruction.name if step else name), _kind(step)
                    device = int(gpu[1] if gpu else stats["device_ordinal"])
                    sends = "nccl" in event.name.lower() or kind in hlo.COLLECTIVES
                    if step is None or step.instruction.opcode not in _CONTROL:
                        yield Event(name, device, event.start_ns, event.start_ns + event.duration_ns, sends)


def _kind(step: hlo.Executed | None) -> str:
    return "kernel" if step is None else step.instruction.target or step.instruction.kind


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, from start to end."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def usage(events: Iterable[Event]) -> list[Usage]:
    """Return one entry per device, in the order of their numbers."""
    in_order = sorted(events, key=lambda event: (event.device, event.start_ns))
    return [_usage(device, [*same]) for device, same in groupby(in_order, lambda event: event.device)]


def _usage(device: int, events: Sequence[Event]) -> Usage:
    compute = [(one.start_ns, one.end_ns) for one in events if not one.is_collective]
    collective = [(one.start_ns, one.end_ns) for one in events if one.is_collective]
    last, gaps = events[0], []
    for event in events[1:]:
        if event.start_ns > last.end_ns:
            gaps.append(Gap(event.start_ns - last.end_ns, last.name, event.name))
        last = max(last, event, key=lambda one: one.end_ns)
    return Usage(
        device=device,
        span_ns=last.end_ns - events[0].start_ns,
        compute_ns=length(compute),
        collective_ns=length(collective),
        hidden_ns=length(compute) + length(collective) - length([*compute, *collective]),
        gaps=tuple(sorted(gaps, key=lambda gap: -gap.length_ns)),
    )
