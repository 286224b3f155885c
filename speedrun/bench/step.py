"""The whole training step."""

from typing import Any, NamedTuple

import jax
import numpy as np

from speedrun import devices
from speedrun import mesh as meshes
from speedrun.bench.timing import middle
from speedrun.clock import Stopwatch
from speedrun.footprint import flops_per_token
from speedrun.program import Program


class StepTimings(NamedTuple):
    """Training steps on random ids, one after the other, each waited for."""

    ms: list[float]  #: of each step, in order
    median_ms: float
    spread_ms: float  #: from the first to the ninth decile
    tokens_per_s: float
    mfu: float | None  #: of the vendor's bf16 rate, attention scores not counted; None for an unknown device
    peak_bytes: int  #: on one device
    compile_s: float
    kernels: dict[str, str]


def step(program: Program, *, num_steps: int, first_step: int = 0) -> StepTimings:
    """Times the training step of a recipe as the schedule has it from `first_step` on: the window matters.

    Args:
        program: the recipe on its devices.
        num_steps: timed, after two that are not.
        first_step: of the recipe's schedule.
    """
    lowered, (state, *batch, schedule) = lowered_step(program, first_step)
    watch = Stopwatch()
    train_step = lowered.compile(compiler_options=program.compiler_options)
    compile_s, ms = watch.seconds, []
    for _ in range(2 + num_steps):
        watch = Stopwatch()
        state, metrics = train_step(state, *batch, schedule)
        jax.block_until_ready((state, metrics))
        ms.append(watch.seconds * 1e3)
    timed = ms[2:]
    median_ms, spread_ms = middle(timed)
    tokens_per_s = batch[0].size / median_ms * 1e3
    mesh = program.mesh
    device = devices.named(mesh.devices.flat[0].device_kind)
    flops_per_s = flops_per_token(program.layout.table) * tokens_per_s
    return StepTimings(
        ms=timed,
        median_ms=median_ms,
        spread_ms=spread_ms,
        tokens_per_s=tokens_per_s,
        mfu=flops_per_s / (device.bf16_flops * mesh.size) if device else None,
        peak_bytes=meshes.peak_bytes(mesh),
        compile_s=compile_s,
        kernels={call: f"{one.name}: {one.reason}" for call, one in program.kernels.choices.items()},
    )


def lowered_step(program: Program, first_step: int) -> tuple[Any, tuple[Any, ...]]:
    """The step that a recipe takes at `first_step`, and its arguments: starting state, random ids, the schedule."""
    shape, mesh = program.shape_at(first_step), program.mesh
    ids = np.random.default_rng(0).integers(
        0, program.recipe.config.vocab_size, (2, shape.num_sequences, shape.seq_len), np.int32
    )
    state = program.init(jax.random.key(0))
    state = state._replace(step=meshes.replicate(np.int32(first_step), mesh))
    args = state, *(meshes.place(x_BT, mesh) for x_BT in ids), program.schedule
    return program.train_step_for(shape.window_blocks).lower(*args), args
