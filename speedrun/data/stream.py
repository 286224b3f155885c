"""The order of tokens in batches. B sequences of T tokens are read in order, shard by shard, without shuffling.

    contiguous  A sequence may begin inside a document, and targets cross the ends of sequences and documents. The rest
                of a shard that is not longer than a batch and its last target is dropped (record 21).
    documents   A sequence takes whole documents, each cut at a given length, until it is full; the last one is cut to
                fit. The cut parts are dropped, as is the rest of a shard that does not fill a batch (record 89).

Source: modded-nanogpt, `distributed_data_generator`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

from speedrun.base.clock import Stopwatch
from speedrun.base.errors import DataError, UsageError
from speedrun.base.runlog import ShardRange
from speedrun.data.shards import Shard


class Cursor(NamedTuple):
    """The position of the next token, which is the whole state of a stream."""

    shard: int
    offset: int  #: in tokens


START = Cursor(0, 0)


class Shape(NamedTuple):
    """The form of a batch."""

    num_sequences: int
    seq_len: int
    document_tokens: int = 0  #: cut length of documents; 0: contiguous text


class Batch(NamedTuple):
    """The input of a step, int32; `targets_BT` has the token after each of `tokens_BT`."""

    tokens_BT: np.ndarray
    targets_BT: np.ndarray


class TokenStream:
    """Batches in order; `cursor` and `ranges` record what was read."""

    def __init__(
        self,
        shards: Sequence[Shard],
        cursor: Cursor = START,
        *,
        process: int = 0,
        num_processes: int = 1,
        document_token: int | None = None,
    ) -> None:
        """Start at `cursor`, that of a stream over the same shards in any process.

        `num_processes` share the rows of each batch in order. Packed documents need `document_token`, their first one.
        """
        self._shards = shards
        self._process, self._num_processes = process, num_processes
        self._document_token = document_token
        self.cursor = cursor
        self.ranges: tuple[ShardRange, ...] = ()  #: without digests
        inside = shards[cursor.shard].num_tokens if 0 <= cursor.shard < len(shards) else -1
        if not 0 <= cursor.offset <= inside:
            raise DataError(f"{cursor} is not in these {len(shards)} shards; need those the run began with")

    def _read(self, num_tokens: int, start: int, stop: int) -> np.ndarray:
        """Advance by `num_tokens`; of these, read `start` to `stop` and the one after."""
        for index, offset in self._places():
            shard = self._shards[index]
            # As in record 21, which also drops a rest that is just long enough.
            if offset + num_tokens + 1 < shard.num_tokens:
                tokens = shard.read(offset + start, offset + stop + 1)
                self._advance(index, offset, num_tokens)
                return tokens
        raise self._too_short(f"{num_tokens + 2:,} tokens left for a batch")

    def _places(self) -> list[Cursor]:
        """Return where the next batch may begin: at the cursor, or at the start of a later shard."""
        return [self.cursor, *(Cursor(i, 0) for i in range(self.cursor.shard + 1, len(self._shards)))]

    def _too_short(self, need: str) -> DataError:
        after = f"token {self.cursor.offset:,} of shard {self.cursor.shard + 1}"
        found = f"no shard of {len(self._shards)} has {need} after {after}"
        return DataError(f"{found}; get more shards or run fewer steps")

    def batch(self, num_sequences: int, seq_len: int, document_tokens: int = 0) -> Batch:
        """Return this process's rows of the next batch of `num_sequences` rows.

        `cursor` and `ranges` cover the whole batch, so they are the same in all processes.
        """
        rows, rest = divmod(num_sequences, self._num_processes)
        assert not rest, "a program shares its sequences among devices, so among processes"
        if document_tokens:
            ids_BT = self._packed(Shape(num_sequences, seq_len, document_tokens)).astype(np.int32)
            own_BT = ids_BT[self._process * rows : (self._process + 1) * rows]
            return Batch(own_BT[:, :-1], own_BT[:, 1:])
        start = self._process * rows * seq_len
        return rows_of(self._read(num_sequences * seq_len, start, start + rows * seq_len), rows)

    def _packed(self, shape: Shape) -> np.ndarray:
        """Advance by a batch of documents; return it with the last targets, uint16 [B, T + 1]."""
        num_tokens = shape.num_sequences * shape.seq_len
        for index, offset in self._places():
            shard, ahead, starts = self._shards[index], 0, 0
            while offset + ahead < shard.num_tokens:  # until enough documents have been read
                ahead = min(2 * max(ahead, num_tokens), shard.num_tokens - offset)
                text, is_end = shard.read(offset, offset + ahead), offset + ahead == shard.num_tokens
                found = _Documents(text, self._document_token, shape.document_tokens, is_end=is_end)
                if taken := found.sequences(0, shape):
                    length = found.bounds[taken[-1][1]]
                    self._advance(index, offset, length, length - num_tokens)
                    return np.stack([found.tokens(*one)[: shape.seq_len + 1] for one in taken])
                starts = len(found.bounds) - is_end
            if not starts and not offset:
                got = f"{shard.path}: {ahead:,} tokens without document token {self._document_token}"
                raise DataError(f"{got}; need documents; check where the shard came from")
        raise self._too_short(f"documents for {shape.num_sequences} x {shape.seq_len:,} tokens")

    def _advance(self, index: int, start: int, num_tokens: int, skipped: int = 0) -> None:
        """Move the cursor past a range, and record the range or extend the last one."""
        shard = self._shards[index]
        self.cursor = Cursor(index, start + num_tokens)
        *before, last = self.ranges or (None,)
        if last and (last.name, last.stop) == (shard.path.name, start):
            self.ranges = tuple(before)
            start, skipped = last.start, last.skipped + skipped
        new = ShardRange(shard.path.name, "", shard.num_tokens, start, self.cursor.offset, skipped)
        self.ranges += (new,)


class _Documents:
    """The documents of a text, and their division into sequences."""

    def __init__(
        self, text: np.ndarray, document_token: int | None, cut: int, *, is_end: bool = True
    ) -> None:
        """Find the documents, each cut to `cut` tokens; the last one has no end unless `is_end`."""
        starts = np.flatnonzero(text == document_token).tolist()
        self._text = text
        self._cut = cut
        self.bounds = [*starts, len(text)] if is_end else starts
        lengths = np.minimum(np.diff(self.bounds), cut)
        self._before = [0, *np.cumsum(lengths).tolist()]  #: tokens before each document, after the cuts

    def sequences(self, offset: int, shape: Shape) -> list[tuple[int, int]] | None:
        """Return the range of documents of each sequence from `offset` on; None if they do not fill a batch."""
        found: list[tuple[int, int]] = []
        stop = bisect_left(self.bounds, offset)
        while len(found) < shape.num_sequences and stop < len(self.bounds):
            start = stop
            stop = bisect_left(self._before, self._before[start] + shape.seq_len + 1)
            found.append((start, stop))
        return found if stop < len(self.bounds) else None

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens of a range of documents, each cut."""
        bounds = pairwise(self.bounds[start : stop + 1])
        return np.concatenate([self._text[first : min(last, first + self._cut)] for first, last in bounds])


def require_steps(shards: Sequence[Shard], shapes: Sequence[Shape], document_token: int | None = None) -> int:
    """Return how many shards these batches take; read them only to pack documents.

    Raise DataError if they have too few tokens.
    """

    @lru_cache(maxsize=1)
    def documents(shard: Shard, cut: int) -> _Documents:
        return _Documents(shard.read(0, shard.num_tokens), document_token, cut)

    def end(shard: Shard, offset: int, shape: Shape) -> int | None:
        """Return the offset after a batch; None if the rest of the shard does not fill it."""
        if not shape.document_tokens:
            stop = offset + shape.num_sequences * shape.seq_len
            return stop if stop + 1 < shard.num_tokens else None
        found = documents(shard, shape.document_tokens)
        taken = found.sequences(offset, shape)
        return found.bounds[taken[-1][1]] if taken else None

    left, offset = list(shards), 0
    stop: int | None = 0
    for step, shape in enumerate(shapes):
        while left and (stop := end(left[0], offset, shape)) is None:
            left, offset = left[1:], 0
        if not left:
            got = f"{len(shards)} training shards last for {step:,} steps"
            raise DataError(f"{got}; the recipe takes {len(shapes):,}; get more shards or run fewer steps")
        offset = stop or 0
    return len(shards) - len(left) + 1


def rows_of(tokens: np.ndarray, num_sequences: int) -> Batch:
    """Return consecutive rows; the last token is only a target."""
    ids = tokens.astype(np.int32)
    return Batch(ids[:-1].reshape(num_sequences, -1), ids[1:].reshape(num_sequences, -1))


def validation_batches(
    shard: Shard, num_tokens: int, num_sequences: int, seq_len: int, start: int = 0
) -> Iterator[Batch]:
    """Return batches of `num_tokens` targets of a shard, each once and in order; `start` is the first input."""
    batch_tokens = num_sequences * seq_len
    if num_tokens % batch_tokens:
        raise UsageError(
            f"validation batches of {num_sequences} x {seq_len:,} tokens; they must divide {num_tokens:,}; "
            "choose another number or length of sequences"
        )
    starts = range(start, start + num_tokens, batch_tokens)
    return (rows_of(shard.read(at, at + batch_tokens + 1), num_sequences) for at in starts)


class Prefetch:
    """Iterates over batches, and reads one batch ahead on a thread.

    `cursor` and `ranges` exclude the batch ahead. The first read starts with the first `next`, so a clock that started
    before covers it. Call `drain` before the clock pauses, so that nothing is read in the pause.
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
        """Return the next batch; raise DataError if it cannot be read."""
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
