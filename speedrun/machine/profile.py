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
import msgspec

from speedrun.base import accelerators
from speedrun.base.errors import SpeedrunError
from speedrun.machine.bench_step import lowered_step
from speedrun.plan import cost, fusion
from speedrun.plan.cost import Line
from speedrun.plan.efficiencies import UNITS, Kind
from speedrun.plan.traced import step_jaxpr
from speedrun.train.program import FOREIGN, Program, finite_step

_CONTROL = {"while", "conditional", "call"}  #: a CPU also reports the events inside these
_COLLECTIVES = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"}
#: Kinds of a plan by scope of a kernel of this package.
_SCOPES: dict[str, Kind] = {"attention": "attention", "loss_head": "head passes"}
_HEADER = re.compile(r"(?:ENTRY )?%([\w.-]+) \(.*\{$")
_ASSIGNMENT = re.compile(r" +(?:ROOT )?%([\w.-]+) = \(*([a-z]\w*)?.*? ([\w-]+)\((.*)")
_ATTRIBUTES = [*map(re.compile, (r'custom_call_target="([^"]*)"', r'op_name="([^"]*)"', r"calls=%([\w.-]+)"))]


class Instruction(NamedTuple):
    """An instruction of the compiled program."""

    name: str
    kind: str  #: opcode, without the suffix of an asynchronous pair, or target of a custom call
    source: str = ""  #: JAX's name of the operation
    work: Kind | None = None  #: as in a plan; None for what starts no kernel of a plan


class Event(NamedTuple):
    """One kernel, or one instruction on a CPU."""

    name: str  #: of the instruction in the compiled program, else of the kernel
    device: int
    start_ns: float
    end_ns: float
    is_collective: bool


class Gap(msgspec.Struct, frozen=True):
    """An interval in which a device was idle."""

    length_ns: float
    after: str  #: the event that ended last
    before: str  #: the one that came next


class Usage(msgspec.Struct, frozen=True):
    """Time of one device, from the start of its first event to the end of its last."""

    device: int
    span_ns: float
    compute_ns: float  #: at least one event that is no collective
    collective_ns: float  #: at least one collective
    hidden_ns: float  #: both at once
    idle_ns: float  #: without any event
    gaps: tuple[Gap, ...]  #: longest first


class Row(msgspec.Struct, frozen=True):
    """One instruction of the program, averaged over devices."""

    name: str
    kind: str  #: opcode, or target of a custom call
    source: str  #: JAX's name of the operation
    calls: float  #: per step and device
    ms: float  #: per step and device
    share: float  #: of the time of all instructions
    work: Kind | None  #: as in a plan


class Compared(msgspec.Struct, frozen=True):
    """Kernels of one kind: a step of one device, against the cost model."""

    kind: str
    ms: float
    predicted_ms: float


class Profile(msgspec.Struct, frozen=True):
    """Profile of some steps of a recipe."""

    step_ms: float  #: from the first kernel to the last over the number of steps; of the slowest device
    rows: list[Row]  #: longest first
    devices: list[Usage]
    num_steps: int
    shares: dict[str, float]  #: of the time, by kind of all rows, largest first
    kinds: list[Compared] = []  #: without collectives; empty for a device without rates


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
    found = _read(folder, parse(train_step.as_text()), num_steps)
    if device := accelerators.named(program.mesh.devices.flat[0].device_kind):
        counted, _ = fusion.count(step_jaxpr(program, first_step, device))
        found = msgspec.structs.replace(found, kinds=compared(found.rows, cost.table(counted, device)))
    return found


def parse(text: str) -> dict[str, Instruction]:
    """Return what the text of a compiled program executes, by name; for a custom call inside a fusion, the fusion."""
    current = list[Instruction]()
    computations: dict[str, list[Instruction]] = {}
    dtypes, fusions = dict[str, str](), list[tuple[list[Instruction], int, str]]()
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[1], [])
        elif assigned := _ASSIGNMENT.match(line):
            name, dtype, opcode, rest = assigned.groups()
            target, source, fused = (m[1] if (m := one.search(rest)) else "" for one in _ATTRIBUTES)
            kind = target or opcode.removesuffix("-start").removesuffix("-done")
            left = re.search(r"%([\w.-]+)", rest)
            work = _work(kind, source, dtypes.get(left[1], "") if left else "")
            dtypes[name] = dtype or ""
            if kind == "fusion":
                fusions.append((current, len(current), fused))
            current.append(Instruction(name, kind, source, work))
    known = {one.name: one for instructions in computations.values() for one in instructions}
    for around, place, fused in fusions:
        inside = computations.get(fused, [])
        product = next((one.work for one in inside if one.work in {*UNITS} - {"attention"}), None)
        whole = around[place]._replace(work=product or around[place].work)
        # A trace has the name of a custom call that is inside a fusion, because it reads a slice.
        known |= {one.name: whole for one in inside} | {whole.name: whole}
    return known


def _work(kind: str, source: str, dtype: str) -> Kind | None:
    """Return the plan's kind of an instruction; `dtype` is that of the left factor if it is a product."""
    if kind in _COLLECTIVES | _CONTROL:
        return None
    scope: Kind | None = next((_SCOPES[name] for name in _SCOPES if name in source), None)
    if kind in FOREIGN and scope:
        return scope
    is_mosaic = kind.startswith("mosaic_gpu")
    if kind != "dot" and not kind.startswith("__cublas") and not is_mosaic:
        return "elementwise"
    product = cost.gemm(dtype)
    return product if not is_mosaic else "Mosaic FP8" if product == "GEMM FP8" else "Mosaic bf16"


def compared(rows: list[Row], counted: Iterable[Line]) -> list[Compared]:
    """Compare measured kernels with counted ones, by kind, longest first."""
    sums: defaultdict[str | None, float] = defaultdict(float)
    for row in rows:
        sums[row.work] += row.ms
    both = (line for line in counted if line.kind in sums)
    found = [Compared(line.kind, sums[line.kind], 1e3 * line.seconds) for line in both]
    return sorted(found, key=lambda one: -one.ms)


def _read(folder: Path, known: dict[str, Instruction], num_steps: int) -> Profile:
    """Join the newest trace in a folder with the program."""
    path = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    events = [*events_of(jax.profiler.ProfileData.from_file(str(path)), known)]
    if not events:
        raise SpeedrunError(f"{path}: no instruction in the trace; need a backend that records them")
    devices = usage(events)
    step_ms = max(device.span_ns for device in devices) / num_steps / 1e6
    rows = rows_of(events, known, num_steps * len(devices))
    shares = {kind: sum(row.share for row in rows if row.kind == kind) for kind in {row.kind for row in rows}}
    return Profile(step_ms, rows, devices, num_steps, dict(sorted(shares.items(), key=lambda item: -item[1])))


def rows_of(events: Sequence[Event], known: dict[str, Instruction], num_runs: int) -> list[Row]:
    """Sum events by instruction, longest first, for one of `num_runs` steps of a device."""
    calls = Counter(event.name for event in events)
    total_ns: defaultdict[str, float] = defaultdict(float)
    for event in events:
        total_ns[event.name] += event.end_ns - event.start_ns
    whole_ns, rows = sum(total_ns.values()), []
    for name, ns in sorted(total_ns.items(), key=lambda item: -item[1]):
        one = known.get(name, Instruction(name, "kernel"))
        rows.append(
            Row(
                name=name,
                kind=one.kind,
                source=re.sub(r"^jit\([^)]*\)/(shard_map/)?", "", one.source),
                calls=calls[name] / num_runs,
                ms=ns / num_runs / 1e6,
                share=ns / whole_ns,
                work=one.work,
            )
        )
    return rows


def events_of(data: Any, known: dict[str, Instruction]) -> Iterator[Event]:
    """Yield kernels of GPUs, which have a plane each, or instructions from threads of a CPU."""
    for plane in data.planes:
        gpu = re.fullmatch(r"/device:GPU:(\d+)", plane.name)
        for line in plane.lines:
            if gpu and not line.name.startswith("Stream"):
                continue  # a summary of the same kernels
            for event in line.events:
                stats = dict(event.stats)
                if gpu or "hlo_op" in stats:
                    name = str(stats.get("hlo_op", event.name))
                    one = known.get(name, Instruction(name, "kernel"))
                    device = int(gpu[1] if gpu else stats["device_ordinal"])
                    sends = "nccl" in event.name.lower() or one.kind in _COLLECTIVES
                    if one.kind not in _CONTROL:
                        end_ns = event.start_ns + event.duration_ns
                        yield Event(one.name, device, event.start_ns, end_ns, sends)


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
    span_ns, busy_ns = last.end_ns - events[0].start_ns, length([*compute, *collective])
    return Usage(
        device=device,
        span_ns=span_ns,
        compute_ns=length(compute),
        collective_ns=length(collective),
        hidden_ns=length(compute) + length(collective) - busy_ns,
        idle_ns=span_ns - busy_ns,
        gaps=tuple(sorted(gaps, key=lambda gap: -gap.length_ns)),
    )
