"""The loss of a trained model on other tokens than a run scores: other shards, a second slice, another context.

Legend: B sequences, T context, C chunks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import msgspec
import numpy as np

from speedrun.data import inventory
from speedrun.data.shards import Shard, open_shard
from speedrun.ground import mesh as meshes
from speedrun.ground.errors import DataError, NonFiniteError, UsageError
from speedrun.science.params import SHARDS
from speedrun.trained.weights import Trained
from speedrun.trained.words import Words


class Score(msgspec.Struct, frozen=True):
    """The mean loss over consecutive targets of a shard, each once."""

    shard: str
    start: int  #: position of the first input
    tokens: int
    context: int  #: tokens of a sequence; the first of each sees nothing before it
    loss: float  #: nats per token
    bits_per_byte: float | None  #: None if the ids stand for no bytes

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f"   {self.bits_per_byte:.4f} bits per byte"
        where = f"{self.shard} from token {self.start:,}, {self.tokens:,} tokens, context {self.context:,}"
        return f"loss {self.loss:.4f}{bits}   {where}"


class Slice(NamedTuple):
    """Consecutive targets of a shard."""

    shard: Shard
    start: int  #: position of the first input
    tokens: int

    @property
    def name(self) -> str:
        """As progress and errors name it."""
        return f"{self.shard.path.name} from token {self.start:,}"


def slices(trained: Trained, shards: Sequence[Path], context: int, tokens: int | None) -> list[Slice]:
    """Return what to score: the start of each shard; without shards, the slice that the track scores and the next one.

    As many tokens as whole batches hold, at most `tokens`, or as many as the track scores.

    Raises:
        DataError: if a shard is damaged, or has no whole batch.
    """
    data, batch = trained.track.data, SHARDS * context
    found = [Slice(open_shard(path, vocab_size=data.vocab_size), 0, 0) for path in shards]
    if not found:
        official = inventory.open_track(trained.folder, data).val[0]
        found = [Slice(official, 0, 0)]
        if official.num_tokens > data.val_tokens + batch:
            found.append(Slice(official, data.val_tokens, 0))
    whole = []
    for shard, start, _ in found:
        most = min(tokens or data.val_tokens, shard.num_tokens - 1 - start)
        if most < batch:
            raise DataError(
                f"{shard.path.name}: {most:,} tokens to score from {start:,} on; need {batch:,} for one batch of "
                f"{SHARDS} x {context:,}; pass a shorter --context, or more --tokens"
            )
        whole.append(Slice(shard, start, most // batch * batch))
    return whole


def score(trained: Trained, part: Slice, context: int, words: Words, say: Callable[[int], None]) -> Score:
    """Score a slice; `say` gets the number of tokens scored so far.

    Raises:
        UsageError: if the model cannot take sequences of this length.
        NonFiniteError: if the loss is no number.
    """
    recipe = replace(trained.program.recipe, eval_seq_len=context, eval_sequences=SHARDS)
    program = replace(trained.program, recipe=recipe)
    eval_step, step = program.eval_step_for(program.static_at(trained.step)), jnp.int32(trained.step)
    id_bytes_V = None if words.encoder is None else words.encoder.id_bytes_V()
    nll_sum, num_bytes, batch = 0.0, 0, SHARDS * context
    for start in range(part.start, part.start + part.tokens, batch):
        ids = part.shard.read(start, start + batch + 1).astype(np.int32)
        rows = (x.reshape(SHARDS, context) for x in (ids[:-1], ids[1:]))
        tokens_BT, targets_BT = (meshes.place_own(x, program.mesh) for x in rows)
        nll_BC = eval_step(trained.packed, tokens_BT, targets_BT, program.schedule, step)
        nll_sum += float(np.sum(meshes.fetch(nll_BC), dtype=np.float64))
        num_bytes += 0 if id_bytes_V is None else int(id_bytes_V[ids[1:]].sum())
        say(start + batch - part.start)
    if not math.isfinite(nll_sum):
        raise NonFiniteError(f"{part.name}: the loss is {nll_sum}; need a model with finite losses")
    bits = nll_sum / math.log(2) / num_bytes if num_bytes else None
    return Score(part.shard.path.name, part.start, part.tokens, context, nll_sum / part.tokens, bits)


def context_of(trained: Trained, wanted: int | None) -> int:
    """Return the context to score with: what was asked for, else that of the run's validations.

    Raises:
        UsageError: if the attention of the recipe needs a multiple of its blocks.
    """
    recipe = trained.program.recipe
    context = wanted or recipe.eval_seq_len
    block = getattr(recipe.config, "block_tokens", 1)
    if context % block:
        raise UsageError(
            f"a context of {context:,} tokens; {recipe.name} needs a multiple of its blocks, {block:,}"
        )
    return context
