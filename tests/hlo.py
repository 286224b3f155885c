"""Parse the text of a compiled XLA program: computations, instructions, and the bytes that each one moves.

Text, because every version of JAX gives it for every backend. The module must be scheduled ("is_scheduled=true").
Needs no JAX.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

#: Opcodes that start no kernel.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"}
_FREE |= {"after-all", "add-dependency", "domain", "partition-id", "replica-id"}
#: Control flow: what it runs counts instead.
_FREE |= {"while", "conditional", "call", "async-start", "async-update", "async-done"}
#: Opcodes that run computations kernel by kernel -> the roles of these.
_ENTERED = {
    "while": ("body",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "call": ("to_apply",),
    "async-start": ("calls",),
}
#: Opcodes that read only the part of their first operand that they return.
_SLICES = ("slice", "dynamic-slice", "gather")
#: Opcodes that update their first operand in place -> index of the operand with the update.
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.-]+)")
_HEADER = re.compile(r"(ENTRY )?%([\w.-]+) \(.*\{$")
_ASSIGNMENT = re.compile(r" +(ROOT )?%([\w.-]+) = ")
#: Opcodes that communicate between devices.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


class Array(NamedTuple):
    """The type of one array."""

    dtype: str  #: as XLA writes it: "bf16", "f8e4m3fn", "s32", "pred"
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements; 4-bit ones are packed."""
        digits = re.search(r"\d+", self.dtype)
        bits = int(digits[0]) if digits else 8 if self.dtype == "pred" else 0  # a token has no bytes
        return -(-self.size * bits // 8)


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    arrays: tuple[Array, ...]  #: the result; the leaves, if it is a tuple
    opcode: str
    operands: tuple[str, ...]  #: names; of a parameter, its number
    attributes: str  #: the rest of the line
    is_root: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def results(self) -> tuple[Array, ...]:
        """The result without the scratch space (`s8`) of library calls."""
        scratch = "s8" if self.opcode == "custom-call" else None
        return tuple(array for array in self.arrays if array.dtype != scratch)

    @property
    def kind(self) -> str:
        """The opcode without the suffix of an asynchronous pair: `all-gather` for `all-gather-start`."""
        return self.opcode.removesuffix("-start").removesuffix("-done")

    def calls(self, *roles: str) -> list[str]:
        """Names of the computations that it runs in one of these roles ("body", "to_apply")."""
        found = re.findall(r"\b(\w+)=(\{[^}]*\}|%[\w.-]+)", self.attributes)
        return [name for role, text in found if role in roles for name in _NAME.findall(text)]

    @property
    def target(self) -> str:
        """Target of a custom call, else empty."""
        return self.attribute(r'custom_call_target="([^"]*)"') or ""

    @property
    def source(self) -> str:
        """JAX's name of the operation, with its scopes; empty if there is none."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    def attribute(self, pattern: str) -> str | None:
        """First group of a regular expression, searched in the attributes."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None


Computation = dict[str, Instruction]


class Executed(NamedTuple):
    """An instruction of the schedule: a kernel by itself, or a fusion."""

    instruction: Instruction
    times: int  #: per call of the program
    inside: Computation  #: what it computes: a fusion's instructions, or this one
    around: Computation  #: has the operands of what is inside

    @property
    def sources(self) -> list[Instruction]:
        """What it reads."""
        if self.inside is self.around:
            return [one for one in self.inside.values() if one.opcode == "parameter"]
        return [self.around[name] for name in dict.fromkeys(self.instruction.operands) if name in self.around]

    @property
    def written(self) -> list[Array]:
        """What it writes."""
        ends = (one for one in self.inside.values() if one.is_root or one is self.instruction)
        return written(next(ends), self.around)

    @property
    def traffic_bytes(self) -> int:
        """Bytes that it reads from and writes to device memory, without caching.

        These are its operands, each once, and its result. Slices and gathers count what they take, updates in place
        what they write, also inside fusions. Scratch space of library calls does not count. An asynchronous pair reads
        at its start and writes at its end.
        """
        opcode = self.instruction.opcode
        if opcode in _FREE:
            return 0
        reads = 0 if opcode.endswith("-done") else sum(taken(one, self.inside) for one in self.sources)
        return reads + (0 if opcode.endswith("-start") else sum(array.num_bytes for array in self.written))


def parse(text: str) -> list[Executed]:
    """Parse the text of `compiled.as_text()`; return every instruction that it executes, in the schedule's order.

    The body of a loop counts by its trip count, or once if that is unknown. All branches of a conditional count. A
    fusion is one kernel, so its inside is left out, as are the functions of reductions.

    Raises:
        ValueError: for anything but a scheduled module.
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(f"got {text[:60]!r}; need the text of a compiled, scheduled HLO module")
    computations: dict[str, Computation] = {}
    entry = current = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = header[2]
            computations[current] = {}
            entry = current if header[1] else entry
        elif assigned := _ASSIGNMENT.match(line):
            one = _instruction(assigned[2], line[assigned.end() :], is_root=bool(assigned[1]))
            computations[current][one.name] = one
    return [*_executed(computations, entry, 1)]


def _executed(computations: dict[str, Computation], name: str, times: int) -> Iterator[Executed]:
    """Yield every instruction of a computation, and of what it runs."""
    for one in computations[name].values():
        if fused := one.calls("calls") if one.kind == "fusion" else []:
            inside = around = computations[fused[0]]
        else:
            inside, around = {one.name: one}, computations[name]
        yield Executed(one, times, inside, around)
        for callee in one.calls(*_ENTERED.get(one.opcode, ())):
            yield from _executed(computations, callee, times * (trip_count(one) or 1))


def _instruction(name: str, text: str, *, is_root: bool) -> Instruction:
    """Parse `bf16[8,4]{1,0} add(%a, %b), metadata={...}`."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opening = text.index("(", end)
    closing = _closing(text, opening)
    opcode, inner = text[end:opening].strip(), text[opening + 1 : closing - 1]
    arrays = tuple(
        Array(dtype, tuple(map(int, filter(None, dims.split(",")))))
        for dtype, dims in _ARRAY.findall(text[:end])
    )
    operands = (inner,) if opcode == "parameter" else tuple(_NAME.findall(inner))
    return Instruction(name, arrays, opcode, operands, text[closing:], is_root)


def _closing(text: str, opening: int) -> int:
    """Return the index after the parenthesis that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    raise ValueError(f"a parenthesis in {text[:60]!r} is never closed")


def trip_count(instruction: Instruction) -> int | None:
    """Return the trip count of a loop, if XLA knows it; else None."""
    text = instruction.attribute(r'"known_trip_count":\{"n":"?(\d+)')
    return int(text) if instruction.opcode == "while" and text else None


def taken(source: Instruction, users: Computation) -> int:
    """Bytes that `users` read of `source`: slices, if all of them only slice."""
    total = 0
    for user in users.values():
        if source.name not in user.operands:
            continue
        only_first = user.operands.index(source.name) == 0 and user.operands.count(source.name) == 1
        if user.opcode == "bitcast":
            total += taken(user, users)
        elif user.attribute(
            rf"triton.*output_to_operand_aliasing=.*: \(({user.operands.index(source.name)}), "
        ):
            continue  # the kernel writes rows of it; a product that is added to it reads it
        elif only_first and user.opcode in _SLICES:
            total += user.num_bytes
        elif not (only_first and user.opcode in UPDATES):
            return source.num_bytes
    return min(total, source.num_bytes)


def written(instruction: Instruction, computation: Computation) -> list[Array]:
    """Return the arrays that an instruction writes: of an update in place, the update."""
    if instruction.opcode in ("bitcast", "tuple"):  # the root of a fusion
        return [array for name in instruction.operands for array in written(computation[name], computation)]
    if instruction.opcode in UPDATES:
        return list(computation[instruction.operands[UPDATES[instruction.opcode]]].arrays)
    return list(instruction.results)
