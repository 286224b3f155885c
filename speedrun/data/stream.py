"""The order of tokens in batches, and the position at which a resumed run continues.

    B sequences of a batch    T tokens of a sequence

Tokens are read in order, shard by shard by name, without shuffling, and packed into sequences by one of two rules:

    contiguous  A sequence may begin in the middle of a document, and targets cross the ends of sequences and documents.
                The rest of a shard that is not longer than a batch and its last target is dropped (record 21).
    documents   A sequence takes whole documents, each cut at a given length, until it is full; the last one is cut to
                fit. What is cut off is dropped, and so is the rest of a shard that does not fill a batch (record 89).

Source: modded-nanogpt, `distributed_data_generator`.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

from speedrun.base.clock import Stopwatch
from speedrun.base.errors import DataError, UsageError
from speedrun.data.shards import Shard


class Cursor(NamedTuple):
    """The state of a stream: the position of the next token."""

    shard: int
    offset: int  #: in tokens


START = Cursor(0, 0)


class Shape(NamedTuple):
    """The form of a batch."""

    num_sequences: int
    seq_len: int
    document_tokens: int = 0  #: at which documents are cut; 0: contiguous text


class Batch(NamedTuple):
    """The input of a step, int32: `targets_BT` has the token after each of `tokens_BT`."""

    tokens_BT: np.ndarray
    targets_BT: np.ndarray


class Span(NamedTuple):
    """A range of a shard that was input of steps: `start` to `stop`, exclusive."""

    name: str
    shard_tokens: int  #: length of the shard
    start: int
    stop: int
    skipped: int = 0  #: tokens in the range that were not input: cut off from documents


class TokenStream:
    """Batches in order. `cursor` and `ranges` record what has been read."""

    def __init__(
        self,
        shards: Sequence[Shard],
        cursor: Cursor = START,
        *,
        process: int = 0,
        num_processes: int = 1,
        document_token: int | None = None,
    ) -> None:
        """Start or continue at `cursor`.

        Args:
            shards: in the order of reading.
            cursor: of a stream over the same shards, in any process.
            process: index of this process; its rows of each batch are in that order.
            num_processes: that share each batch.
            document_token: the first token of each document; needed to pack documents.

        Raises:
            DataError: if the cursor is not inside these shards.
        """
        self._shards = shards
        self._process, self._num_processes = process, num_processes
        self._document_token = document_token
        self.cursor = cursor
        self.ranges: tuple[Span, ...] = ()
        is_inside = 0 <= cursor.shard <= len(shards)
        if not is_inside or not 0 <= cursor.offset <= shards[cursor.shard % len(shards)].num_tokens:
            raise DataError(f"{cursor} is not in these {len(shards)} shards; need those the run began with")

    def _read(self, num_tokens: int, start: int, stop: int) -> np.ndarray:
        """Advance by `num_tokens`; of these, read `start` to `stop` and the one after."""
        index, offset = self.cursor
        while index < len(self._shards):
            shard = self._shards[index]
            # As in record 21: this also drops a rest that is just long enough.
            if offset + num_tokens + 1 < shard.num_tokens:
                tokens = shard.read(offset + start, offset + stop + 1)
                self.cursor = Cursor(index, offset + num_tokens)
                self._note(Span(shard.path.name, shard.num_tokens, offset, offset + num_tokens))
                return tokens
            index, offset = index + 1, 0
        raise DataError(
            f"no shard of {len(self._shards)} has {num_tokens + 2:,} tokens left for a batch after token "
            f"{self.cursor.offset:,} of shard {self.cursor.shard + 1}; get more shards or run fewer steps"
        )

    def batch(self, num_sequences: int, seq_len: int, document_tokens: int = 0) -> Batch:
        """Return this process's rows of the next batch, `num_sequences` rows of `seq_len` tokens.

        Of contiguous text, read no other rows. `cursor` and `ranges` cover the whole batch, and so are the same in all
        processes.

        Raises:
            DataError: if no remaining shard is long enough.
            UsageError: if the processes cannot share the rows evenly.
        """
        rows, rest = divmod(num_sequences, self._num_processes)
        if rest:
            raise UsageError(
                f"{num_sequences} sequences for {self._num_processes} processes; need a multiple; "
                "choose another number of either"
            )
        if document_tokens:
            ids_BT = self._packed(Shape(num_sequences, seq_len, document_tokens)).astype(np.int32)
            own_BT = ids_BT[self._process * rows : (self._process + 1) * rows]
            return Batch(own_BT[:, :-1], own_BT[:, 1:])
        start = self._process * rows * seq_len
        return _rows(self._read(num_sequences * seq_len, start, start + rows * seq_len), rows)

    def _packed(self, shape: Shape) -> np.ndarray:
        """Advance by a batch of documents; return it with the last targets, uint16 [B, T + 1]."""
        index, offset = self.cursor
        num_tokens, left_tokens, left_documents = shape.num_sequences * shape.seq_len, 0, 0
        while index < len(self._shards):
            shard, ahead, starts = self._shards[index], 0, 0
            while offset + ahead < shard.num_tokens:  # until enough documents have been read
                ahead = min(2 * max(ahead, num_tokens), shard.num_tokens - offset)
                text, is_end = shard.read(offset, offset + ahead), offset + ahead == shard.num_tokens
                starts = np.count_nonzero(text == self._document_token)
                if found := _filled(text, shape, self._document_token, is_end=is_end):
                    ids_BT, length = found
                    stop, skipped = offset + length, length - num_tokens
                    self.cursor = Cursor(index, stop)
                    self._note(Span(shard.path.name, shard.num_tokens, offset, stop, skipped))
                    return ids_BT
            if not starts and not offset:
                raise DataError(
                    f"{shard.path}: {ahead:,} tokens without document token {self._document_token}; need documents; "
                    "check where the shard came from"
                )
            left_tokens, left_documents = left_tokens + ahead, left_documents + starts
            index, offset = index + 1, 0
        raise DataError(
            f"no shard of {len(self._shards)} has documents for {shape.num_sequences} x {shape.seq_len:,} tokens: "
            f"read {left_documents:,} documents, {left_tokens:,} tokens; get more shards or run fewer steps"
        )

    def _note(self, new: Span) -> None:
        """Add a range, or extend the last one."""
        last = self.ranges[-1] if self.ranges else None
        if last and (last.name, last.stop) == (new.name, new.start):
            both = new._replace(start=last.start, skipped=last.skipped + new.skipped)
            self.ranges = (*self.ranges[:-1], both)
        else:
            self.ranges = (*self.ranges, new)


def _filled(
    text: np.ndarray, shape: Shape, document_token: int | None, *, is_end: bool
) -> tuple[np.ndarray, int] | None:
    """Pack a text's documents: uint16 [B, T + 1], and the tokens up to the next one; None if they do not fill it."""
    # Unless the text ends with it, the last document may be longer, and is not used.
    starts = np.flatnonzero(text == document_token)
    documents = pairwise([*starts.tolist(), len(text)] if is_end else starts.tolist())
    ids_BT, stop = np.empty((shape.num_sequences, shape.seq_len + 1), text.dtype), 0
    for row in ids_BT:
        filled = 0
        while filled < len(row):
            if (document := next(documents, None)) is None:
                return None
            start, stop = document
            piece = text[start : min(stop, start + shape.document_tokens, start + len(row) - filled)]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)
    return ids_BT, stop


def require_steps(
    shards: Sequence[Shard], shapes: Sequence[Shape], document_token: int | None = None
) -> None:
    """Check that the shards have enough tokens for a run; reads them only where documents are packed.

    `shapes` are those of the batches of all steps, in order.

    Raises:
        DataError: if there are fewer tokens or documents than the steps need.
    """
    left, offset, documents = list(shards), 0, _Documents(document_token)
    stop: int | None = 0
    for step, shape in enumerate(shapes):
        while left and (stop := documents.end(left[0], offset, shape)) is None:
            left, offset = left[1:], 0
        if not left:
            raise DataError(
                f"{len(shards)} training shards last for {step:,} steps; the recipe takes {len(shapes):,}; "
                "get more shards or run fewer steps"
            )
        offset = stop or 0


class _Documents:
    """Where batches end, packed ones from the lengths of documents alone. Holds those of one shard."""

    def __init__(self, document_token: int | None) -> None:
        self._document_token = document_token
        self._of: tuple[Shard, int] | None = None

    def end(self, shard: Shard, offset: int, shape: Shape) -> int | None:
        """Return the offset after a batch from `offset` on; None if the rest does not fill it."""
        if not shape.document_tokens:
            stop = offset + shape.num_sequences * shape.seq_len
            return stop if stop + 1 < shard.num_tokens else None
        if self._of != (shard, shape.document_tokens):
            starts = np.flatnonzero(shard.read(0, shard.num_tokens) == self._document_token)
            self._bounds = [*starts.tolist(), shard.num_tokens]
            lengths = np.minimum(np.diff(self._bounds), shape.document_tokens)
            self._before, self._of = [0, *np.cumsum(lengths).tolist()], (shard, shape.document_tokens)
        document = bisect_left(self._bounds, offset)
        for _ in range(shape.num_sequences):
            if document >= len(self._before):
                return None
            document = bisect_left(self._before, self._before[document] + shape.seq_len + 1)
        return self._bounds[document] if document < len(self._bounds) else None


def _rows(tokens: np.ndarray, num_sequences: int) -> Batch:
    """Return consecutive rows; the last token is only a target."""
    ids = tokens.astype(np.int32)
    return Batch(ids[:-1].reshape(num_sequences, -1), ids[1:].reshape(num_sequences, -1))


def validation_batches(shard: Shard, num_tokens: int, num_sequences: int, seq_len: int) -> Iterator[Batch]:
    """Return batches of the first `num_tokens` targets of a shard, each once and in order.

    Raises:
        UsageError: if the batches do not divide `num_tokens`.
        DataError: if the shard is too short.
    """
    batch_tokens = num_sequences * seq_len
    if num_tokens % batch_tokens:
        raise UsageError(
            f"validation batches of {num_sequences} x {seq_len:,} tokens; they must divide {num_tokens:,}; "
            "choose another number or length of sequences"
        )
    _check_length(shard, num_tokens)
    starts = range(0, num_tokens, batch_tokens)
    return (_rows(shard.read(start, start + batch_tokens + 1), num_sequences) for start in starts)


def validation_sha256(shard: Shard, num_tokens: int) -> str:
    """Return the digest of the first `num_tokens + 1` ids, little-endian uint16; raise DataError if there are fewer."""
    _check_length(shard, num_tokens)
    return hashlib.sha256(shard.read(0, num_tokens + 1).tobytes()).hexdigest()


def _check_length(shard: Shard, num_tokens: int) -> None:
    if shard.num_tokens < num_tokens + 1:
        need = num_tokens + 1
        raise DataError(f"{shard.path}: {shard.num_tokens:,} tokens; validation needs {need:,}; get it whole")


class Prefetch:
    """Iterates over batches, and reads one batch ahead on a thread.

    `cursor` and `ranges` cover the batches returned, not the one ahead. The first read starts with the first `next`,
    so a clock started before covers it. Call `drain` before the clock pauses: then nothing is read in the pause.
    """

    def __init__(self, stream: TokenStream, shapes: Iterable[tuple[int, ...]]) -> None:
        """Read from `stream`; `shapes` has the `Shape` of each step."""
        self._stream = stream
        self._shapes = iter(shapes)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-ahead")
        self._ahead: Future[Batch] | None = None
        self.cursor = stream.cursor
        self.ranges = stream.ranges
        self.wait_s = 0.0  #: time the caller has waited for batches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            DataError: if it cannot be read; a batch ahead that is never requested raises nothing.
            StopIteration: after the last shape.
        """
        waiting = Stopwatch()
        self._ahead = self._ahead or self._submit()
        if self._ahead is None:
            raise StopIteration
        try:
            batch = self._ahead.result()
        finally:
            self.wait_s += waiting.seconds
        # Nothing is being read now: the stream's position is the end of this batch.
        self.cursor, self.ranges = self._stream.cursor, self._stream.ranges
        self._ahead = self._submit()
        return batch

    def drain(self) -> None:
        """Wait until nothing is being read."""
        waiting = Stopwatch()
        wait([self._ahead] if self._ahead else [])
        self.wait_s += waiting.seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _submit(self) -> Future[Batch] | None:
        shape = next(self._shapes, None)
        return self._thread.submit(self._stream.batch, *shape) if shape else None
