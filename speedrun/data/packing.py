"""Batches that begin at documents, as later records have them. No recipe here reads this way yet.

    B rows of a batch    T tokens of a row    D documents    S entries of the boundaries

A row is packed from whole documents in the order of the shard, each cut at a maximum length; what is cut off is
dropped. The last document of a row is cut where the row and its last target are full, and its rest is dropped,
too: the next row begins with the next document. A document that a shard begins in the middle of is skipped. Where
a shard has not enough documents left for a batch, all of them are, and the batch comes from the next shard.

Each function takes its sizes at each call, so that they may change from stage to stage.

Source: modded-nanogpt, records 26 (@varunneal, @ClassicLarry) and 29: `BOSFinder`, `distributed_data_generator`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from speedrun.data.shards import Shard
from speedrun.data.stream import Batch, Cursor
from speedrun.errors import DataError


class Packing(NamedTuple):
    """Which stretches make a batch."""

    rows: tuple[np.ndarray, ...]  #: i64 [D, 2] each: starts and stops, T + 1 tokens in all
    num_documents: int  #: so many are used up


def document_starts(tokens_N: np.ndarray, document_token: int) -> np.ndarray:
    """Where documents open: i64 [D]."""
    return np.flatnonzero(tokens_N == document_token)


def pack(
    starts_D: np.ndarray, num_tokens: int, *, num_rows: int, row_tokens: int, max_document_tokens: int
) -> Packing | None:
    """Packs documents into rows, from the first document on.

    Args:
        starts_D: where they open, ascending.
        num_tokens: where the last one ends.
        num_rows: of the batch.
        row_tokens: T; a row takes one more, which is a target only.
        max_document_tokens: no document gives a row more.

    Returns:
        None if there are not enough documents.
    """
    stops_D = np.append(starts_D[1:], num_tokens)[: len(starts_D)]
    lengths_D = np.minimum(stops_D - starts_D, max_document_tokens)
    ends_D, rows, first = np.cumsum(lengths_D), [], 0
    for _ in range(num_rows):
        before = ends_D[first - 1] if first else 0
        last = int(np.searchsorted(ends_D, before + row_tokens + 1))  # the document that fills the row
        if last >= len(starts_D):
            return None
        used_D = lengths_D[first : last + 1].copy()
        used_D[-1] -= ends_D[last] - before - (row_tokens + 1)
        row_starts_D = starts_D[first : last + 1]
        rows.append(np.stack([row_starts_D, row_starts_D + used_D], axis=1))
        first = last + 1
    return Packing(tuple(rows), first)


def boundaries(ends_D: np.ndarray, row_tokens: int, size: int) -> np.ndarray:
    """Cumulative lengths of documents, `cu_seqlens`, at a length that does not depend on the text.

    Args:
        ends_D: where the documents of a row end, or the later ones begin; ascending, 0 to T.
        row_tokens: T.
        size: S.

    Returns:
        i32 [S]: 0, the ends, and T as often as there is room: documents of no length, which attention skips.

    Raises:
        DataError: if they are too many.
    """
    if len(ends_D) >= size:
        raise DataError(
            f"{len(ends_D):,} documents in a row of {row_tokens:,} tokens; boundaries of {size:,} entries hold "
            f"{size - 1:,}; give the recipe more entries"
        )
    filled_S = np.full(size, row_tokens, np.int32)
    filled_S[0], filled_S[1 : len(ends_D) + 1] = 0, ends_D
    return filled_S


class PackedBatch(NamedTuple):
    """A batch and the documents in it."""

    batch: Batch
    boundaries_BS: np.ndarray  #: i32, of each row


def packed_batch(
    shards: Sequence[Shard],
    cursor: Cursor,
    *,
    num_rows: int,
    row_tokens: int,
    max_document_tokens: int,
    num_boundaries: int,
    document_token: int,
) -> tuple[PackedBatch, Cursor]:
    """The next batch, and where the one after it begins; reads about as much as the batch takes.

    Args:
        shards: in the order of reading.
        cursor: `stream.START`, or as the last call returned it.
        num_rows: B.
        row_tokens: T.
        max_document_tokens: documents are cut there.
        num_boundaries: S.
        document_token: opens each document.

    Raises:
        DataError: if no shard is left that has enough documents; if a row has too many for S.
    """
    sizes = {"num_rows": num_rows, "row_tokens": row_tokens, "max_document_tokens": max_document_tokens}
    shard, offset = cursor
    while shard < len(shards):
        window = 2 * num_rows * (row_tokens + 1)
        while (stop := min(offset + window, shards[shard].num_tokens)) > offset:
            tokens_N = shards[shard].read(offset, stop)
            starts_D, end = document_starts(tokens_N, document_token), len(tokens_N)
            at_end = stop == shards[shard].num_tokens
            if not at_end and len(starts_D):  # the last document may go on behind the window
                starts_D, end = starts_D[:-1], int(starts_D[-1])
            if packing := pack(starts_D, end, **sizes):
                used = packing.num_documents
                next_start = int(starts_D[used]) if used < len(starts_D) else end
                packed = _cut(tokens_N, packing, row_tokens, num_boundaries)
                return packed, Cursor(shard, offset + next_start)
            if at_end:
                break
            window *= 2
        shard, offset = shard + 1, 0
    raise DataError(
        f"no shard of {len(shards)} has documents left after {cursor} for {num_rows} rows of {row_tokens:,} tokens; "
        "get more shards or run fewer steps"
    )


def _cut(tokens_N: np.ndarray, packing: Packing, row_tokens: int, num_boundaries: int) -> PackedBatch:
    ids_BT = np.stack(
        [np.concatenate([tokens_N[start:stop] for start, stop in row_D2]) for row_D2 in packing.rows]
    ).astype(np.int32)
    ends = [np.minimum(np.cumsum(row_D2[:, 1] - row_D2[:, 0]), row_tokens) for row_D2 in packing.rows]
    boundaries_BS = np.stack([boundaries(ends_D, row_tokens, num_boundaries) for ends_D in ends])
    return PackedBatch(Batch(ids_BT[:, :-1], ids_BT[:, 1:]), boundaries_BS)
