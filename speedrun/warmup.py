"""Before the clock: every executable is compiled, run once on random ids, and the state built anew."""

from typing import Any

import jax
import numpy as np

from speedrun import mesh as meshes
from speedrun import runlog
from speedrun.clock import Stopwatch
from speedrun.outcome import Tally
from speedrun.params import count, flops_per_token
from speedrun.prepare import Ready
from speedrun.step import TrainState, state_hash

_STEPS = 2  #: of each stage


def compile_all(ready: Ready, state: TrainState, log: runlog.RunLog, tally: Tally) -> tuple[list[Any], Any]:
    """One executable for each stage and one for validation, ahead of time."""
    program, recipe = ready.program, ready.recipe

    def compiled(name: str, lowered: Any) -> Any:
        watch = Stopwatch()
        executable = lowered().compile(compiler_options=program.compiler_options)
        log.emit(runlog.Compile(name, watch.seconds))
        tally.compile_s += watch.seconds
        return executable

    ids = _RandomIds(ready)
    shapes = list(dict.fromkeys((s.num_sequences, s.seq_len) for s in recipe.stages))
    by_shape = {
        shape: compiled(
            f"train/{shape[0]}x{shape[1]}",
            lambda shape=shape: program.train_step.lower(state, *ids(*shape), program.schedule),
        )
        for shape in shapes
    }
    eval_shape = recipe.eval_sequences, recipe.eval_seq_len
    score = compiled(
        f"eval/{eval_shape[0]}x{eval_shape[1]}",
        lambda: program.eval_step.lower(state.params, *ids(*eval_shape), program.schedule, state.step),
    )
    memory = [executable.memory_analysis() for executable in by_shape.values()]
    log.emit(_plan(ready, state, max(m.temp_size_in_bytes for m in memory)))
    return [by_shape[s.num_sequences, s.seq_len] for s in recipe.stages], score


def warm_up(
    ready: Ready, state: TrainState, steps: list[Any], score: Any, log: runlog.RunLog, tally: Tally
) -> TrainState:
    """Runs every executable on random ids, then builds the state anew from the seed."""
    program, watch = ready.program, Stopwatch()
    before = state_hash(state)
    log.emit(runlog.WarmupStart(before))
    ids = _RandomIds(ready)
    for stage, step in zip(ready.recipe.stages, steps, strict=True):
        for _ in range(_STEPS):
            state, _ = step(state, *ids(stage.num_sequences, stage.seq_len), program.schedule)
    scores = score(
        state.params,
        *ids(ready.recipe.eval_sequences, ready.recipe.eval_seq_len),
        program.schedule,
        state.step,
    )
    jax.block_until_ready(scores)
    state = program.init(jax.random.key(ready.config.seed))
    tally.init_hash = state_hash(state)
    tally.warmup_s = watch.seconds
    log.emit(runlog.WarmupEnd(tally.init_hash, _STEPS * len(steps), watch.seconds))
    return state


class _RandomIds:
    """Batches of ids that come from nowhere, placed like real ones: a call gives tokens and targets."""

    def __init__(self, ready: Ready) -> None:
        self._rng = np.random.default_rng(0)
        self._vocab_size = ready.track.data.vocab_size
        self._mesh = ready.program.mesh

    def __call__(self, num_sequences: int, seq_len: int) -> list[jax.Array]:
        pair = self._rng.integers(0, self._vocab_size, (2, num_sequences, seq_len), np.int32)
        return [meshes.place(x_BT, self._mesh) for x_BT in pair]


def _plan(ready: Ready, state: TrainState, temp_bytes: int) -> runlog.Plan:
    """Sizes of the run."""
    table = ready.program.layout.table
    return runlog.Plan(
        num_params=count(table),
        tokens_per_step=max(stage.batch_tokens for stage in ready.recipe.stages),
        total_tokens=ready.recipe.total_tokens,
        flops_per_token=flops_per_token(table),
        state_bytes_per_device=sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)),
        temp_bytes_per_device=temp_bytes,
        kernels={call: f"{one.name}: {one.reason}" for call, one in ready.program.kernels.choices.items()},
        compiler_options=ready.program.compiler_options,
    )
