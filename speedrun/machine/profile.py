"""Profile training steps: join a trace with the compiled program."""

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from speedrun.base.errors import SpeedrunError
from speedrun.machine.bench_step import NO_COMMAND_BUFFERS, lowered_step
from speedrun.plan import anatomy, hlo
from speedrun.plan.timeline import Event, Usage, usage
from speedrun.train.program import Program

_CONTROL = {"while", "conditional", "call"}  #: a CPU also reports the events inside these


class Row(NamedTuple):
    """One instruction of the program, averaged over devices."""

    name: str
    kind: str  #: opcode, or target of a custom call
    source: str  #: JAX's name of the operation
    calls: float  #: per step and device
    ms: float  #: per step and device
    share: float  #: of the time of all instructions
    gb_per_s: float | None  #: memory traffic by `hlo`; None if unknown


class Profile(NamedTuple):
    """Profile of some steps of a recipe."""

    step_ms: float  #: from the first kernel to the last over the number of steps; of the slowest device
    rows: list[Row]  #: longest first
    devices: list[Usage]
    num_steps: int

    @property
    def shares(self) -> dict[str, float]:
        """Share of the time by kind, largest first."""
        total: defaultdict[str, float] = defaultdict(float)
        for row in self.rows:
            total[row.kind] += row.share
        return dict(sorted(total.items(), key=lambda item: -item[1]))


def profile(program: Program, *, num_steps: int, first_step: int = 0, folder: Path | None = None) -> Profile:
    """Run steps on synthetic ids under JAX's profiler, after two steps of warm-up.

    Kernels are launched one by one, as a trace shows a command buffer as one event.

    `first_step` of the schedule decides the window. `folder` keeps the trace, for XProf or Perfetto; None deletes it.

    Raises:
        SpeedrunError: if the profiler reports no instruction.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as scratch:
            return profile(program, num_steps=num_steps, first_step=first_step, folder=Path(scratch))
    lowered, (state, *batch, schedule) = lowered_step(program, first_step)
    train_step = lowered.compile(compiler_options=program.compiler_options | NO_COMMAND_BUFFERS)
    for _ in range(2):
        state, _ = train_step(state, *batch, schedule)
    jax.block_until_ready(state)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it takes longer than the steps
    with jax.profiler.trace(folder, profiler_options=options):
        for _ in range(num_steps):
            state, _ = train_step(state, *batch, schedule)
        jax.block_until_ready(state)
    return _read(folder, hlo.parse(train_step.as_text()), num_steps)


def _read(folder: Path, module: hlo.Module, num_steps: int) -> Profile:
    """Join the newest trace in a folder with the program."""
    path = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    known = {one.instruction.name: one for one in module.executed()}
    events = [
        event
        for event in _events(jax.profiler.ProfileData.from_file(str(path)), known)
        if event.name not in known or known[event.name].instruction.opcode not in _CONTROL
    ]
    if not events:
        raise SpeedrunError(f"{path}: no instruction in the trace; need a backend that records them")
    devices = usage(events)
    runs = num_steps * len(devices)
    calls = Counter(event.name for event in events)
    total_ns: defaultdict[str, float] = defaultdict(float)
    for event in events:
        total_ns[event.name] += event.end_ns - event.start_ns
    whole_ns = sum(total_ns.values())
    rows = [
        _row(name, known.get(name), module, calls[name], ns, runs, ns / whole_ns)
        for name, ns in sorted(total_ns.items(), key=lambda item: -item[1])
    ]
    step_ms = max(device.span_ns for device in devices) / num_steps / 1e6
    return Profile(step_ms, rows, devices, num_steps)


def _events(data: Any, known: dict[str, hlo.Executed]) -> Iterator[Event]:
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
                    device = int(gpu[1] if gpu else stats["device_ordinal"])
                    sends = "nccl" in event.name.lower() or _kind(known.get(name)) in anatomy.COLLECTIVES
                    yield Event(name, device, event.start_ns, event.start_ns + event.duration_ns, sends)


def _kind(one: hlo.Executed | None) -> str:
    if one is None:
        return "kernel"
    return one.instruction.attribute(r'custom_call_target="([^"]*)"') or one.instruction.kind


def _row(
    name: str, one: hlo.Executed | None, module: hlo.Module, calls: int, ns: float, runs: int, share: float
) -> Row:
    moved = module.traffic_bytes(one.instruction, one.computation) * calls if one else 0
    source = (one.instruction.attribute(r'op_name="([^"]*)"') if one else None) or ""
    return Row(
        name=name,
        kind=_kind(one),
        source=re.sub(r"^jit\([^)]*\)/(shard_map/)?", "", source),
        calls=calls / runs,
        ms=ns / runs / 1e6,
        share=share,
        gb_per_s=moved / ns if moved and ns else None,
    )
