"""Validation: exactly the track's tokens, summed in float64 on the host.

The loss is the total negative log likelihood divided by the number of tokens; it is not a mean of means.
"""

from collections.abc import Callable

import jax
import numpy as np

from speedrun.base import faults, runlog
from speedrun.base import mesh as meshes
from speedrun.base.clock import Stopwatch
from speedrun.data.shards import Shard
from speedrun.data.stream import validation_batches
from speedrun.science.step import TrainState
from speedrun.train.program import Program


def evaluate(
    program: Program,
    score: Callable[..., jax.Array],
    state: TrainState,
    shard: Shard,
    num_tokens: int,
    poll: Callable[[], None] = lambda: None,
) -> runlog.Val:
    """Score the first `num_tokens` targets of a shard, each once. Sums of chunks are float32.

    `score` is the program's compiled `eval_step`. `poll` is called after every batch, and may raise.
    """
    watch, total, tokens, sequences = Stopwatch(), 0.0, 0, []
    shape = program.recipe.eval_sequences, program.recipe.eval_seq_len
    for batch in validation_batches(shard, num_tokens, *shape):
        tokens_BT, targets_BT = (meshes.place_own(x, program.mesh) for x in batch)
        nll_BC = meshes.fetch(score(state.params, tokens_BT, targets_BT, program.schedule, state.step))
        total += float(np.sum(nll_BC, dtype=np.float64))
        sequences += [float(f"{x:.9g}") for x in nll_BC.sum(axis=1, dtype=np.float64) / shape[1]]
        tokens += batch.targets_BT.size
        faults.point("evaluation")
        poll()
    step = int(jax.device_get(state.step))
    return runlog.Val(step, total / tokens, tokens, total.hex(), watch.seconds, tuple(sequences))
