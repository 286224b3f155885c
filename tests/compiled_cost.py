"""Price the kernels of a compiled program: the oracle of `plan`, which counts those of a traced step."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import hlo
from hlo import UPDATES, Computation, Executed, Instruction, taken, written

from speedrun.plan.cost import ACCESS, INSTRUCTIONS, Work, product
from speedrun.plan.efficiencies import Kind
from speedrun.plan.traced import HEAD_SLOTS

#: Opcodes whose work is the size of their first operand.
_REDUCTIONS = {"reduce", "reduce-window"}
#: Opcodes of XLA, by their names in JAX, whose instructions a plan knows.
_NAMES: dict[str, str] = {
    "exponential": "exp",
    "divide": "div",
    "power": "pow",
    "sine": "sin",
    "cosine": "cos",
}
_NAMES |= {"remainder": "rem"}
#: Instructions of an element in XLA, where it writes what JAX has no operation for.
_FREE = ("parameter", "constant", "broadcast", "bitcast", "tuple", "get-tuple-element")
_OF_XLA: dict[str, int] = dict.fromkeys(_FREE, 0)


class Product(NamedTuple):
    """A matrix product inside a kernel."""

    dtype: str  #: of the left factor
    depth: int  #: terms of each sum
    dims: tuple[int, ...]  #: of the result
    is_mosaic: bool  #: a kernel of `mlp_mosaic`

    @property
    def flops(self) -> float:
        """Two per multiply-add."""
        return 2.0 * self.depth * math.prod(self.dims)


def products(step: Executed) -> list[Product]:
    """Matrix products: its own, or those inside a fusion."""
    return [found for one in step.inside.values() if (found := _product(one, step.around))]


def _product(one: Instruction, computation: Computation) -> Product | None:
    """Return the product of a dot, of a library call that computes one, or of a kernel in `mlp_mosaic`."""
    target = one.attribute(r'custom_call_target="((?:__cublas|mosaic_gpu)[^"]*)"')
    of_mlp = one.attribute(r'custom_call_target="(mosaic_gpu).*op_name="[^"]*\bmlp\b') and "1"
    summed = of_mlp or one.attribute(r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([^\]}]*)')
    if summed is None or not one.results or (one.opcode != "dot" and target is None):
        return None
    (left, *_) = computation[one.operands[0]].arrays
    depth = math.prod(left.dims[int(dim)] for dim in re.findall(r"\d+", summed))
    return Product(left.dtype, depth, one.results[0].dims, bool(of_mlp))


def computed(step: Executed) -> Counter[str]:
    """Elements that it computes, by opcode: of a reduction its input, of an update in place the update."""
    elements: Counter[str] = Counter()
    for one in step.inside.values():
        of = one.operands[:1] if one.opcode in _REDUCTIONS else ()
        arrays = [array for name in of for array in step.around[name].arrays]
        arrays = arrays or (written(one, step.around) if one.opcode in UPDATES else one.arrays)
        elements[one.opcode] += max((array.size for array in arrays), default=0)
    return elements


def accessed(step: Executed) -> int:
    """Elements that it reads, each once, and writes; of an update in place, only the update counts."""
    read = [
        x.size * taken(one, step.inside) // one.num_bytes
        for one in step.sources
        if one.num_bytes
        for x in one.arrays
    ]
    return max(read, default=0) + sum(x.size for x in step.written)


def priced(steps: Sequence[Executed], attention_flops: float) -> Iterator[tuple[Executed, Work | None]]:
    """Yield every instruction of the schedule, with the work of one execution, or None if it starts no kernel.

    Attention is divided evenly over its kernels, which are opaque to XLA.
    """
    calls = sum(step.times for step in steps if _is_opaque(step.instruction, "attention"))
    for step in steps:
        yield step, _work(step, attention_flops / max(1, calls))


def _work(step: Executed, attention_flops: float) -> Work | None:
    one, num_bytes = step.instruction, step.traffic_bytes
    if not num_bytes or one.kind in hlo.COLLECTIVES:
        return None
    if _is_opaque(one, "attention"):
        return Work("attention", attention_flops, num_bytes=num_bytes)
    if _is_opaque(one, "loss_head"):
        logits = max(array.size for name in one.operands for array in step.around[name].arrays)
        return Work("head passes", instructions=HEAD_SLOTS * logits, num_bytes=num_bytes)
    if found := products(step):
        largest = max(found, key=lambda p: p.flops)
        work = product(largest.dtype, largest.depth, largest.dims, num_bytes)
        if largest.is_mosaic:
            kind: Kind = "Mosaic FP8" if work.kind == "GEMM FP8" else "Mosaic bf16"
            work = work._replace(kind=kind, tiles=math.inf)
        return work._replace(flops=sum(p.flops for p in found))
    elements = computed(step).items()
    instructions = sum(
        INSTRUCTIONS.get(_NAMES.get(name, name), _OF_XLA.get(name, 1)) * n for name, n in elements
    )
    of_head: Kind = "head passes" if "loss_head" in one.source else "elementwise"
    kind = "attention" if "attention" in one.source else of_head
    return Work(kind, instructions=instructions + ACCESS * accessed(step), num_bytes=num_bytes)


def _is_opaque(one: Instruction, scope: str) -> bool:
    """Whether this is a kernel of a scope not written by XLA, which shows its operands but not its arithmetic."""
    return one.kind == "custom-call" and not one.target.startswith("__cublas") and scope in one.source
