"""Count what a compiled program holds, moves and sends. Needs no device, and no JAX.

Tests pin these numbers, so that a change which adds an all-gather shows.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from speedrun.plan import hlo

if TYPE_CHECKING:
    from jax.stages import Compiled

#: Opcodes that communicate between devices.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


class Collective(msgspec.Struct, frozen=True):
    """One collective of the schedule."""

    kind: str  #: such as "all-gather"
    dtype: str  #: joined by "+" if XLA combined several arrays
    num_bytes: int  #: of whole arrays: the result of an all-gather, the operand of a reduce-scatter
    is_synchronous: bool  #: nothing overlaps with it
    times: int  #: per call of the program
    name: str  #: JAX's name of the operation
    groups: tuple[tuple[int, ...], ...] = ()  #: of devices; empty: all are one group


class Anatomy(msgspec.Struct, frozen=True):
    """One call of a compiled program on one device."""

    memory: Any  #: as XLA assigns it on one device, without scratch space that libraries allocate at run time
    collectives: tuple[Collective, ...]  #: in the order of the schedule
    custom_calls: dict[str, int]  #: number of runs, by target
    traffic: dict[str, int]  #: bytes to and from memory (`hlo.Module.traffic_bytes`) by kind of kernel
    arrays: dict[str, int]  #: bytes of every array in memory, by its type: "bf16[49152,768]"
    unknown_loops: int  #: loops of unknown length, counted once

    @property
    def traffic_bytes(self) -> int:
        """Bytes to and from memory, summed over kernels."""
        return sum(self.traffic.values())

    def sent_bytes(self, kind: str) -> int:
        """Bytes of all collectives of a kind, summed over their runs."""
        return sum(one.num_bytes * one.times for one in self.collectives if one.kind == kind)

    def holds(self, dtype: str, *dims: int) -> bool:
        """Whether an array of this type is ever in memory. It may still exist inside a kernel."""
        return str(hlo.Array(dtype, dims)) in self.arrays


def dissect(compiled: "Compiled") -> Anatomy:
    """Read a compiled program.

    Raises:
        ValueError: if its backend gives neither text nor memory.
    """
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if memory is None or text is None:
        raise ValueError(f"got {compiled}, which cannot be read; need a program for CPU or CUDA")
    return read(text, memory)


def read(text: str, memory: Any = None) -> Anatomy:
    """Read the text of a scheduled module, and how its memory is assigned.

    Raises:
        ValueError: for any other text.
    """
    calls: Counter[str] = Counter()
    traffic: Counter[str] = Counter()
    arrays: dict[str, int] = {}
    collectives: list[Collective] = []
    unknown_loops = 0
    for step in hlo.parse(text).executed():
        one = step.instruction
        if one.target and not one.opcode.endswith("-done"):
            calls[one.target] += step.times
        unknown_loops += one.opcode == "while" and not hlo.trip_count(one)
        if moved := step.times * step.traffic_bytes:
            traffic[one.target or one.kind] += moved
            arrays |= {str(array): array.num_bytes for array in one.results}
        collectives += [found for _, found in ended(step)]
    return Anatomy(memory, tuple(collectives), dict(calls), dict(traffic), arrays, unknown_loops)


def ended(step: hlo.Executed) -> Iterable[tuple[str, Collective]]:
    """Yield the collectives that an instruction ends, each with the name of the instruction that starts it.

    In an asynchronous pair, operands are those of the start and results those of the end. Since jax 0.12 small
    all-reduces may be kernels of XLA: then the collective is inside a fusion.
    """
    one = step.instruction
    starts, ends = one.opcode.endswith("-start"), one.opcode.endswith("-done")
    if one.kind == "fusion" and not ends:
        for fused in (x for x in step.inside.values() if x.kind in COLLECTIVES):
            yield one.name, _collective(fused, fused, step, is_synchronous=not starts)
    elif one.kind in COLLECTIVES and not starts:
        start = step.around[one.operands[0]] if ends else one
        waits = start is one or '"is_sync":true' in start.attributes
        yield start.name, _collective(one, start, step, is_synchronous=waits)


def _collective(
    end: hlo.Instruction, start: hlo.Instruction, step: hlo.Executed, *, is_synchronous: bool
) -> Collective:
    sent = [array for name in start.operands for array in step.around[name].arrays]
    return Collective(
        kind=end.kind,
        dtype="+".join(sorted({array.dtype for array in sent})),
        num_bytes=max(end.num_bytes, sum(array.num_bytes for array in sent)),
        is_synchronous=is_synchronous,
        times=step.times,
        name=start.source or start.name,
        groups=start.groups,
    )
