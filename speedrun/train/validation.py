"""Validation: exactly the track's tokens, summed in float64 on the host.

The loss is the total negative log likelihood divided by the number of tokens; it is not a mean of means.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from speedrun.base import faults
from speedrun.base import mesh as meshes
from speedrun.base.clock import Stopwatch
from speedrun.data.shards import Shard
from speedrun.data.stream import validation_batches
from speedrun.science.step import TrainState
from speedrun.train.program import Program


class Score(NamedTuple):
    """The result of one validation."""

    nll_sum: float  #: nats over all scored tokens, a float64 sum of float32 sums of one chunk each
    tokens: int
    seconds: float
    sequences: tuple[float, ...]  #: nats per token of each, in nine digits

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll_sum / self.tokens


def evaluate(
    program: Program,
    score: Callable[..., jax.Array],
    state: TrainState,
    shard: Shard,
    num_tokens: int,
    poll: Callable[[], None] = lambda: None,
) -> Score:
    """Score the first `num_tokens` targets of a shard, each once.

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
    return Score(total, tokens, watch.seconds, tuple(sequences))
