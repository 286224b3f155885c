"""Count the kernels of a traced step: products by their shapes, and the passes into which XLA fuses all else.

XLA's rules are many; these few leave the bytes of passes within a fifth of those of the compiled records 21, 89 and 92
(docs/plan.md):

    a product, a kernel, a sum over more than rows, a loop, a scatter or a collective runs by itself, on stored arrays
    all else is computed where it is read, and stored if several read it and reading what it is made of costs more
    stored results of one size share a kernel if they share half of what they read, or one reads the other
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Jaxpr, Literal

from speedrun.plan.cost import ACCESS, INSTRUCTIONS, Collective, Work, gemm, product
from speedrun.plan.efficiencies import KIND
from speedrun.train.memory import ALONE, COLLECTIVES, LOOPS, SUMS, UPDATES, Array, flat, inner

#: Collectives that XLA calls as JAX does; the others sum.
_BY_NAME = {"all_gather", "reduce_scatter", "all_to_all"}
#: Those that read a part of their first operand.
_PARTS = {"slice", "dynamic_slice", "gather", "split"}
#: Numbers of the longest row whose sum is computed where it is read, as in a norm.
_ROW = 8192
#: Columns below which a sum over rows starves: XLA gives each a few threads, which read a row in 4 to 8 ns. A pass
#: moves as many bytes in this time (docs/plan.md).
_FEW_COLUMNS, _STARVED_ROW_BYTES = 64, 14_000
#: Kernels of a sort, in starts of one: CUB counts, and moves keys in four passes, whose blocks wait for each other. Not
#: measured.
_SORT = 20
#: A value with fewer numbers is not worth storing.
_SMALL = 4096


@dataclass(eq=False)
class _Value:
    size: int
    itemsize: int
    maker: "_Operation | None" = None  #: None: an input
    users: "list[_Operation]" = field(default_factory=list)
    is_stored: bool = False
    depth: int = 0  #: kernels before it

    @property
    def num_bytes(self) -> int:
        return self.size * self.itemsize


@dataclass(eq=False)
class _Operation:
    equation: Any
    reads: list[_Value]  #: without constants
    writes: list[_Value] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def elements(self) -> int:
        return max(value.size for value in (*self.writes, *(self.reads if self.name in SUMS else ())))

    @property
    def is_alone(self) -> bool:
        """Whether it runs by itself, so that its results are stored."""
        if self.name not in SUMS:
            return self.name in ALONE
        shape, axes = self.equation.invars[0].aval.shape, self.equation.params["axes"]
        return tuple(axes) != (len(shape) - 1,) or shape[-1] > _ROW

    @property
    def starved_bytes(self) -> int:
        """Bytes that a pass could move while a sum over the rows of a narrow array waits for them."""
        if self.name not in SUMS:
            return 0
        shape, axes = self.equation.invars[0].aval.shape, self.equation.params["axes"]
        rows = math.prod(shape[axis] for axis in axes)
        is_starved = len(shape) - 1 not in axes and rows > _SMALL and math.prod(shape) < _FEW_COLUMNS * rows
        return rows * _STARVED_ROW_BYTES * is_starved


@dataclass(eq=False)
class _Pass:
    """A kernel of XLA."""

    elements: int
    depth: int
    reads: dict[_Value, int] = field(default_factory=dict)  #: bytes
    writes: list[_Value] = field(default_factory=list)
    operations: set[_Operation] = field(default_factory=set)

    def joins(self, elements: int, reads: dict[_Value, int]) -> bool:
        """Whether what reads these joins it."""
        if elements != self.elements or not reads:
            return False
        own = [value for value in reads if value in self.writes]
        if own:
            summed = any(value.maker and value.maker.name in SUMS for value in own)
            return not summed and all(value.depth < self.depth for value in reads if value not in own)
        shared = sum(num_bytes for value, num_bytes in reads.items() if value in self.reads)
        return 2 * shared >= sum(reads.values()) and all(value.depth <= self.depth for value in reads)

    @property
    def work(self) -> Work:
        """Its work. Each number is read or written by three instructions."""
        read = max((num_bytes // value.itemsize for value, num_bytes in self.reads.items()), default=0)
        accessed = read + sum(value.size for value in self.writes)
        computed = sum(INSTRUCTIONS.get(one.name, 1) * one.elements for one in self.operations)
        num_bytes = sum(self.reads.values()) + sum(value.num_bytes for value in self.writes)
        num_bytes += sum(one.starved_bytes for one in self.operations)
        return Work("elementwise", instructions=computed + ACCESS * accessed, num_bytes=num_bytes)


def count(jaxpr: Jaxpr) -> tuple[list[Work], list[Collective]]:
    """Return the kernels of a traced function, each as often as it runs, and its collectives.

    Loops of unknown length count once, all branches of a conditional count.
    """
    works, sent = list[Work](), list[Collective]()
    for one, times in _counted(jaxpr, 1):
        if isinstance(one, Work):
            works.append(one.repeated(times))
        else:
            sent.append(one)
    return works, sent


def _counted(jaxpr: Jaxpr, times: int) -> Iterator[tuple[Work | Collective, int]]:
    operations, results = _graph(jaxpr)
    _store(operations, results)
    passes: list[_Pass] = []
    for one in operations:
        if one.is_alone and one.name not in SUMS:
            for value in one.writes:
                value.depth = 1 + max((x.depth for x in one.reads), default=0)
            yield from _alone(one, times)
        elif any(value.is_stored for value in one.writes):
            _join(passes, one)
    yield from ((one.work, times) for one in passes)


def _join(passes: list[_Pass], one: _Operation) -> None:
    """Put an operation whose result is stored, and all that is computed for it, into a kernel."""
    reads, operations = _cone(one)
    joined = next((each for each in passes if each.joins(one.elements, reads)), None)
    if joined is None:
        passes.append(joined := _Pass(one.elements, 0))
    joined.depth = max(joined.depth, *(1 + x.depth for x in reads if x not in joined.writes), 1)
    for value, num_bytes in reads.items():
        if value not in joined.writes:
            joined.reads[value] = max(joined.reads.get(value, 0), num_bytes)
    joined.writes += [value for value in one.writes if value.is_stored]
    joined.operations |= operations
    for value in joined.writes:
        value.depth = joined.depth


def _graph(jaxpr: Jaxpr) -> tuple[list[_Operation], list[_Value]]:
    """Return all operations that a result needs, with called functions inlined, and the results."""
    found, results = flat(jaxpr)
    known = dict[Array, _Value]()
    operations: list[_Operation] = []

    def value(x: Array) -> _Value:
        return known.setdefault(x, _Value(x.size, x.itemsize, is_stored=True))  # an input

    for equation, reads, writes in found:
        operations.append(one := _Operation(equation, [*map(value, reads)]))
        one.writes = [_Value(x.size, x.itemsize, one) for x in writes]
        known |= zip(writes, one.writes, strict=True)
    wanted = [*map(value, results)]
    return [*_needed(operations, wanted)], wanted


def _needed(operations: Sequence[_Operation], results: Sequence[_Value]) -> Iterator[_Operation]:
    needed = {id(value) for value in results}
    kept: list[_Operation] = []
    for one in reversed(operations):
        if needed & {id(value) for value in one.writes}:
            needed |= {id(value) for value in one.reads}
            for value in one.reads:
                value.users.append(one)
            kept.append(one)
    return reversed(kept)


def _store(operations: Sequence[_Operation], results: Sequence[_Value]) -> None:
    """Mark the values that exist in memory."""
    for value in results:
        value.is_stored = True
    for one in operations:
        if one.is_alone:
            for value in one.writes:
                value.is_stored = True
        if one.name in ALONE:
            for value in one.reads[: -1 if _sets_a_constant(one) else None]:
                value.is_stored = True
    for one in operations:
        if not any(value.is_stored for value in one.writes):
            for value in one.writes:
                value.is_stored = value.size >= _SMALL and _readers(value) > 1 and _saves(value)


def _sets_a_constant(one: _Operation) -> bool:
    """Whether it writes a constant into an array, which XLA computes where it is written."""
    is_array = one.name == "scatter" and not isinstance(one.equation.invars[UPDATES[one.name]], Literal)
    return is_array and (maker := one.reads[-1].maker) is not None and not _cone(maker)[0]


def _readers(value: _Value) -> int:
    """Count the readers of a value, through wider types."""
    found = 0
    for user in value.users:
        is_wider = user.name == "convert_element_type" and user.writes[0].itemsize >= value.itemsize
        found += _readers(user.writes[0]) if is_wider else 1
    return found


def _saves(value: _Value) -> bool:
    """Whether to store a value costs less than to compute it where it is read.

    Values that become narrower are stored in the narrower type, and sums of rows belong to the pass over the row.
    """
    assert value.maker is not None
    narrower = (user.writes[0].itemsize for user in value.users if user.name == "convert_element_type")
    if any(itemsize < value.itemsize for itemsize in narrower):
        return False
    read = sum(_cone(value.maker)[0].values())
    return (2 if value.itemsize <= 2 else 4) * value.num_bytes <= read <= 50 * value.num_bytes


def _cone(root: _Operation) -> tuple[dict[_Value, int], set[_Operation]]:
    """Return the stored values that a result is computed from, with the bytes that are read, and all operations."""
    reads: dict[_Value, int] = {}
    operations, seen = {root}, set[tuple[_Value, int]]()

    def most_of(one: _Operation, place: int, most: int) -> int:
        taken = sum(value.size for value in one.writes)
        return min(most, taken) if one.name in _PARTS and place == 0 else most

    waiting = [(value, most_of(root, place, 2**62)) for place, value in enumerate(root.reads)]
    while waiting:
        value, most = waiting.pop()
        if value.is_stored:
            reads[value] = max(reads.get(value, 0), min(most, value.size) * value.itemsize)
        elif (value, most) not in seen and value.maker is not None:
            seen.add((value, most))
            operations.add(value.maker)
            inputs = enumerate(value.maker.reads)
            waiting += [(each, most_of(value.maker, place, most)) for place, each in inputs]
    return reads, operations


def _alone(one: _Operation, times: int) -> Iterator[tuple[Work | Collective, int]]:
    """Yield the work of an operation that runs by itself."""
    name, params = one.name, one.equation.params
    read = sum(value.num_bytes for value in {*one.reads})
    written = sum(value.num_bytes for value in one.writes)
    if name == "dot_general":
        left, right = (atom.aval for atom in one.equation.invars)
        depth = math.prod(left.shape[axis] for axis in params["dimension_numbers"][0][0])
        num_bytes = left.size * left.dtype.itemsize + right.size * right.dtype.itemsize + written
        yield product(str(left.dtype), depth, one.equation.outvars[0].aval.shape, num_bytes), times
    elif name in COLLECTIVES:
        kind = name.replace("_", "-") if name in _BY_NAME else "all-reduce"
        yield Collective(kind, max(read, written), times), 1
    elif name in LOOPS:
        for body in inner(one.equation):
            yield from _counted(body, times * params.get("length", 1))
    elif name in UPDATES:
        update = one.equation.invars[UPDATES[name]].aval
        accesses = 1 if _sets_a_constant(one) else 2
        yield Work("elementwise", num_bytes=accesses * update.size * update.dtype.itemsize), times
    elif name == "sort":
        yield Work("elementwise", num_bytes=4 * (read + written), starts=_SORT), times
    else:
        yield _of_kernel(one, read + written), times


def _of_kernel(one: _Operation, num_bytes: int) -> Work:
    """Return the work of a Pallas kernel, by what its call states: FLOPs, slots and perhaps its kind; or of a pass."""
    cost, said = (one.equation.params.get(key) for key in ("cost_estimate", "metadata"))
    flops, slots = (cost.flops, cost.transcendentals) if cost else (0, 0)
    kind = gemm(str(one.equation.invars[0].aval.dtype)) if flops else "elementwise"
    return Work((said or {}).get(KIND) or kind, flops, slots, num_bytes)
