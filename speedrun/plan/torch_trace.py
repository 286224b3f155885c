"""Read traces of PyTorch's profiler with shapes: what launched a kernel, on which shapes, and how long it took."""

import gzip
import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, field

from speedrun.base.accelerators import Device
from speedrun.base.console import clean
from speedrun.base.errors import translate_read_errors
from speedrun.base.wholefile import read_regular
from speedrun.plan.cost import Work
from speedrun.plan.deviceless import Collective
from speedrun.plan.shares import Kind

_MOST_BYTES = 2**30  #: of an unpacked trace
ADVICE = "need a trace of torch.profiler with record_shapes=True, as .json or .json.gz"
_ITEMSIZE = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1}
_NCCL_ITEMSIZE = {"Float": 4, "BFloat16": 2}
_COLLECTIVES = {"_allgather_base": "all-gather", "_reduce_scatter_base": "reduce-scatter"}
_LARGE_BYTES = 2**20  #: a smaller collective is limited by its start
_NARROW = 64  #: a product of fewer rows, columns or terms is not limited by FLOPs
_CACHES = 2  #: an array of so many times the L2 cache comes from memory
_LATE_S = 5e-6  #: the host, not the GPU, made a longer gap


class Operation(NamedTuple):
    """What a kernel computed, and for whom the model has a term."""

    kind: Kind
    name: str
    shape: str
    work: Work | Collective


class _Args(msgspec.Struct, frozen=True):
    """Details of an event; each kind has its own."""

    call: int | None = field(name="correlation", default=None)  #: the call that launched a kernel
    operation: int | None = field(name="External id", default=None)  #: the operation that made the call
    #: Of each argument; a scalar has none.
    dims: list[list[Any]] = field(name="Input Dims", default_factory=list)
    strides: list[list[Any]] = field(name="Input Strides", default_factory=list)
    types: list[str] = field(name="Input type", default_factory=list)
    stream: int = 0
    collective: str = field(name="Collective name", default="")
    dtype: str = ""  #: of a collective
    sent: int = field(name="In msg nelems", default=0)
    received: int = field(name="Out msg nelems", default=0)
    group_size: Annotated[int, Meta(ge=1, le=4096)] = field(name="Group size", default=1)


class _Event(msgspec.Struct, frozen=True):
    """A kernel, the call that launched it, or the operation that made the call."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0  #: microseconds
    dur: float = 0.0  #: microseconds
    args: _Args = _Args()


class _Properties(msgspec.Struct, frozen=True):
    name: str


class Trace(msgspec.Struct, frozen=True, rename="camel"):
    """What PyTorch's profiler saw of one process."""

    trace_events: list[_Event]
    device_properties: Annotated[list[_Properties], Meta(min_length=1)]


def read(path: Path) -> Trace:
    """Return a trace; raise DataError if it is none."""
    with translate_read_errors(path, ADVICE, EOFError, zlib.error):
        raw = read_regular(path, _MOST_BYTES)
        if raw[:2] == b"\x1f\x8b":
            with gzip.open(path) as file:
                raw = file.read(_MOST_BYTES)
        trace = msgspec.json.decode(raw, type=Trace)
        if not any(event.args.dims for event in trace.trace_events):
            raise ValueError("no operation has shapes")
        if not any(event.cat == "kernel" for event in trace.trace_events):
            raise ValueError("no kernel ran on a GPU")
        return trace


def operations(trace: Trace, device: Device) -> Iterator[tuple[Operation | None, str, float]]:
    """Yield what each launch computed, if the model has a term for it, what launched it, and its seconds.

    One launch may start several kernels, such as those that add up the parts of a product.
    """
    launched = {
        event.args.call: event.args.operation
        for event in trace.trace_events
        if event.cat in ("cuda_runtime", "cuda_driver")
    }
    by_number = {event.args.operation: event for event in trace.trace_events if event.cat == "cpu_op"}
    kernels: defaultdict[int | None, list[_Event]] = defaultdict(list)
    for event in trace.trace_events:
        if event.cat == "kernel" and event.dur > 0:
            kernels[launched.get(event.args.call)].append(event)
    for number, started in kernels.items():
        seconds = sum(event.dur for event in started) / 1e6
        launch = by_number.get(number)
        if launch is None:  # launched by a captured graph, or before the trace began
            yield None, "unknown", seconds
        elif found := _collective(started[0].args):
            yield found, launch.name, seconds
        else:
            yield _operation(launch.name, launch.args, device), _launcher(launch.name), seconds


def _launcher(name: str) -> str:
    """Return a short name of what launched a kernel that is compared with nothing."""
    if name.startswith("triton"):
        return "loss head" if "softmax" in name else "fused passes"
    return clean(name.removeprefix("aten::"), limit=40)


def _operation(name: str, args: _Args, device: Device) -> Operation | None:
    dims, strides = ([tuple(each) for each in some if each] for some in (args.dims, args.strides))
    types = [each for each in args.types if each in _ITEMSIZE]
    if min(len(types), len(dims)) < 2:
        return None
    if name in ("aten::mm", "aten::_scaled_mm", "aten::bmm", "aten::baddbmm"):
        left, right = dims[1:3] if name == "aten::baddbmm" else dims[:2]
        return _product(name, left, right, types)
    is_cast = name.startswith("triton_poi") and "_to_copy" in name and types[0] not in types[1:]
    is_sum = name == "aten::add_" and len(dims) == 2 and strides[0] == strides[1]
    if not (is_cast or is_sum) or len(types) != len(dims) or len({*map(math.prod, dims)}) > 1:
        return None  # traffic that depends on what is inside, or on which slice is read
    num_bytes = sum(math.prod(dim) * _ITEMSIZE[kind] for dim, kind in zip(dims, types, strict=True))
    num_bytes += 0 if is_cast else math.prod(dims[0]) * _ITEMSIZE[types[0]]
    if num_bytes < _CACHES * device.l2_bytes:
        return None
    shape = f"{len(dims)} arrays of {_times(dims[0])}"
    return Operation(
        "elementwise", "cast" if is_cast else "sum", shape, Work("elementwise", num_bytes=num_bytes)
    )


def _product(name: str, left: tuple[int, ...], right: tuple[int, ...], types: list[str]) -> Operation | None:
    """Return a product of matrices in 16 or 8 bits. PyTorch multiplies stacks of them for Muon alone."""
    if _ITEMSIZE[types[0]] > 2 or min(*left[-2:], *right[-2:]) < _NARROW:
        return None  # too narrow to be limited by FLOPs
    flops = 2.0 * math.prod(left) * right[-1]
    written = math.prod(left[:-1]) * right[-1]
    num_bytes = _ITEMSIZE[types[0]] * (math.prod(left) + math.prod(right)) + 2 * written
    kind, unit = ("Muon", "stacks") if len(left) == 3 else ("GEMM FP8", "fp8")
    if len(left) == 2 and _ITEMSIZE[types[0]] == 2:
        kind, unit = "GEMM bf16", "bf16"
    work = Work(kind, flops, unit, num_bytes=num_bytes)
    return Operation(kind, name.removeprefix("aten::"), f"{_times(left)} . {_times(right)}", work)


def _collective(args: _Args) -> Operation | None:
    """Return a collective that is large enough to be limited by the links."""
    kind, size = _COLLECTIVES.get(args.collective), _NCCL_ITEMSIZE.get(args.dtype, 0)
    num_bytes = size * max(args.sent, args.received)
    if kind is None or num_bytes < _LARGE_BYTES:
        return None
    group = (tuple(range(args.group_size)),)
    one = Collective(kind, args.dtype, num_bytes, is_synchronous=False, times=1, name="", groups=group)
    return Operation("communication", kind, f"{num_bytes / 1e6:.1f} MB", one)


def _times(dims: Iterable[int]) -> str:
    return "x".join(map(str, dims))


def gaps(trace: Trace) -> list[float]:
    """Return the gaps between two kernels of the busiest stream that were not launched late: below 5 us."""
    streams: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in trace.trace_events:
        if event.cat == "kernel" and not event.args.collective:
            streams[event.args.stream].append((event.ts, event.ts + event.dur))
    spans = sorted(max(streams.values(), key=len, default=[]))
    lengths = [(start - end) / 1e6 for (_, end), (start, _) in itertools.pairwise(spans)]
    return [gap for gap in lengths if 0 < gap < _LATE_S]
