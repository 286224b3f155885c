"""Estimates the memory and FLOPs of a program from its parameter table.

The error for record 21 is at most 10 %, besides the sixth that `mlp_mosaic` saves (`tests/plan/test_h100_program.py`).
"""

import math
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import PartitionSpec

from speedrun.base import mesh as meshes
from speedrun.base.errors import UsageError
from speedrun.science.params import Table
from speedrun.science.recipe import Stage
from speedrun.train.program import Program

#: What to do if a program does not fit.
TO_FIT = "try more --microbatches, a smaller --set stages.0.seq_len, eval_seq_len or number of rows, or more devices"


def most_bytes(program: Program) -> int:
    """Return the peak memory of training and validation per device."""
    return max(validation_bytes(program), *(step_bytes(program, stage) for stage in program.recipe.stages))


def step_bytes(program: Program, stage: Stage) -> int:
    """Return the memory of a training step: state, whole parameters, all gradients, activations and logits.

    Assumes that attention stores no [T, T] array. Activations are the inputs and outputs of matmuls or, if memory is
    scarce, only the outputs of matmuls and kernels: two thirds.
    """
    tokens = stage.batch_tokens // program.microbatches
    activations = itemsize(program) * tokens * matrix_width(program)
    activations = activations if program.memory == "ample" else activations * 2 // 3
    held, specs = state_bytes(program) + whole_bytes(program), program.layout.table.values()
    gradients = 4 * sum(spec.size for spec in specs if not spec.reads)
    travelling = (4 + 2 * itemsize(program)) * travelling_scalars(program, tokens)
    return held + gradients + travelling + activations + 2 * logits_bytes(program, tokens)


def validation_bytes(program: Program) -> int:
    """Return the memory of validation: state, whole parameters, rows, a sequence around a layer, and logits."""
    table, seq_len = program.layout.table, program.recipe.eval_seq_len
    width = max((spec.shape[-1] for spec in table.values() if spec.packed == "rows"), default=0)
    stream = 2 * itemsize(program) * (seq_len * width + travelling_scalars(program, seq_len))
    return state_bytes(program) + whole_bytes(program) + stream + logits_bytes(program, seq_len)


def state_bytes(program: Program) -> int:
    """Return the memory of parameters and optimiser state per device."""

    def own(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> int:
        return leaf.size * leaf.dtype.itemsize // (program.num_shards if spec else 1)

    return sum(jax.tree.leaves(jax.tree.map(own, program.state, program.specs)))


def whole_bytes(program: Program) -> int:
    """Return the memory of parameters in the compute dtype, as a device has them in a step, without scalars."""
    specs = program.layout.table.values()
    return itemsize(program) * sum(spec.size for spec in specs if spec.packed != "vector" and not spec.reads)


def travelling_scalars(program: Program, num_tokens: int) -> int:
    """Return the scalars of the rows that so many tokens read."""
    ids, specs = jax.ShapeDtypeStruct((1, num_tokens), np.int32), program.layout.table.values()
    return sum(jax.eval_shape(spec.reads, ids).size * spec.shape[-1] for spec in specs if spec.reads)


def matrix_width(program: Program) -> int:
    """Return the numbers that all weight matmuls read and write per token: m + n for each [m, n]."""
    shapes = [spec.shape for spec in program.layout.table.values() if spec.packed == "bank"]
    return sum(math.prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes)


def logits_bytes(program: Program, num_tokens: int) -> int:
    """Return the memory of the logits that exist at one time."""
    rows = sum(spec.shape[0] for spec in program.layout.table.values() if spec.group == "head")
    num_tokens = min(num_tokens, program.kernels.head_tokens)
    return itemsize(program) * num_tokens * (rows or program.recipe.config.vocab_size)


def itemsize(program: Program) -> int:
    """Return the bytes per number in the compute dtype."""
    return np.dtype(program.recipe.compute_dtype).itemsize


def flops_per_token(table: Table) -> float:
    """Return the FLOPs of the forward and backward passes: 6 per weight of a matrix or the head; excludes attention."""
    return 6.0 * sum(spec.size for spec in table.values() if spec.group == "head" or spec.packed == "bank")


def fitted(program: Program, limit_bytes: int) -> Program:
    """Return the program, or its variant for scarce memory if it exceeds the limit."""
    return program if most_bytes(program) <= limit_bytes else replace(program, memory="scarce")


def fitted_here(program: Program) -> Program:
    """Return `fitted` for the program's devices (unchanged on CPUs); raise UsageError if it is too large."""
    if program.kernels.platform != "cpu":
        program = fitted(program, meshes.memory_bytes(program.mesh))
    require(program, most_bytes(program))
    return program


def require(program: Program, need_bytes: int) -> None:
    """Raise UsageError if a program exceeds the memory of its devices."""
    limit_bytes = meshes.memory_bytes(program.mesh)
    if need_bytes > limit_bytes:
        kind = program.mesh.devices.flat[0].device_kind
        raise UsageError(
            f"{program.recipe.name} needs about {need_bytes / 1e9:.2f} GB on each device, this {kind} has "
            f"{limit_bytes / 1e9:.2f} GB; {TO_FIT}"
        )
