"""Text as ids, and ids as text, by the tokenizer of a track's data."""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from speedrun.base.errors import UsageError
from speedrun.base.track import Track
from speedrun.data import tokenizer, vocabulary


@dataclass(frozen=True)
class Words:
    """The tokenizer of a track, loaded when it is needed. Synthetic ids stand for no text."""

    track: Track
    folder: Path  #: of the track's data

    @property
    def path(self) -> Path | None:
        """The file of the tokenizer in the folder; None if ids stand for no text. It may be missing."""
        if self.track.synthetic is not None:
            return None
        is_own = self.track.python_docs is not None
        return self.folder / (vocabulary.TOKENIZER if is_own else vocabulary.RANKS)

    @cached_property
    def tokens(self) -> dict[int, bytes]:
        """The bytes of each id; special ones are missing; empty if ids stand for no text.

        Raises:
            DataError: if the file of the tokenizer is missing, and cannot be downloaded.
        """
        if self.encoder is None:
            return {}
        return (vocabulary.ranks if self.encoder.name == "gpt2" else vocabulary.byte_level)(self.encoder.raw)

    @cached_property
    def encoder(self) -> tokenizer.Tokenizer | None:
        """Turns text into ids; None if ids stand for no text."""
        if self.path is None:
            return None
        is_there = self.path.exists() or self.path.name == vocabulary.TOKENIZER
        return tokenizer.load(str(self.path) if is_there else "gpt2")

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, after the token that opens a document: i32 [N].

        Raises:
            UsageError: if ids of this track have no text.
        """
        opens = [self.track.data.document_token]
        if not text:
            return np.array(opens, np.int32)
        if self.encoder is None:
            raise UsageError(
                f"ids of {self.track.id} stand for no text, got {text[:40]!r}; name them with --ids 1,2,3"
            )
        (ids,) = self.encoder.encode([text])
        return np.concatenate([opens, ids]).astype(np.int32)

    def checked(self, ids: list[int]) -> np.ndarray:
        """Return ids as they are: i32 [N]; raise UsageError if one is outside the vocabulary, or there are none."""
        most = self.track.data.vocab_size
        if wrong := [index for index in ids if not 0 <= index < most]:
            raise UsageError(f"id {wrong[0]:,} is not in {self.track.id}, which has 0 to {most - 1:,}")
        if not ids:
            raise UsageError("a prompt of no ids; need one or more: --ids 1,2,3")
        return np.array(ids, np.int32)


class Text:
    """A text that grows by ids. It ends with the document."""

    def __init__(self, words: Words, prompt: np.ndarray) -> None:
        self._words, self._decoder = words, codecs.getincrementaldecoder("utf-8")("replace")
        self.prompt = self._text(prompt)
        self.ids: list[int] = []
        self.text = ""
        self.has_ended = False  #: by the model

    def add(self, ids: np.ndarray, *, is_last: bool) -> str:
        """Add ids up to the end of the document; return the text that they complete. A character may take several."""
        ends = np.flatnonzero(ids == self._words.track.data.document_token)
        new = [] if self.has_ended else ids[: ends[0]] if len(ends) else ids
        self.has_ended |= len(ends) > 0
        self.ids += map(int, new)
        text = self._text(new, is_last=is_last or self.has_ended)
        self.text += text
        return text

    @property
    def facts(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {"prompt": self.prompt, "text": self.text, "ids": self.ids, "has_ended": self.has_ended}

    def _text(self, ids: Iterable[int], *, is_last: bool = False) -> str:
        if not self._words.tokens:
            return "".join(f"{index} " for index in ids)
        raw = b"".join(self._words.tokens.get(int(index), b"") for index in ids)
        # A model may write what moves the cursor of a terminal.
        return "".join(
            c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}"
            for c in self._decoder.decode(raw, is_last)
        )
