"""Batches that begin at documents, against a definition that walks lists of documents."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.data.packing import boundaries, packed_batch
from speedrun.data.shards import Shard, write_shard
from speedrun.data.stream import START
from speedrun.errors import DataError

OPENS = 99


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


def make(folder: Path, layouts: list[list[int]]) -> list[Shard]:
    """One shard a layout: a piece of so many tokens without an opening one, then documents of so many tokens."""
    shards = []
    for i, (head, *lengths) in enumerate(layouts):
        documents = [[OPENS, *(j % 90 for j in range(i, i + length - 1))] for length in lengths]
        ids = [*range(head), *(x for document in documents for x in document)] or [0]
        shards.append(write_shard(folder / f"s{i}.bin", np.array(ids)))
    return shards


def definition(
    shards: list[Shard], num_rows: int, row_tokens: int, longest: int
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Batches of (T + 1 tokens, lengths of documents as pieces of them): as the note has it, one token at a time."""
    for shard in shards:
        documents: list[list[int]] = []
        for token in shard.read(0, shard.num_tokens).tolist():
            if token == OPENS:
                documents.append([])
            if documents:
                documents[-1].append(token)
        while True:
            batch = []
            for _ in range(num_rows):
                row, lengths = [], []
                while len(row) < row_tokens + 1 and documents:
                    piece = documents.pop(0)[:longest][: row_tokens + 1 - len(row)]
                    row += piece
                    lengths.append(len(piece))
                if len(row) < row_tokens + 1:
                    break
                batch.append((row, lengths))
            if len(batch) < num_rows:
                break
            yield batch


LAYOUTS = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(1, 30), max_size=25)).map(lambda x: [x[0], *x[1]]),
    min_size=1,
    max_size=3,
)


@given(LAYOUTS, st.integers(1, 3), st.integers(1, 12), st.integers(1, 14))
@settings(max_examples=200, deadline=None)
def test_packed_batches_are_the_definition(
    folder: Path, layouts: list[list[int]], num_rows: int, row_tokens: int, longest: int
):
    shards, cursor = make(folder, layouts), START
    sizes = {"num_rows": num_rows, "row_tokens": row_tokens, "max_document_tokens": longest}
    rest = {"num_boundaries": row_tokens + 2, "document_token": OPENS}
    for want in definition(shards, num_rows, row_tokens, longest):
        (batch, boundaries_BS), cursor = packed_batch(shards, cursor, **sizes, **rest)
        for (row, lengths), tokens, targets, ends in zip(want, *batch, boundaries_BS, strict=True):
            assert (tokens.tolist(), targets.tolist()) == (row[:-1], row[1:])
            assert tokens[0] == OPENS
            # Of the documents' lengths, the last target does not count.
            lengths[-1] -= 1
            cumulated = [sum(lengths[: i + 1]) for i in range(len(lengths))]
            padding = [row_tokens] * (row_tokens + 1 - len(lengths))
            assert ends.tolist() == [0, *cumulated, *padding]
            assert (ends.dtype, tokens.dtype) == (np.int32, np.int32)
    with pytest.raises(
        DataError, match=f"documents left after .* for {num_rows} rows of {row_tokens} tokens"
    ):
        packed_batch(shards, cursor, **sizes, **rest)


@given(LAYOUTS, st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 14)), max_size=6))
@settings(max_examples=50, deadline=None)
def test_sizes_may_change_and_no_document_is_read_twice(
    folder: Path, layouts: list[list[int]], stages: list[tuple[int, int, int]]
):
    shards, cursor, ends = make(folder, layouts), START, []
    for num_rows, row_tokens, longest in stages:
        try:
            (batch, _), cursor = packed_batch(
                shards,
                cursor,
                num_rows=num_rows,
                row_tokens=row_tokens,
                max_document_tokens=longest,
                num_boundaries=99,
                document_token=OPENS,
            )
        except DataError:
            break
        assert batch.tokens_BT.shape == (num_rows, row_tokens)
        ends.append(cursor)
    assert ends == sorted(set(ends)), "always forward"
    for shard, offset in ends:  # a cursor stands at a document or behind the last one
        assert offset == shards[shard].num_tokens or shards[shard].read(offset, offset + 1)[0] == OPENS


def test_boundaries_have_one_length():
    assert boundaries(np.array([3, 7, 10]), 10, 6).tolist() == [0, 3, 7, 10, 10, 10]
    assert boundaries(np.array([], int), 10, 2).tolist() == [0, 10]
    assert boundaries(np.array([3, 7, 10]), 10, 4).tolist() == [0, 3, 7, 10]
    with pytest.raises(DataError, match="3 documents in a row of 10 tokens; boundaries of 3 entries hold 2"):
        boundaries(np.array([3, 7, 10]), 10, 3)
