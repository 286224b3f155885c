"""HellaSwag: which of four endings does a model find most probable?

As llm.c scores it: an ending follows its context after one space, nothing opens the document, and the answer is the
ending with the smallest mean loss per token. Chance is 25 %.

Source: Zellers et al. 2019, HellaSwag; llm.c, `dev/data/hellaswag.py` (A. Karpathy).
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from speedrun.ground.errors import DataError, UsageError, translate_read_errors
from speedrun.ground.wholefile import read_regular
from speedrun.trained.likelihood import Row, endings
from speedrun.trained.weights import Trained
from speedrun.trained.words import Words

_Text = Annotated[str, Meta(min_length=1)]


class Question(msgspec.Struct, frozen=True):
    """One line of the file; it may have other fields."""

    ctx: _Text
    endings: tuple[_Text, _Text, _Text, _Text]
    label: Annotated[int, Meta(ge=0, le=3)]


class Answers(msgspec.Struct, frozen=True):
    """What share of the questions is answered rightly."""

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
    """Read questions, one JSON object a line; raise DataError if one has another form, or there are none."""
    advice = "need lines with ctx, four endings and a label, as in hellaswag_val.jsonl of rowanz/hellaswag"
    with translate_read_errors(path, advice):
        lines = [line for line in read_regular(path).splitlines() if line.strip()]
        found = [msgspec.json.decode(line, type=Question) for line in lines[:limit]]
    if not found:
        raise DataError(f"{path}: no questions; need one JSON object a line")
    return found


def ask(trained: Trained, words: Words, questions: Sequence[Question], say: Callable[[int], None]) -> Answers:
    """Answer all questions; `say` gets the number of those that are answered.

    Raises:
        UsageError: if the ids of the track stand for no text.
        NonFiniteError: if a loss is no number.
    """
    if words.encoder is None:
        raise UsageError(f"ids of {words.track.id} stand for no text; HellaSwag needs a model of text")
    rows = [row for question in questions for row in _rows(question, words)]
    losses = [ending.nll_E for ending in endings(trained, rows, lambda done: say(done // 4))]
    right = right_norm = 0
    for number, question in enumerate(questions):
        four = losses[4 * number : 4 * number + 4]
        right += int(np.argmin([part.sum() for part in four])) == question.label
        right_norm += int(np.argmin([part.mean() for part in four])) == question.label
    return Answers(len(questions), right_norm / len(questions), right / len(questions))


def _rows(question: Question, words: Words) -> Iterator[Row]:
    assert words.encoder is not None
    context, *endings = words.encoder.encode([question.ctx, *(f" {ending}" for ending in question.endings)])
    for ending in endings:
        yield Row(np.concatenate([context, ending]).astype(np.int32), len(context))
