"""The whole training step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NamedTuple

import jax
import numpy as np

from speedrun.bench.timing import middle
from speedrun.data import imitation
from speedrun.data.shards import Shard
from speedrun.data.stream import Batch, Prefetch, TokenStream
from speedrun.ground import devices
from speedrun.ground import mesh as meshes
from speedrun.ground.clock import Stopwatch
from speedrun.science.step import TrainState
from speedrun.training.footprint import flops_per_token
from speedrun.training.program import Program

#: XLA's setting that launches kernels one by one: a profiler sees what is inside a command buffer as one thing.
NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}


class StepTimings(NamedTuple):
    """Training steps as a run takes them: each is dispatched before the loss of the last one is fetched."""

    ms: list[float]  #: from the arrival of one loss to that of the next, the first from the start
    mean_ms: float  #: all steps together, by their number
    spread_ms: float  #: of `ms`, from the first to the ninth decile
    tokens_per_s: float
    mfu: float | None  #: of the vendor's bf16 rate, attention scores not counted; None for an unknown device
    peak_bytes: int  #: of the compiled program on one device, its arguments included
    compile_s: float
    losses: list[float]
    tokens: str  #: where they come from
    kernels: dict[str, str]


def step(
    program: Program,
    *,
    num_steps: int,
    first_step: int = 0,
    shards: Sequence[Shard] = (),
    command_buffers: bool = True,
) -> StepTimings:
    """Times the training step of a recipe as the schedule has it from `first_step` on: the window matters.

    Args:
        program: the recipe on its devices.
        num_steps: timed, from the starting state on, after two that are not.
        first_step: of the recipe's schedule.
        shards: read as a run reads them; without any, one batch of `data.imitation` over and over.
        command_buffers: whether XLA may launch kernels in groups.

    Raises:
        DataError: if the shards have too few tokens, or are damaged.
    """
    lowered, (state, *batch, schedule) = lowered_step(program, first_step)
    watch = Stopwatch()
    options = program.compiler_options | ({} if command_buffers else NO_COMMAND_BUFFERS)
    train_step = lowered.compile(compiler_options=options)
    compile_s, arrivals_ms, losses = watch.seconds, [0.0], []
    for _ in range(2):
        state, _ = train_step(state, *batch, schedule)
    state, pending = jax.block_until_ready(_state(program, first_step)), None

    def fetch(metrics: Any) -> None:
        """As the loop does, while the device is busy with the next step."""
        loss, _ = jax.device_get((metrics.loss, metrics.bad))
        arrivals_ms.append(watch.seconds * 1e3)
        losses.append(float(loss))

    with _batches(program, first_step, num_steps, shards) as batches:
        watch = Stopwatch()
        for _ in range(num_steps):
            placed = (meshes.place(x_BT, program.mesh) for x_BT in next(batches))
            state, metrics = train_step(state, *placed, schedule)
            if pending is not None:
                fetch(pending)
            pending = metrics
        fetch(pending)
    ms = np.diff(arrivals_ms).tolist()
    mean_ms = arrivals_ms[-1] / num_steps
    tokens_per_s = batch[0].size / mean_ms * 1e3
    mesh = program.mesh
    device = devices.named(mesh.devices.flat[0].device_kind)
    flops_per_s = flops_per_token(program.layout.table) * tokens_per_s
    return StepTimings(
        ms=ms,
        mean_ms=mean_ms,
        spread_ms=middle(ms)[1],
        tokens_per_s=tokens_per_s,
        mfu=flops_per_s / (device.bf16_flops * mesh.size) if device else None,
        peak_bytes=train_step.memory_analysis().peak_memory_in_bytes,
        compile_s=compile_s,
        losses=losses,
        tokens=f"{len(shards)} shards" if shards else "synthetic, document lengths of FineWeb",
        kernels={call: f"{one.name}: {one.reason}" for call, one in program.kernels.choices.items()},
    )


def lowered_step(program: Program, first_step: int) -> tuple[Any, tuple[Any, ...]]:
    """The step that a recipe takes at `first_step`, and its arguments: starting state, synthetic ids, the schedule."""
    batch = (meshes.place(x_BT, program.mesh) for x_BT in _imitated(program, first_step))
    args = _state(program, first_step), *batch, program.schedule
    return program.train_step_for(program.shape_at(first_step).window_blocks).lower(*args), args


def _state(program: Program, first_step: int) -> TrainState:
    state = program.init(jax.random.key(0))
    return state._replace(step=meshes.replicate(np.int32(first_step), program.mesh))


def _imitated(program: Program, first_step: int) -> Batch:
    shape, config = program.shape_at(first_step), program.recipe.config
    ids = imitation.tokens(
        shape.num_sequences * shape.seq_len + 1,
        vocab_size=config.vocab_size,
        document_token=config.document_token,
        seed=0,
    )
    return Batch(*(x.reshape(shape.num_sequences, shape.seq_len) for x in (ids[:-1], ids[1:])))


@contextmanager
def _batches(
    program: Program, first_step: int, num_steps: int, shards: Sequence[Shard]
) -> Iterator[Iterator[Batch]]:
    """Of all steps, on the host."""
    if not shards:
        yield repeat(_imitated(program, first_step))
        return
    shape = program.shape_at(first_step)
    with Prefetch(TokenStream(shards), repeat((shape.num_sequences, shape.seq_len), num_steps)) as batches:
        yield batches
