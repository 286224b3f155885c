"""The cost model of a step on a device, for `speedrun plan` and `speedrun profile`.

A kernel takes the time of its tightest bound, after a fixed start:

    seconds = START_S + max(FLOPs / rate, instructions / rate, bytes / rate)

Each rate is the vendor's, times a share that programs reach (`shares`).
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from speedrun.base.accelerators import Device
from speedrun.plan.efficiencies import KINDS, REACHES, START_S, UNITS, Kind, Unit, errors

#: What limits a kernel.
Bound = Literal["tensor cores", "instructions", "memory", "starts", "links"]

_LANES = 128  #: of a multiprocessor: four schedulers with 32 threads each

#: SASS instructions per element, by opcode, from XLA's loss head of record 21 on sm_90a: 41 per logit in its sum and 63
#: in its gradient; this table gave 38 and 65. XLA's tanh is a rational function with a division.
INSTRUCTIONS = {"tanh": 22, "exp": 8, "exp2": 8, "div": 8, "log": 10, "rsqrt": 4, "sqrt": 8, "pow": 30}
INSTRUCTIONS |= {"logistic": 12, "sin": 20, "cos": 20, "erf": 20, "rem": 12, "clamp": 2}
INSTRUCTIONS |= dict.fromkeys(("reshape", "broadcast_in_dim", "squeeze", "transpose"), 0)
#: Seconds to start a collective, and per step of a ring. From NCCL's tuning (`src/graph/tuning.cc`: baseLat and hwLat,
#: with the protocol Simple), fitted to machines of NVIDIA.
_RING_START_S, _RING_STEP_S = 8.4e-6, 3.4e-6
#: Sides of a tile of a product, and the least depth of a part of its sum.
_TILE, _DEPTH = 128, 2048
#: Instructions to read or write an element: address, access, conversion.
ACCESS = 3


class Work(NamedTuple):
    """The work of kernels of one kind."""

    kind: Kind
    flops: float = 0.0
    instructions: float = 0.0  #: summed over threads
    num_bytes: float = 0.0  #: to and from memory
    starts: float = 1.0
    tiles: float = math.inf  #: of a product; too few leave multiprocessors idle

    @property
    def unit(self) -> Unit:
        """The arithmetic unit that it runs on."""
        return UNITS.get(self.kind, "bf16")

    def repeated(self, times: int) -> "Work":
        """Return the work of so many such kernels."""
        flops, instructions = times * self.flops, times * self.instructions
        more = {"num_bytes": times * self.num_bytes, "starts": times * self.starts}
        return self._replace(flops=flops, instructions=instructions, **more)


class Line(msgspec.Struct, frozen=True):
    """All kernels of one kind in a step of one device."""

    kind: Kind
    seconds: float
    bound: Bound  #: of the kernels that take most of the time
    flops: float
    instructions: float
    num_bytes: float  #: to and from memory; of communication, to other devices
    starts: float  #: number of kernels
    error: float  #: of `seconds`, relative


class Collective(msgspec.Struct, frozen=True):
    """One collective of a step."""

    kind: str  #: such as "all-gather"
    num_bytes: int  #: of whole arrays: the result of an all-gather, the operand of a reduce-scatter
    times: int  #: per call of the program


def sent_bytes(sent: Sequence[Collective], kind: str) -> int:
    """Return the bytes of all collectives of a kind, summed over their runs."""
    return sum(one.num_bytes * one.times for one in sent if one.kind == kind)


def transfer_s(one: Collective, num_devices: int, device: Device) -> float:
    """Predict one collective over all devices: start, latency of the steps of a ring, bytes over links."""
    ring_s = _rounds(one) * (num_devices - 1) * _RING_STEP_S
    ring_s += _ring_bytes(one, num_devices) / one.times / (REACHES["links"] * device.link_rate)
    return _RING_START_S + ring_s


def waiting(wait_s: float, sent: Sequence[Collective], num_devices: int, device: Device) -> "Line":
    """Return the line of a device that waits so long for its collectives."""
    num_bytes, starts = sum(_ring_bytes(one, num_devices) for one in sent), sum(one.times for one in sent)
    error = errors(device)["communication"]
    return Line("communication", wait_s, "links", 0.0, 0.0, num_bytes, starts, error)


def _ring_bytes(one: Collective, num_devices: int) -> int:
    """Bytes that each of n devices sends: (n - 1) / n of the whole array, twice that for an all-reduce."""
    return one.times * one.num_bytes * _rounds(one) * (num_devices - 1) // num_devices


def _rounds(one: Collective) -> int:
    """How often a collective goes around the ring."""
    return 2 if one.kind == "all-reduce" else 1


def seconds(work: Work, device: Device) -> tuple[float, Bound]:
    """Return the time of a kernel, or of several with the same bound, and that bound."""
    lanes_rate = device.num_cores * _LANES * device.clock_ghz * 1e9
    busy = min(1.0, work.tiles / device.num_cores)
    bounds: dict[Bound, float] = {
        "tensor cores": work.flops / (REACHES[work.unit] * busy * flops_rate(device, work.unit)),
        "instructions": work.instructions / (REACHES["instructions"] * lanes_rate),
        "memory": work.num_bytes / (REACHES["memory"] * device.memory_rate),
    }
    bound = max(bounds, key=bounds.__getitem__)
    start_s = START_S * work.starts
    # Each program of attention loads its own tiles before it multiplies them.
    took_s = sum(bounds.values()) if work.kind == "attention" else bounds[bound]
    return start_s + took_s, bound if took_s > start_s else "starts"


def product(dtype: str, depth: int, dims: Sequence[int], num_bytes: float) -> Work:
    """Return the work of a matrix product of this result, summed over `depth`, by the type of its left factor.

    A multiprocessor computes a tile of the result, or of a part of a deep sum. So one 768 x 768 product of Muon reaches
    0.2 of an H100's rate, and a stack of 24 reaches 0.7 (docs/plan.md).
    """
    sides = math.prod(-(-side // _TILE) for side in dims[-2:])
    tiles = math.prod(dims[:-2]) * sides * max(1, depth // _DEPTH)
    return Work(gemm(dtype), 2.0 * depth * math.prod(dims), num_bytes=num_bytes, tiles=tiles)


def gemm(dtype: str) -> Kind:
    """Return the kind of a product by the type of its left factor, as JAX or XLA writes it."""
    return "GEMM FP8" if "8" in dtype else "GEMM f32" if dtype in ("f32", "float32") else "GEMM bf16"


def flops_rate(device: Device, unit: Unit) -> float:
    """Return the vendor's rate: float32 runs as TF32, at half the rate of bf16; 8 bits as bf16 without FP8 units."""
    if unit in ("fp8", "mosaic fp8"):
        return device.fp8_flops or device.bf16_flops
    return device.bf16_flops / 2 if unit == "f32" else device.bf16_flops


def floor_s(line: Line, device: Device) -> float:
    """Return the time of the FLOPs of a line at the vendor's rate."""
    return line.flops / flops_rate(device, UNITS.get(line.kind, "bf16"))


def table(works: Sequence[Work], device: Device) -> tuple[Line, ...]:
    """Sum kernels by kind."""
    by_kind = ([work for work in works if work.kind == kind] for kind in KINDS)
    return tuple(_line(same, device) for same in by_kind if same)


def _line(works: list[Work], device: Device) -> Line:
    """Sum kernels of one kind."""
    by_bound: dict[Bound, float] = {}
    for work in works:
        took_s, bound = seconds(work, device)
        by_bound[bound] = by_bound.get(bound, 0.0) + took_s
    amounts = zip(*((one.flops, one.instructions, one.num_bytes, one.starts) for one in works), strict=True)
    longest = max(by_bound, key=by_bound.__getitem__)
    kind = works[0].kind
    return Line(kind, sum(by_bound.values()), longest, *map(sum, amounts), error=errors(device)[kind])


def mean(each: Sequence[tuple[float, Sequence[Line]]]) -> tuple[Line, ...]:
    """Return the mean of several steps, each with its share, by kind of kernel."""
    found = []
    for kind in dict.fromkeys(line.kind for _, lines in each for line in lines):
        same = [(share, line) for share, lines in each for line in lines if line.kind == kind]
        sums = ("seconds", "flops", "instructions", "num_bytes", "starts")
        means = {name: sum(share * getattr(line, name) for share, line in same) for name in sums}
        found.append(msgspec.structs.replace(same[0][1], **means))
    return tuple(found)


def gb(num_bytes: float) -> str:
    """Format bytes as GB, 10^9 bytes."""
    return f"{num_bytes / 1e9:.2f} GB"


def ms(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{seconds * 1e3:,.2f} ms"
