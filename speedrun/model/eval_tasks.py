"""What `speedrun eval` computes: the loss on shards, and HellaSwag.

HellaSwag is scored as in llm.c: an ending follows its context after one space, without a document token, and the
answer is the ending with the smallest mean loss per token.

Legend: B sequences, C chunks, R rows, T positions, E tokens of an ending, V vocabulary.
Sources: Zellers et al. 2019, HellaSwag; llm.c, `dev/data/hellaswag.py` (A. Karpathy).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from msgspec import Meta

from speedrun.base import mesh as meshes
from speedrun.base.atomic_files import read_regular
from speedrun.base.errors import DataError, NonFiniteError, translate_read_errors
from speedrun.data.shards import Shard, open_shard, open_track
from speedrun.data.stream import validation_batches
from speedrun.model.decode import DecodingKernels
from speedrun.model.weights import Trained
from speedrun.science.params import SHARDS, Params
from speedrun.train.program import nll_sums


class Score(msgspec.Struct, frozen=True):
    """The mean loss over consecutive targets of a shard, each once."""

    shard: str
    start: int  #: position of the first input
    tokens: int
    context: int  #: tokens of a sequence
    loss: float  #: nats per token
    accuracy: float  #: part of the targets that have the largest logit
    bits_per_byte: float | None  #: None if the ids stand for no bytes

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f"   {self.bits_per_byte:.4f} bits per byte"
        where = f"{Path(self.shard).name} from token {self.start:,}, {self.tokens:,} tokens, context {self.context:,}"
        return f"loss {self.loss:.4f}   top-1 {self.accuracy:.2%}{bits}   {where}"


class Slice(NamedTuple):
    """Consecutive targets of a shard; the fields are those of `Score`."""

    shard: Shard
    start: int
    tokens: int

    @property
    def name(self) -> str:
        """Its name in progress and errors."""
        return f"{self.shard.path.name} from token {self.start:,}"


def slices(trained: Trained, shards: Sequence[Path], context: int, tokens: int | None) -> list[Slice]:
    """Return the start of each shard, or the slice that the track scores and the next one.

    Each has whole batches, and at most `tokens`, by default as many as the track scores.

    Raises:
        DataError: if a shard is damaged or shorter than a batch.
    """
    data, batch = trained.track.data, SHARDS * context
    found = [(open_shard(path, vocab_size=data.vocab_size), 0) for path in shards]
    if not found:
        official = open_track(trained.folder, data).val[0]
        found = [(official, 0)]
        if official.num_tokens > data.val_tokens + batch:
            found.append((official, data.val_tokens))
    whole = []
    for shard, start in found:
        most = min(tokens or data.val_tokens, shard.num_tokens - 1 - start)
        if most < batch:
            need = f"need {batch:,} for one batch of {SHARDS} x {context:,}"
            what = f"{shard.path.name}: {most:,} tokens to score from {start:,} on"
            raise DataError(f"{what}; {need}; pass a shorter --context, or more --tokens")
        whole.append(Slice(shard, start, most // batch * batch))
    return whole


def scorer(
    trained: Trained, context: int, say: Callable[[str], None]
) -> Callable[[Slice, Callable[[int], None]], Score]:
    """Return a function that scores a slice, and calls its second argument with the number of tokens scored so far.

    If the tokenizer is missing, there are no bits per byte, and `say` gets the reason.

    Raises:
        UsageError: if the model cannot take sequences of this length.
        NonFiniteError: from the function, if the loss is not finite.
    """
    spelled: dict[int, bytes] = {}
    try:
        spelled = trained.words.tokens
    except DataError as error:
        say(f"no bits per byte: {error}")
    id_bytes_V = np.array([len(spelled.get(index, b"")) for index in range(trained.track.data.vocab_size)])
    recipe = replace(trained.program.recipe, eval_seq_len=context, eval_sequences=SHARDS)
    program = replace(trained.program, recipe=recipe)
    step = program.eval_step_for(program.static_at(trained.step), _measured)

    def score(part: Slice, say: Callable[[int], None]) -> Score:
        nll_sum, num_hits, num_bytes, num_tokens = 0.0, 0, 0, 0
        for batch in validation_batches(part.shard, part.tokens, SHARDS, context, part.start):
            placed_BT = (meshes.shard_own(x, program.mesh) for x in batch)
            found = step(trained.packed, *placed_BT, program.schedule, jnp.int32(trained.step))
            nll_BC, hits_BC = map(meshes.fetch, found)
            nll_sum += float(np.sum(nll_BC, dtype=np.float64))
            num_hits += int(np.sum(hits_BC))
            num_bytes += int(id_bytes_V[batch.targets_BT].sum())
            num_tokens += batch.targets_BT.size
            say(num_tokens)
        if not math.isfinite(nll_sum):
            raise NonFiniteError(f"{part.name}: the loss is {nll_sum}; need a model with finite losses")
        bits = nll_sum / math.log(2) / num_bytes if num_bytes else None
        means = nll_sum / part.tokens, num_hits / part.tokens
        return Score(str(part.shard.path), part.start, part.tokens, context, *means, bits)

    return score


def _measured(
    logits: Callable[[jax.Array], jax.Array], x_TD: jax.Array, targets_T: jax.Array, **how: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the nats of each chunk of a sequence, and how many of its targets have the largest logit: [C]."""
    nll_C = nll_sums(logits, x_TD, targets_T, **how)
    parts = [array.reshape(*nll_C.shape, -1, *array.shape[1:]) for array in (x_TD, targets_T)]
    return nll_C, jax.lax.map(lambda part: jnp.sum(jnp.argmax(logits(part[0]), axis=1) == part[1]), parts)


_TOGETHER = 32  #: rows of one call
_POSITIONS = 32  #: lengths are rounded up to a multiple


class Row(NamedTuple):
    """A context with one ending."""

    ids: np.ndarray  #: i32 [T]
    first: int  #: position of the ending; at least 1


def _endings(trained: Trained, rows: Sequence[Row], say: Callable[[int], None]) -> list[np.ndarray]:
    """Return the negative log likelihoods of each ending, f64 [E]; `say` gets the number of finished rows."""
    score, params, found = jax.jit(partial(_scores, trained)), trained.params, list[np.ndarray]()
    for start in range(0, len(rows), _TOGETHER):
        few = rows[start : start + _TOGETHER]
        longest = -(-max(len(row.ids) for row in few) // _POSITIONS) * _POSITIONS
        tokens_RT = np.zeros((_TOGETHER, longest), np.int32)  # empty rows save a compilation
        for tokens_T, row in zip(tokens_RT, few, strict=False):
            tokens_T[: len(row.ids)] = row.ids
        for nll_T, row in zip(jax.device_get(score(params, tokens_RT)), few, strict=False):
            found.append(nll_T[row.first - 1 : len(row.ids) - 1].astype(np.float64))
            if not np.isfinite(found[-1]).all():
                raise NonFiniteError("the loss of an ending is not finite; need a model with finite losses")
        say(start + len(few))
    return found


def _scores(trained: Trained, params: Params, tokens_RT: jax.Array) -> jax.Array:
    """Return the negative log likelihood of each next token: f32 [R, T - 1]."""
    recipe, inputs = trained.program.recipe, trained.inputs

    def of_one(tokens_T: jax.Array) -> jax.Array:
        read = recipe.read(params, tokens_T[None])
        (x_TD,) = recipe.forward(read, tokens_T[None], inputs, recipe.config, DecodingKernels())
        z_TV = recipe.logits(params, x_TD[:-1], inputs, recipe.config).astype(jnp.float32)
        of_target_T = jnp.take_along_axis(z_TV, tokens_T[1:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(z_TV, axis=1) - of_target_T

    return jax.lax.map(of_one, tokens_RT)


_Text = Annotated[str, Meta(min_length=1)]


class Question(msgspec.Struct, frozen=True):
    """One line of the file; it may have other fields."""

    ctx: _Text
    endings: tuple[_Text, _Text, _Text, _Text]
    label: Annotated[int, Meta(ge=0, le=3)]


class Answers(msgspec.Struct, frozen=True):
    """Shares of correct answers."""

    questions: int
    accuracy_norm: float  #: by the mean loss of an ending's tokens
    accuracy: float  #: by their sum

    def __str__(self) -> str:
        margin = 1.96 * (self.accuracy_norm * (1 - self.accuracy_norm) / self.questions) ** 0.5
        return (
            f"hellaswag {self.accuracy_norm:.2%} +- {margin:.2%} by mean loss, {self.accuracy:.2%} by sum   "
            f"{self.questions:,} questions, chance 25 %"
        )


def read(path: Path, limit: int | None) -> list[Question]:
    """Read a file of questions; raise DataError if there are none, or one is malformed."""
    advice = "need lines with ctx, four endings and a label, as in hellaswag_val.jsonl of rowanz/hellaswag"
    with translate_read_errors(path, advice):
        lines = [line for line in read_regular(path).splitlines() if line.strip()]
        found = [msgspec.json.decode(line, type=Question) for line in lines[:limit]]
    if not found:
        raise DataError(f"{path}: no questions; need one JSON object a line")
    return found


def ask(trained: Trained, questions: Sequence[Question], say: Callable[[int], None]) -> Answers:
    """Answer all questions; `say` gets the number of answered ones.

    Raises:
        UsageError: if the track has no text.
        NonFiniteError: if a loss is not finite.
    """
    encoder = trained.words.needed()
    rows: list[Row] = []
    for question in questions:
        context, *endings = encoder.encode([question.ctx, *(f" {ending}" for ending in question.endings)])
        rows += [Row(np.concatenate([context, one]).astype(np.int32), len(context)) for one in endings]
    losses = _endings(trained, rows, lambda done: say(done // 4))
    right = right_norm = 0
    for number, question in enumerate(questions):
        four = losses[4 * number : 4 * number + 4]
        right += int(np.argmin([part.sum() for part in four])) == question.label
        right_norm += int(np.argmin([part.mean() for part in four])) == question.label
    return Answers(len(questions), right_norm / len(questions), right / len(questions))
