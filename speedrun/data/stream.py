"""The order of tokens: which ones make the next batch, and where a run that goes on later continues.

    B sequences of a batch    T tokens of a sequence

Tokens are read in order, shard by shard by name, without shuffling; a sequence may begin in the middle of a
document, and targets run across the ends of sequences and documents. A shard is left when what remains of it
is not longer than a batch and its last target; that remainder is dropped.

Source: modded-nanogpt, record 21, `distributed_data_generator`.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Self

import numpy as np

from speedrun.data.shards import Shard
from speedrun.ground.clock import Stopwatch
from speedrun.ground.errors import DataError, UsageError


class Cursor(NamedTuple):
    """The whole state of a stream: the next token to be read."""

    shard: int  #: counts on through the epochs
    offset: int  #: tokens, in that shard


START = Cursor(0, 0)


class Batch(NamedTuple):
    """What one step is fed: int32, and `targets_BT` is the token after each of `tokens_BT`."""

    tokens_BT: np.ndarray
    targets_BT: np.ndarray


class Span(NamedTuple):
    """A stretch of a shard that was input of steps: `start` to `stop` without `stop`, which was a target only."""

    name: str
    shard_tokens: int  #: in the whole shard
    start: int
    stop: int


class TokenStream:
    """Batches in order. `cursor` and `ranges` say what has been read."""

    def __init__(
        self,
        shards: Sequence[Shard],
        cursor: Cursor = START,
        *,
        num_epochs: int = 1,
        process: int = 0,
        num_processes: int = 1,
    ) -> None:
        """Starts or goes on at `cursor`.

        Args:
            shards: in the order of reading.
            cursor: as a stream over the same shards reported it, in any process.
            num_epochs: how often the shards may be read.
            process: which of the processes that share each batch; the first ones have the first rows.
            num_processes: how many they are.

        Raises:
            DataError: if there is no such place in these shards.
        """
        self._shards = shards
        self._num_shards = num_epochs * len(shards)
        self._process, self._num_processes = process, num_processes
        self.cursor = cursor
        self.ranges: tuple[Span, ...] = ()
        is_inside = 0 <= cursor.shard <= self._num_shards
        if not is_inside or not 0 <= cursor.offset <= shards[cursor.shard % len(shards)].num_tokens:
            raise DataError(
                f"{cursor} is not in these {len(shards)} shards; bring the shards that the run began with"
            )

    def take(self, num_tokens: int) -> np.ndarray:
        """The next tokens and the one after them; moves on by `num_tokens`.

        Returns:
            uint16 of `num_tokens + 1`.

        Raises:
            DataError: if no shard is left that is long enough.
        """
        return self._read(num_tokens, 0, num_tokens)

    def _read(self, num_tokens: int, start: int, stop: int) -> np.ndarray:
        """Moves on by `num_tokens`; of these, reads `start` to `stop` and the one after."""
        index, offset = self.cursor
        while index < self._num_shards:
            shard = self._shards[index % len(self._shards)]
            # The record's own test: it also drops a remainder that would just have been enough.
            if offset + num_tokens + 1 < shard.num_tokens:
                tokens = shard.read(offset + start, offset + stop + 1)
                self.cursor = Cursor(index, offset + num_tokens)
                self._note(Span(shard.path.name, shard.num_tokens, offset, offset + num_tokens))
                return tokens
            index, offset = index + 1, 0
        raise DataError(
            f"no shard of {len(self._shards)} has tokens left after {self.cursor}; the next batch needs "
            f"{num_tokens + 2:,} in one shard; get more shards or run fewer steps"
        )

    def batch(self, num_sequences: int, seq_len: int) -> Batch:
        """Of the next `num_sequences` rows of `seq_len` tokens, those of this process; only they are read.

        `cursor` and `ranges` are those of the whole batch, and so the same in all processes.

        Raises:
            DataError: as `take`.
            UsageError: if the processes cannot share the rows evenly.
        """
        rows, rest = divmod(num_sequences, self._num_processes)
        if rest:
            raise UsageError(
                f"{num_sequences} sequences for {self._num_processes} processes; need a multiple; "
                "choose another number of either"
            )
        start = self._process * rows * seq_len
        return _rows(self._read(num_sequences * seq_len, start, start + rows * seq_len), rows)

    def _note(self, new: Span) -> None:
        """Adds a range, or makes the last one longer."""
        last = self.ranges[-1] if self.ranges else None
        if last and (last.name, last.stop) == (new.name, new.start):
            self.ranges = (*self.ranges[:-1], new._replace(start=last.start))
        else:
            self.ranges = (*self.ranges, new)


def require_steps(shards: Sequence[Shard], batch_tokens: Sequence[int], *, num_epochs: int = 1) -> None:
    """Walks the stream without reading, so that a run which would starve is refused before it starts.

    Args:
        shards: in the order of reading.
        batch_tokens: tokens of each step, in order.
        num_epochs: how often the shards may be read.

    Raises:
        DataError: if there are fewer tokens than the steps need.
    """
    lengths, offset, steps = [shard.num_tokens for shard in shards] * num_epochs, 0, 0
    for num_tokens in batch_tokens:
        while lengths and offset + num_tokens + 1 >= lengths[0]:
            lengths, offset = lengths[1:], 0
        if not lengths:
            raise DataError(
                f"{len(shards)} training shards last for {steps:,} steps; the recipe takes {len(batch_tokens):,}; "
                "get more shards or run fewer steps"
            )
        offset, steps = offset + num_tokens, steps + 1


def _rows(tokens: np.ndarray, num_sequences: int) -> Batch:
    """Consecutive rows; the last token is a target only."""
    ids = tokens.astype(np.int32)
    return Batch(ids[:-1].reshape(num_sequences, -1), ids[1:].reshape(num_sequences, -1))


def validation_batches(shard: Shard, num_tokens: int, num_sequences: int, seq_len: int) -> Iterator[Batch]:
    """The start of a shard in order, each of `num_tokens` targets once.

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
    """Digest of the ids that are scored and read for it: `num_tokens + 1`, as little-endian uint16.

    Raises:
        DataError: if the shard is too short.
    """
    _check_length(shard, num_tokens)
    return hashlib.sha256(shard.read(0, num_tokens + 1).tobytes()).hexdigest()


def _check_length(shard: Shard, num_tokens: int) -> None:
    if shard.num_tokens < num_tokens + 1:
        need = num_tokens + 1
        raise DataError(
            f"{shard.path}: {shard.num_tokens:,} tokens; validation needs {need:,}; get a whole one"
        )


class Prefetch:
    """Reads one batch ahead on a thread of its own: an iterator over batches of the shapes it is given.

    `cursor` and `ranges` are those of the batches handed out, never of the one ahead. Nothing is read before
    the first `next`, so a clock started before it sees the first read. Call `drain` before the clock pauses:
    then no read goes on unseen, and the next one begins with the next `next`.
    """

    def __init__(self, stream: TokenStream, shapes: Iterable[tuple[int, int]]) -> None:
        """Reads from `stream`; `shapes` has number and length of the sequences of each step."""
        self._stream = stream
        self._shapes = iter(shapes)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-ahead")
        self._ahead: Future[Batch] | None = None
        self.cursor = stream.cursor
        self.ranges = stream.ranges
        self.wait_s = 0.0  #: time the caller has stood waiting for batches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            DataError: what the reading of this batch raised; a batch nobody asks for raises nothing.
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
        # Nothing is being read at this moment: the stream stands behind this batch.
        self.cursor, self.ranges = self._stream.cursor, self._stream.ranges
        self._ahead = self._submit()
        return batch

    def drain(self) -> None:
        """Waits until nothing is being read."""
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
