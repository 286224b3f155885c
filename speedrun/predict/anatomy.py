"""What a compiled program holds, moves and sends, read from the program itself. Needs no device, and no JAX.

"A change that adds an all-gather" is a change of these numbers, so a test can name it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from speedrun.predict import hlo

if TYPE_CHECKING:
    from jax.stages import Compiled

#: Opcodes that send between devices.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_SHOWN = 6  #: of the largest


class Collective(msgspec.Struct, frozen=True):
    """One collective of the schedule."""

    kind: str  #: such as "all-gather"
    dtype: str  #: joined by "+", if XLA combined several
    num_bytes: int  #: of the whole arrays: what an all-gather returns, what a reduce-scatter takes
    is_synchronous: bool  #: nothing is computed while it runs
    times: int  #: in one call of the program
    name: str  #: where it comes from, as JAX names operations
    groups: tuple[tuple[int, ...], ...] = ()  #: devices that it sends between; empty: all are one group

    def __str__(self) -> str:
        waits = ", synchronous" if self.is_synchronous else ""
        return f"{self.times} x {self.kind} {self.dtype}, {self.num_bytes:,} bytes{waits} ({self.name})"


class Memory(msgspec.Struct, frozen=True):
    """What the compiler has assigned on one device. Scratch that libraries ask for at run time is not in it."""

    peak_bytes: int  #: arguments, results and temporaries at the worst moment
    argument_bytes: int
    output_bytes: int
    donated_bytes: int  #: results that lie where arguments were
    temporary_bytes: int


class Anatomy(msgspec.Struct, frozen=True):
    """One call of a compiled program on one device."""

    memory: Memory
    collectives: tuple[Collective, ...]  #: in the order of the schedule
    custom_calls: dict[str, int]  #: how often each target runs
    traffic: dict[str, int]  #: bytes to and from memory (`hlo.Module.traffic_bytes`) by kind of kernel
    arrays: dict[str, int]  #: bytes of every array that lies in memory, by its type: "bf16[49152,768]"
    unknown_loops: int  #: loops counted once, because XLA does not know their length

    @property
    def traffic_bytes(self) -> int:
        """Bytes to and from memory, of all kernels."""
        return sum(self.traffic.values())

    def sent_bytes(self, kind: str) -> int:
        """Bytes of all collectives of a kind, each as often as it runs."""
        return sum(one.num_bytes * one.times for one in self.collectives if one.kind == kind)

    def holds(self, dtype: str, *dims: int) -> bool:
        """Whether an array of this type ever lies in memory. Inside a kernel it may exist all the same."""
        return str(hlo.Array(dtype, dims)) in self.arrays

    def json(self) -> bytes:
        """All of it as one JSON object."""
        return msgspec.json.encode({**msgspec.structs.asdict(self), "traffic_bytes": self.traffic_bytes})

    def table(self) -> str:
        """All of it for people; of what is long, the largest. GB are 10^9 bytes."""
        memory = msgspec.structs.asdict(self.memory)
        rows = {
            "memory": ", ".join(f"{name.removesuffix('_bytes')} {_gb(memory[name])}" for name in memory),
            "traffic": f"{_gb(self.traffic_bytes)}: {_largest(self.traffic)}",
            "arrays": _largest(self.arrays),
            "custom calls": ", ".join(f"{times} x {name}" for name, times in self.custom_calls.items()),
            "collectives": "\n".join(map(str, self.collectives)),
            "loops": f"{self.unknown_loops} of unknown length, counted once" if self.unknown_loops else "",
        }
        return "\n".join(_row(name, text or "none") for name, text in rows.items())


def dissect(compiled: "Compiled") -> Anatomy:
    """Reads a compiled program.

    Raises:
        ValueError: if its backend tells neither its text nor its memory.
    """
    stats, text = compiled.memory_analysis(), compiled.as_text()
    if stats is None or text is None:
        raise ValueError(f"got {compiled}, which cannot be read; need a program for CPU or CUDA")
    memory = Memory(
        peak_bytes=stats.peak_memory_in_bytes,
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        donated_bytes=stats.alias_size_in_bytes,
        temporary_bytes=stats.temp_size_in_bytes,
    )
    return read(text, memory)


def read(text: str, memory: Memory) -> Anatomy:
    """Reads the text of a scheduled module.

    Raises:
        ValueError: if it is none.
    """
    module = hlo.parse(text)
    calls: Counter[str] = Counter()
    traffic: Counter[str] = Counter()
    arrays: dict[str, int] = {}
    for one, computation, times in module.executed():
        target = one.attribute(r'custom_call_target="([^"]*)"')
        if target and not one.opcode.endswith("-done"):
            calls[target] += times
        if moved := times * module.traffic_bytes(one, computation):
            traffic[target or one.kind] += moved
            arrays |= {str(array): array.num_bytes for array in one.results}
    collectives = tuple(found for step in module.executed() for _, found in ended(module, step))
    return Anatomy(memory, collectives, dict(calls), dict(traffic), arrays, module.unknown_loops())


def ended(module: hlo.Module, step: hlo.Executed) -> Iterable[tuple[str, Collective]]:
    """Collectives that this instruction ends, each with the name of the instruction that starts it.

    Of an asynchronous pair, the start knows what is sent and the end what arrives. Small all-reduces may be kernels
    of XLA's own (jax 0.12): then the collective stands inside a fusion.
    """
    one, computation, times = step
    if one.kind == "fusion" and not one.opcode.endswith("-done"):
        inside = module.fused(one) or {}
        for fused in (x for x in inside.values() if x.kind in COLLECTIVES):
            waits = not one.opcode.endswith("-start")
            yield one.name, _collective(fused, fused, inside, times, is_synchronous=waits)
    elif one.kind in COLLECTIVES and not one.opcode.endswith("-start"):
        start = computation[one.operands[0]] if one.opcode.endswith("-done") else one
        waits = start is one or '"is_sync":true' in start.attributes
        yield start.name, _collective(one, start, computation, times, is_synchronous=waits)


def _collective(
    end: hlo.Instruction,
    start: hlo.Instruction,
    computation: hlo.Computation,
    times: int,
    *,
    is_synchronous: bool,
) -> Collective:
    sent = [array for name in start.operands for array in computation[name].arrays]
    return Collective(
        kind=end.kind,
        dtype="+".join(sorted({array.dtype for array in sent})),
        num_bytes=max(end.num_bytes, sum(array.num_bytes for array in sent)),
        is_synchronous=is_synchronous,
        times=times,
        name=start.attribute(r'op_name="([^"]*)"') or start.name,
        groups=start.groups,
    )


def _largest(sizes: Mapping[str, int]) -> str:
    ranked = sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {_gb(size)}" for name, size in ranked[:_SHOWN])


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3f} GB"


def _row(name: str, text: str) -> str:
    return f"{name:<13} " + text.replace("\n", "\n" + " " * 14)
