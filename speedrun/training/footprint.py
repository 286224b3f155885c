"""The memory and arithmetic of a program, from its table of parameters: known before anything is compiled.

Of record 21's programs for 1 to 8 H100 it is at most a tenth off (`tests/test_h100_program.py`).
"""

import math

import jax
import numpy as np

from speedrun.ground import mesh as meshes
from speedrun.ground.errors import UsageError
from speedrun.science.kernels.choose import HEAD_TOKENS
from speedrun.science.params import Table, count
from speedrun.science.recipe import Stage
from speedrun.training.program import Program


def most_bytes(program: Program) -> int:
    """At the worst moment of training and validation."""
    return max(validation_bytes(program), *(step_bytes(program, stage) for stage in program.recipe.stages))


def step_bytes(program: Program, stage: Stage) -> int:
    """Of a training step: state, whole parameters and gradients, activations, logits with their gradients.

    Supposes what a fast program does: attention that keeps no [T, T], activations that are kept, not computed again.
    """
    tokens = stage.batch_tokens // program.microbatches
    activations = itemsize(program) * tokens * matrix_width(program)
    gradients = 4 * count(program.layout.table)
    return (
        state_bytes(program)
        + whole_bytes(program)
        + gradients
        + activations
        + 2 * logits_bytes(program, tokens)
    )


def validation_bytes(program: Program) -> int:
    """State, whole parameters, the stream of one sequence before and after a layer, and logits."""
    table, seq_len = program.layout.table, program.recipe.eval_seq_len
    width = max(spec.shape[1] for spec in table.values() if spec.group == "head")
    stream = 2 * itemsize(program) * seq_len * width
    return state_bytes(program) + whole_bytes(program) + stream + logits_bytes(program, seq_len)


def state_bytes(program: Program) -> int:
    """Parameters and optimiser state on one device."""
    state = jax.eval_shape(program.init, jax.random.key(0))
    shares = jax.tree.map(
        lambda leaf, spec: leaf.size * leaf.dtype.itemsize // (program.num_shards if spec else 1),
        state,
        program.specs,
    )
    return sum(jax.tree.leaves(shares))


def whole_bytes(program: Program) -> int:
    """All parameters but the scalars, as they are gathered, in the compute dtype."""
    table = program.layout.table.values()
    return itemsize(program) * sum(spec.size for spec in table if spec.group != "scalar")


def matrix_width(program: Program) -> int:
    """Numbers a token that the products of all matrices read and write: m + n for each [m, n]."""
    return sum(
        spec.size // math.prod(spec.shape[-2:]) * sum(spec.shape[-2:])
        for spec in program.layout.table.values()
        if spec.group == "matrix"
    )


def logits_bytes(program: Program, num_tokens: int) -> int:
    """Logits that exist at one time."""
    rows = sum(spec.shape[0] for spec in program.layout.table.values() if spec.group == "head")
    return itemsize(program) * min(num_tokens, HEAD_TOKENS) * rows


def itemsize(program: Program) -> int:
    """Bytes of one number in the compute dtype."""
    return np.dtype(program.recipe.compute_dtype).itemsize


def flops_per_token(table: Table) -> float:
    """Of forward and backward pass: 6 for each weight of a matrix or the head. Attention scores do not count."""
    return 6.0 * sum(spec.size for spec in table.values() if spec.group in ("matrix", "head"))


def require(program: Program, need_bytes: int) -> None:
    """Refuse a program that is larger than the memory of its devices, and say what would fit.

    Raises:
        UsageError: what is needed, what there is, what to type.
    """
    limit_bytes = meshes.memory_bytes(program.mesh)
    if need_bytes > limit_bytes:
        kind = program.mesh.devices.flat[0].device_kind
        raise UsageError(
            f"{program.recipe.name} needs about {need_bytes / 1e9:.2f} GB on each device, this {kind} gives "
            f"{limit_bytes / 1e9:.2f} GB; try {advice(program, limit_bytes) or 'more devices'}"
        )


def advice(program: Program, limit_bytes: int) -> str | None:
    """What to type for a program that does not fit: more parts, of shorter sequences where those run out.

    Found by trying. None if nothing helps.
    """
    recipe = program.recipe
    lengths = [recipe.eval_seq_len, *(stage.seq_len for stage in recipe.stages)]
    for halvings in range(1, 8):
        if any(length % 2**halvings for length in lengths):
            break
        parts = program.microbatches << halvings
        settings: dict[str, int] = {}
        for i, stage in enumerate(recipe.stages):
            if stage.num_sequences % parts:
                settings[f"stages.{i}.num_sequences"] = stage.num_sequences << halvings
                settings[f"stages.{i}.seq_len"] = stage.seq_len >> halvings
        if validation_bytes(program) > limit_bytes:
            settings["eval_sequences"] = recipe.eval_sequences << halvings
            settings["eval_seq_len"] = recipe.eval_seq_len >> halvings
        smaller = recipe.override({key: str(value) for key, value in settings.items()})
        if most_bytes(Program(smaller, program.mesh, parts, program.attention)) <= limit_bytes:
            changes = (f"--set {key}={value}" for key, value in settings.items())
            return " ".join([f"--microbatches {parts}", *changes])
    return None
