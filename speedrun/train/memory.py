"""Estimates the memory of a program from its trace, and its FLOPs from its table of parameters."""

import math
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from speedrun.base import mesh as meshes
from speedrun.base.errors import UsageError
from speedrun.science.params import Table
from speedrun.train.program import Program

TO_FIT = "try more --microbatches, a smaller --set stages.0.seq_len, eval_seq_len or number of rows, or more devices"
#: Primitives that only rename an array, if its size stays.
VIEWS = {"reshape", "squeeze", "transpose", "broadcast_in_dim", "pvary", "pcast", "optimization_barrier"}
SUMS = {f"reduce_{name}" for name in ("sum", "max", "min", "and", "or", "prod")} | {"argmax", "argmin"}
LOOPS = {"scan", "while", "cond"}
#: Those that write a part of their first operand, and which operand that is.
UPDATES = {"scatter": 2, "scatter-add": 2, "dynamic_update_slice": 1}
COLLECTIVES = {"all_gather", "reduce_scatter", "all_to_all", "psum", "psum_invariant", "pmax", "pmin"}
#: Those that run by themselves, on arrays in memory. All others are computed where they are read.
ALONE = {"dot_general", "conv_general_dilated", "pallas_call", "mpmd_map", *LOOPS, *UPDATES, *COLLECTIVES}
ALONE |= {"cumsum", "cummax", "cumprod", "cummin", "cumlogsumexp", "sort", "top_k"}
_PARTS = "num_consts", "num_carry"  #: of a scan, before JAX 0.12
#: Bytes in XLA's order, in which some gradients of weights come later, over those in that of the trace (docs/plan.md).
_SCHEDULE = 1.055


class Array:
    """An array of a traced function; a key of random numbers has no bytes."""

    def __init__(self, var: Any) -> None:
        self.size, self.itemsize = var.aval.size, getattr(var.aval.dtype, "itemsize", 0)
        self.num_bytes = self.size * self.itemsize


def max_bytes(program: Program) -> int:
    """Return the peak memory per device of any step, or of the last validation. A run has traced them already."""
    shapes = dict.fromkeys(map(program.shape_at, range(program.recipe.num_steps)))
    score = program.traced_score(program.eval_shape_at(program.recipe.num_steps))
    return max(needed_bytes(program, x.jaxpr.jaxpr) for x in (score, *map(program.traced_step, shapes)))


def needed_bytes(program: Program, traced: Jaxpr) -> int:
    """Return the memory of the state and of a traced step or validation."""
    return state_bytes(program) + int(_SCHEDULE * temp_bytes(traced))


def temp_bytes(jaxpr: Jaxpr) -> int:
    """Return the most bytes at one time, in the order of a trace, but inputs and results, which take their place."""
    operations, results = flat(jaxpr)
    stored, changes, last, new = {*results}, [0] * (len(operations) + 1), dict[Array, int](), set[Array]()
    for one, reads, writes in operations:
        if one.primitive.name in ALONE | SUMS:
            stored |= {*writes, *(reads if one.primitive.name in ALONE else ())}
    readers, sources = Counter(x for _, reads, _ in operations for x in {*reads}), dict[Array, set[Array]]()
    for place, (one, reads, writes) in enumerate(operations):
        of = set[Array]().union(*(sources.get(x, {x}) for x in reads))
        if sum(x.num_bytes for x in of) >= 2 * sum(x.num_bytes for x in writes):
            stored |= {x for x in writes if readers[x] > 1}  # to read it costs less than what it is made of
        sources |= {x: {x} if x in stored else of for x in writes}
        last |= dict.fromkeys((*of, *writes) if stored.intersection(writes) else (), place)
        inside = max(map(temp_bytes, inner(one)), default=0)
        new |= (made := stored.intersection(writes).difference(results, reads))
        changes[place] += inside + sum(x.num_bytes for x in made)
        changes[place + 1] -= inside
    for x in new:
        changes[last[x] + 1] -= x.num_bytes
    return max(accumulate(changes))


def flat(jaxpr: Jaxpr) -> tuple[list[tuple[JaxprEqn, list[Array], list[Array]]], list[Array]]:
    """Return all operations but views, with what they read and write, and the results. An update makes no new array."""
    operations = []

    def run(jaxpr: Jaxpr, given: list[Any]) -> list[Any]:
        known = dict(zip(jaxpr.invars, given, strict=True)) | {x: Array(x) for x in jaxpr.constvars}
        for one in jaxpr.eqns:
            name, writes = one.primitive.name, [*map(Array, one.outvars)]
            reads = [None if isinstance(atom, Literal) else known[atom] for atom in one.invars]
            if name not in LOOPS and (called := inner(one)):
                writes = run(called[0], reads)
            elif name in VIEWS and [x and x.num_bytes for x in reads] == [x.num_bytes for x in writes]:
                writes = reads
            else:
                tree = one.params.get("ft_in")  # of a scan since JAX 0.12
                parts = [len([*x]) for x in tree.unpack()] if tree else [one.params.get(x, 0) for x in _PARTS]
                first, kept = (len(reads) - len(writes), len(writes)) if name == "while" else parts[:2]
                replaced = reads[first:][: kept or name in UPDATES]
                writes[: len(replaced)] = [x or new for x, new in zip(replaced, writes, strict=False)]
                operations.append((one, [x for x in reads if x], writes))
            known |= zip(one.outvars, writes, strict=True)
        return [None if isinstance(atom, Literal) else known[atom] for atom in jaxpr.outvars]

    return operations, [x for x in run(jaxpr, [*map(Array, jaxpr.invars)]) if x]


def inner(one: JaxprEqn) -> list[Jaxpr]:
    """Return the function that a call runs, or those of a loop or a conditional."""
    names = () if one.primitive.name in ALONE - LOOPS else ("jaxpr", "call_jaxpr", "call", "body_jaxpr")
    found: Any = one.params.get("branches") or map(one.params.get, names)
    return [getattr(x, "jaxpr", x) for x in found if hasattr(x, "eqns")]


def state_bytes(program: Program) -> int:
    """Return the memory of parameters and optimiser state per device."""
    leaves = jax.tree.leaves(program.state)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def flops_per_token(table: Table) -> float:
    """Return the FLOPs of the forward and backward passes: 6 per weight of a matrix or the head; excludes attention."""
    return 6.0 * sum(spec.size for spec in table.values() if spec.group == "head" or spec.packed == "bank")


def fitted_here(program: Program) -> Program:
    """Return the program, or the same with remat where it exceeds a GPU's; raise UsageError if that does."""
    # First its ids: so large a step may not be traced.
    require(program, 8 * max(x.batch_tokens for x in program.recipe.stages) // program.num_devices)
    need_bytes = max_bytes(program)
    if program.kernels.platform != "cpu" and need_bytes > meshes.memory_bytes(program.mesh):
        need_bytes, program = min({max_bytes(x): x for x in (replace(program, remat="on"), program)}.items())
    require(program, need_bytes)
    return program


def require(program: Program, need_bytes: int) -> None:
    """Raise UsageError if a program exceeds the memory of its devices."""
    limit_bytes = meshes.memory_bytes(program.mesh)
    if need_bytes > limit_bytes:
        need = f"{program.recipe.name} needs about {need_bytes / 1e9:.2f} GB on each device"
        kind = program.mesh.devices.flat[0].device_kind
        raise UsageError(f"{need}, this {kind} gives JAX {limit_bytes / 1e9:.2f} GB; {TO_FIT}")
