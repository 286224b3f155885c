"""Count what a compiled program holds, moves and sends."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import compiled_cost
import hlo
import jax
import msgspec
import numpy as np
from deviceless import CUBLAS_GEMMS, compile_for_target, schedule_of

from speedrun.base import accelerators, mesh
from speedrun.plan import cost, fusion
from speedrun.plan.cost import Collective, Line
from speedrun.plan.traced import step_jaxpr
from speedrun.train import memory
from speedrun.train.program import Program

#: How XLA writes the groups of a collective: see `groups`.
_LISTS = re.compile(r"\{((?:\{[\d,]+\},?)*)\}")
_MADE = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"mesh\[((?:'\w+'=\d+,?)+)\] \{([\w',]+)\}")


def compiled_evaluation(program: Program) -> Any:
    """Compile a validation pass for the `target_mesh` of a program."""
    shape = program.eval_shape_at(program.recipe.num_steps)
    inputs = program.state.params, *program.ids(shape), schedule_of(program), program.state.step
    eval_step = program.eval_step_for(shape.static)
    return compile_for_target(eval_step, *inputs, options=program.compiler_options | CUBLAS_GEMMS)


def ended(step: hlo.Executed) -> Iterable[tuple[str, Collective]]:
    """Yield the collectives that an instruction ends, each with the name of the instruction that starts it.

    In an asynchronous pair, operands are those of the start and results those of the end. Since jax 0.12 small
    all-reduces may be kernels of XLA: then the collective is inside a fusion.
    """
    one = step.instruction
    starts, ends = one.opcode.endswith("-start"), one.opcode.endswith("-done")
    if one.kind == "fusion" and not ends:
        for fused in (x for x in step.inside.values() if x.kind in hlo.COLLECTIVES):
            yield one.name, _collective(fused, fused, step)
    elif one.kind in hlo.COLLECTIVES and not starts:
        start = step.around[one.operands[0]] if ends else one
        yield start.name, _collective(one, start, step)


def _collective(end: hlo.Instruction, start: hlo.Instruction, step: hlo.Executed) -> Collective:
    sent_bytes = sum(step.around[name].num_bytes for name in start.operands)
    return Collective(end.kind, max(end.num_bytes, sent_bytes), step.times)


class Sent(Collective, frozen=True):
    """A collective, and what no plan needs of it."""

    dtype: str  #: joined by "+" if XLA combined several arrays
    is_synchronous: bool  #: nothing overlaps with it
    name: str  #: JAX's name of the operation
    groups: tuple[tuple[int, ...], ...]  #: of devices; empty: all are one group


class Anatomy(msgspec.Struct, frozen=True):
    """One call of a compiled program on one device."""

    memory: Any  #: as XLA assigns it on one device, without scratch space that libraries allocate at run time
    collectives: tuple[Sent, ...]  #: in the order of the schedule
    custom_calls: dict[str, int]  #: number of runs, by target
    traffic: dict[str, int]  #: bytes to and from memory (`hlo.Executed.traffic_bytes`) by kind of kernel
    arrays: dict[str, int]  #: bytes of every array in memory, outside kernels, by its type: "bf16[49152,768]"
    unknown_loops: int  #: loops of unknown length, counted once

    @property
    def traffic_bytes(self) -> int:
        """Bytes to and from memory, summed over kernels."""
        return sum(self.traffic.values())

    def sent_bytes(self, kind: str) -> int:
        """Bytes of all collectives of a kind, summed over their runs."""
        return sum(one.num_bytes * one.times for one in self.collectives if one.kind == kind)


def dissect(compiled: jax.stages.Compiled) -> Anatomy:
    """Read a compiled program."""
    return read(compiled.as_text() or "", compiled.memory_analysis())


class Prices(NamedTuple):
    """A step as compiled, and a plan of it over that."""

    lines: tuple[Line, ...]  #: compiled
    time: float
    memory: float


def prices(compiled: jax.stages.Compiled, program: Program, step: int) -> Prices:
    """Compare the kernels of a step as compiled, and its memory, with those that a plan counts."""
    device = accelerators.load("h100")
    simulated = dataclasses.replace(program, mesh=mesh.make_mesh(program.num_devices))
    jaxpr = step_jaxpr(simulated, step, device)
    counted, _ = fusion.count(jaxpr)
    attention_flops = sum(work.flops for work in counted if work.kind == "attention")
    priced = compiled_cost.priced(hlo.parse(compiled.as_text() or ""), attention_flops)
    lines = cost.table([work.repeated(step.times) for step, work in priced if work], device)
    planned_s, compiled_s = (
        sum(one.seconds for one in each) for each in (cost.table(counted, device), lines)
    )
    needed: Any = compiled.memory_analysis()
    share = memory.needed_bytes(simulated, jaxpr) / needed.peak_memory_in_bytes
    return Prices(lines, planned_s / compiled_s, share)


def read(text: str, memory: Any = None) -> Anatomy:
    """Read the text of a scheduled module, and how its memory is assigned; raise ValueError for any other text."""
    calls: Counter[str] = Counter()
    traffic: Counter[str] = Counter()
    arrays: dict[str, int] = {}
    collectives: list[Sent] = []
    unknown_loops = 0
    for step in hlo.parse(text):
        one = step.instruction
        if one.target and not one.opcode.endswith("-done"):
            calls[one.target] += step.times
        unknown_loops += one.opcode == "while" and not hlo.trip_count(one)
        if moved := step.times * step.traffic_bytes:
            traffic[one.target or one.kind] += moved
            names = (f"{array.dtype}[{','.join(map(str, array.dims))}]" for array in one.results)
            arrays |= {name: array.num_bytes for name, array in zip(names, one.results, strict=True)}
        for start, found in ended(step):
            fused = (each for each in step.inside.values() if each.kind == found.kind)
            line = step.around.get(start) or next(fused)
            sent = {array.dtype for name in line.operands for array in step.around[name].arrays}
            waits = not one.opcode.endswith(("-start", "-done")) or '"is_sync":true' in line.attributes
            where = groups(line.attribute(r"replica_groups=(.*)") or "{}")
            dtype, title = "+".join(sorted(sent)), line.source or line.name
            plain = found.kind, found.num_bytes, found.times
            collectives.append(Sent(*plain, dtype, waits, title, where))
    return Anatomy(memory, tuple(collectives), dict(calls), dict(traffic), arrays, unknown_loops)


def groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse the groups of a collective, in the three forms of XLA.

    {{0,2},{1,3}}             lists
    [2,4]<=[4,2]T(1,0)        iota of shape [4, 2], transposed, flattened, cut into 2 rows of 4
    mesh['a'=2,'b'=4] {'b'}   iota with named axes; those in braces lie inside a group
    """
    if lists := _LISTS.match(text):
        return tuple(tuple(map(int, one.split(","))) for one in re.findall(r"[\d,]*\d", lists[1]))
    if made := _MADE.match(text):
        rows, shape, order = (list(map(int, part.split(","))) if part else [] for part in made.groups())
    elif named := _NAMED.match(text):
        names, inside = re.findall(r"'(\w+)'", named[1]), re.findall(r"\w+", named[2])
        shape = list(map(int, re.findall(r"=(\d+)", named[1])))
        order = [names.index(name) for name in [*(x for x in names if x not in inside), *inside]]
        rows = [-1, math.prod(shape[names.index(name)] for name in inside)]
    else:
        raise ValueError(f"got groups {text[:60]!r}; need lists, a reshaped array, or axes of a mesh")
    ids = np.arange(math.prod(shape)).reshape(shape).transpose(order or None).reshape(rows)
    return tuple(map(tuple, ids.tolist()))
