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
from speedrun.ground.errors import DataError, NonFiniteError
from speedrun.science.params import SHARDS
from speedrun.trained.weights import Trained


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
        where = f"{Path(self.shard).name} from token {self.start:,}, {self.tokens:,} tokens, context {self.context:,}"
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
    found = [(open_shard(path, vocab_size=data.vocab_size), 0) for path in shards]
    if not found:
        official = inventory.open_track(trained.folder, data).val[0]
        found = [(official, 0)]
        if official.num_tokens > data.val_tokens + batch:
            found.append((official, data.val_tokens))
    whole = []
    for shard, start in found:
        most = min(tokens or data.val_tokens, shard.num_tokens - 1 - start)
        if most < batch:
            raise DataError(
                f"{shard.path.name}: {most:,} tokens to score from {start:,} on; need {batch:,} for one batch of "
                f"{SHARDS} x {context:,}; pass a shorter --context, or more --tokens"
            )
        whole.append(Slice(shard, start, most // batch * batch))
    return whole


def bytes_of(trained: Trained, say: Callable[[str], None]) -> np.ndarray | None:
    """Return the bytes of each id, i64 [V]; None, and `say` why, if the file of the tokenizer is missing."""
    try:
        tokens = trained.words.tokens
    except DataError as error:
        say(f"no bits per byte: {error}")
        return None
    return np.array([len(tokens.get(index, b"")) for index in range(trained.track.data.vocab_size)], np.int64)


class Scorer:
    """Scores slices with the scorer of a run, compiled once for a context."""

    def __init__(self, trained: Trained, context: int, id_bytes_V: np.ndarray | None) -> None:
        """Make the scorer; raise UsageError if the model cannot take sequences of this length."""
        recipe = replace(trained.program.recipe, eval_seq_len=context, eval_sequences=SHARDS)
        self._trained, self._context, self._id_bytes_V = trained, context, id_bytes_V
        self._program = replace(trained.program, recipe=recipe)
        self._step = self._program.eval_step_for(self._program.static_at(trained.step))

    def score(self, part: Slice, say: Callable[[int], None]) -> Score:
        """Score a slice; `say` gets the number of tokens scored so far.

        Raises:
            NonFiniteError: if the loss is no number.
        """
        program, trained, id_bytes_V = self._program, self._trained, self._id_bytes_V
        nll_sum, num_bytes, batch = 0.0, 0, SHARDS * self._context
        for start in range(part.start, part.start + part.tokens, batch):
            ids = part.shard.read(start, start + batch + 1).astype(np.int32)
            rows = (x.reshape(SHARDS, self._context) for x in (ids[:-1], ids[1:]))
            batch_BT = (meshes.place_own(x, program.mesh) for x in rows)
            nll_BC = self._step(trained.packed, *batch_BT, program.schedule, jnp.int32(trained.step))
            nll_sum += float(np.sum(meshes.fetch(nll_BC), dtype=np.float64))
            num_bytes += 0 if id_bytes_V is None else int(id_bytes_V[ids[1:]].sum())
            say(start + batch - part.start)
        if not math.isfinite(nll_sum):
            raise NonFiniteError(f"{part.name}: the loss is {nll_sum}; need a model with finite losses")
        bits = nll_sum / math.log(2) / num_bytes if num_bytes else None
        name, loss = str(part.shard.path), nll_sum / part.tokens
        return Score(name, part.start, part.tokens, self._context, loss, bits)
