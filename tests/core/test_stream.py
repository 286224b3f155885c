"""The order of tokens against a slow and simple oracle; resuming; reading ahead."""

import json
import tempfile
import threading
from collections.abc import Iterator
from itertools import pairwise, repeat
from pathlib import Path

import golden_files
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from speedrun.base import track
from speedrun.base.errors import DataError, UsageError
from speedrun.base.runlog import ShardRange
from speedrun.data.shards import Shard, write_shard
from speedrun.data.stream import (
    Batch,
    Cursor,
    Prefetch,
    Shape,
    TokenStream,
    require_steps,
    validation_batches,
)
from speedrun.science import nn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


def make(folder: Path, *lengths: int) -> list[Shard]:
    """Shards whose tokens are their positions: 0, 1, 2, ..."""
    starts = np.cumsum([0, *lengths])
    return [
        write_shard(folder / f"s{i}.bin", np.arange(start, start + length))
        for i, (start, length) in enumerate(zip(starts, lengths, strict=False))
    ]


def take(stream: TokenStream, num_tokens: int) -> np.ndarray:
    """The next tokens and the one after them."""
    tokens_BT, targets_BT = stream.batch(1, num_tokens)
    return np.append(tokens_BT, targets_BT[0, -1])


def oracle(shards: list[Shard], num_tokens: int) -> Iterator[tuple[list[int], str, int]]:
    """What record 21 reads, from one list per shard: tokens and the next one, name of the shard, start."""
    for shard in shards:
        tokens = shard.read(0, shard.num_tokens).tolist()
        position = 0
        while not position + num_tokens + 1 >= len(tokens):
            yield tokens[position:][: num_tokens + 1], shard.path.name, position
            position += num_tokens


def documents_oracle(
    shards: list[list[int]], opens: int, shape: Shape
) -> Iterator[tuple[list[list[int]], int, int]]:
    """Pack as record 89 does, document by document: the rows with their last targets, shard, end."""
    for index, tokens in enumerate(shards):
        starts = [at for at, token in enumerate(tokens) if token == opens]
        documents = [tokens[start:stop] for start, stop in pairwise([*starts, len(tokens)])]
        while True:
            rows, taken = [], 0
            for _ in range(shape.num_sequences):
                row: list[int] = []
                while len(row) <= shape.seq_len and taken < len(documents):
                    row += documents[taken][: shape.document_tokens][: shape.seq_len + 1 - len(row)]
                    taken += 1
                rows.append(row)
            if any(len(row) <= shape.seq_len for row in rows):
                break
            documents = documents[taken:]
            yield rows, index, len(tokens) - sum(map(len, documents))


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(LENGTHS, st.integers(1, 12), st.integers(1, 3))
@settings(max_examples=60)
def test_the_stream_is_the_oracle(folder, lengths, num_tokens, num_epochs):
    shards = make(folder, *lengths)
    sizes = {shard.path.name: shard.num_tokens for shard in shards}
    stream, batches = TokenStream(shards * num_epochs), list(oracle(shards, num_tokens)) * num_epochs
    read: list[ShardRange] = []
    for want, name, start in batches:
        assert take(stream, num_tokens).tolist() == want
        read += [ShardRange(name, "", sizes[name], start + i, start + i + 1) for i in range(num_tokens)]
    steps = len(batches)
    require_steps(shards * num_epochs, [Shape(1, num_tokens)] * steps)
    with pytest.raises(DataError, match=rf"last for {steps} steps; the recipe takes {steps + 1};"):
        require_steps(shards * num_epochs, [Shape(1, num_tokens)] * (steps + 1))
    with pytest.raises(DataError, match=rf"no shard of \d+ has {num_tokens + 2} tokens left"):
        take(stream, num_tokens)
    # The ranges hold exactly these tokens, and no two are adjacent.
    singly = [
        ShardRange(r.name, "", r.tokens, i, i + 1) for r in stream.ranges for i in range(r.start, r.stop)
    ]
    assert singly == read
    assert not any(a.name == b.name and a.stop == b.start for a, b in pairwise(stream.ranges))


@given(LENGTHS, st.integers(1, 12), st.data())
@settings(max_examples=60)
def test_a_cursor_is_the_whole_state(folder, lengths, num_tokens, data):
    shards = make(folder, *lengths)
    batches = [want for want, *_ in list(oracle(shards, num_tokens)) * 2]
    stop = data.draw(st.integers(0, len(batches)))
    first = TokenStream(shards * 2)
    for want in batches[:stop]:
        assert take(first, num_tokens).tolist() == want
    second = TokenStream(shards * 2, Cursor(*tuple(first.cursor)))
    for want in batches[stop:]:
        assert take(second, num_tokens).tolist() == want
    assert sum(span.stop - span.start for span in second.ranges) == num_tokens * (len(batches) - stop)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=60)
def test_processes_share_a_batch(folder, lengths, rows, seq_len, num_processes):
    shards = make(folder, *lengths)
    num_sequences = rows * num_processes
    whole = TokenStream(shards * 2)
    parts = [TokenStream(shards * 2, process=p, num_processes=num_processes) for p in range(num_processes)]
    for _ in range(2 * len(list(oracle(shards, num_sequences * seq_len)))):
        want = whole.batch(num_sequences, seq_len)
        got = [part.batch(num_sequences, seq_len) for part in parts]
        for field in Batch._fields:
            joined = np.concatenate([getattr(batch, field) for batch in got])
            assert (joined == getattr(want, field)).all()
        assert all(batch.tokens_BT.shape == (rows, seq_len) for batch in got)
        assert {(part.cursor, part.ranges) for part in parts} == {(whole.cursor, whole.ranges)}
    for part in parts:
        with pytest.raises(DataError, match="tokens left for a batch after token"):
            part.batch(num_sequences, seq_len)


@pytest.mark.parametrize("cursor", [Cursor(2, 0), Cursor(0, 21), Cursor(-1, 0), Cursor(0, -1)])
def test_a_cursor_of_other_shards_is_refused(folder, cursor):
    with pytest.raises(DataError, match="shards; need those the run began with"):
        TokenStream(make(folder, 20), cursor)


def test_validation_reads_each_target_once_and_what_is_impossible_is_refused_early(folder):
    (shard,) = make(folder, 13)
    batches = list(validation_batches(shard, 12, 2, 3))
    assert np.concatenate([b.targets_BT.ravel() for b in batches]).tolist() == list(range(1, 13))
    assert np.concatenate([b.tokens_BT.ravel() for b in batches]).tolist() == list(range(12))
    (shard,) = make(folder, 12)
    with pytest.raises(UsageError, match="must divide 11"):
        validation_batches(shard, 11, 2, 3)


@example(texts=[[0, 1, 0, 2]], shape=Shape(2, 1, 12), splits=1)  # the last document of a shard is needed
@example(texts=[[0, 1, 0, 2, 0, 3, 0, 1]], shape=Shape(4, 1, 12), splits=2)  # neighbouring rows differ
@settings(max_examples=60)
@given(
    texts=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=120).filter(lambda text: 0 in text),
        min_size=1,
        max_size=3,
    ),
    shape=st.builds(Shape, st.sampled_from([2, 4]), st.integers(1, 9), st.integers(1, 12)),
    splits=st.integers(1, 2),
)
def test_documents_are_packed_as_in_record_89(texts, shape, splits):
    """A batch at a time, each from a stream that starts at the cursor of the last, in one or two processes."""
    with tempfile.TemporaryDirectory() as name:
        shards = [write_shard(Path(name, f"s{i}.bin"), np.array(text)) for i, text in enumerate(texts)]
        cursor, read, rest = Cursor(0, 0), 0, 0
        steps = len(list(documents_oracle(texts, 0, shape)))
        require_steps(shards, [shape] * steps, 0)
        with pytest.raises(DataError, match=rf"last for {steps} steps; the recipe takes {steps + 1};"):
            require_steps(shards, [shape] * (steps + 1), 0)
        for rows, index, end in documents_oracle(texts, 0, shape):
            streams = [
                TokenStream(shards, cursor, process=i, num_processes=splits, document_token=0)
                for i in range(splits)
            ]
            batches = [stream.batch(*shape) for stream in streams]
            assert np.concatenate([x.tokens_BT for x in batches]).tolist() == [row[:-1] for row in rows]
            assert np.concatenate([x.targets_BT for x in batches]).tolist() == [row[1:] for row in rows]
            cursor, (span,) = streams[0].cursor, streams[0].ranges
            assert cursor == streams[-1].cursor == (index, end)
            read += span.stop - span.start - span.skipped
            rest += shape.num_sequences * shape.seq_len
        assert read == rest
        with pytest.raises(DataError, match=r"has documents for .*; get more shards"):
            TokenStream(shards, cursor, document_token=0).batch(*shape)


def test_a_shard_without_documents_is_refused_and_not_skipped(folder):
    text = np.array([0, 1, 1, 1] * 9)
    good, bad = write_shard(folder / "good.bin", text), write_shard(folder / "bad.bin", text + 1)
    stream = TokenStream([good, bad, good], document_token=0)
    stream.batch(4, 7, 9)
    with pytest.raises(
        DataError, match=r"bad.bin: 36 tokens without document token 0; need documents; [^\n]*$"
    ):
        stream.batch(4, 7, 9)
    # The last document of a shard goes on behind contiguous text: its tail has no opening token.
    tail = TokenStream([good, good], Cursor(0, 33), document_token=0)
    assert (tail.batch(4, 7, 9).tokens_BT[:, 0] == 0).all()
    assert tail.cursor == Cursor(1, 32)


@pytest.mark.parametrize("letter", "ab")
def test_golden_89_packs_the_batches_of_all_stages(folder, letter):
    """Across ends of files; a document begins where the model sees its first token."""
    run = golden_files.arrays(f"record2026_{letter}.npz")
    config = json.loads(str(run["config"]))
    shards = [write_shard(folder / f"{letter}{i}.bin", run[f"stream/{i}"]) for i in (0, 1)]
    opens, num_sequences = config["document_token"], config["micro_batches"]
    stream = TokenStream(shards, document_token=opens)
    for stage in config["stages"]:
        for step in range(stage["start"], stage["end"]):
            batch = stream.batch(num_sequences, stage["tokens"], stage["max_doc"])
            documents_BT = np.asarray(nn.documents(jnp.asarray(batch.tokens_BT), opens))
            for row in range(num_sequences):
                np.testing.assert_array_equal(batch.tokens_BT[row], run[f"batch/{step}/{row}/inputs"])
                np.testing.assert_array_equal(batch.targets_BT[row], run[f"batch/{step}/{row}/targets"])
                counts = np.unique(documents_BT[row], return_counts=True)[1]
                np.testing.assert_array_equal(np.cumsum(counts), run[f"batch/{step}/{row}/ends"])
    assert [span.name for span in stream.ranges] == [f"{letter}0.bin", f"{letter}1.bin"]


class Watched(TokenStream):
    """Counts the reads; each one waits for permission."""

    def __init__(self, shards: list[Shard]) -> None:
        super().__init__(shards)
        self.reads = 0
        self.leave = threading.Event()
        self.leave.set()

    def batch(self, num_sequences: int, seq_len: int, document_tokens: int = 0) -> Batch:
        assert self.leave.wait(10)
        self.reads += 1
        return super().batch(num_sequences, seq_len, document_tokens)


def test_reading_ahead_changes_nothing_and_ends(folder):
    shards = make(folder, 30, 30)
    shapes = [(2, 3), (2, 3), (1, 8), (4, 5)]
    plain, stream = TokenStream(shards), Watched(shards)
    with Prefetch(stream, shapes) as ahead:
        for shape, got in zip(shapes, ahead, strict=True):
            want = plain.batch(*shape)
            assert got.tokens_BT.shape == shape
            assert (want.tokens_BT == got.tokens_BT).all()
            assert (want.targets_BT == got.targets_BT).all()
            assert (ahead.cursor, ahead.ranges) == (plain.cursor, plain.ranges)
        ahead.drain()
        assert (stream.reads, stream.cursor) == (4, plain.cursor), "nothing after the last one"


def test_one_batch_ahead_and_none_while_the_clock_is_paused_and_draining_waits_for_the_read(folder):
    stream = Watched(make(folder, 30))
    with Prefetch(stream, repeat((2, 3))) as ahead:
        assert stream.reads == 0, "the clock has not started"
        next(ahead)
        ahead.drain()
        assert stream.reads == 2
        assert (ahead.cursor, stream.cursor) == (Cursor(0, 6), Cursor(0, 12))
        ahead.drain()
        assert stream.reads == 2
        stream.leave.clear()
        next(ahead)
        timer = threading.Timer(0.05, stream.leave.set)
        timer.start()
        before_s = ahead.wait_s
        ahead.drain()
        assert stream.reads == 3
        assert ahead.wait_s - before_s > 0.02
        timer.join()


def test_an_error_is_raised_with_its_batch(folder):
    with Prefetch(TokenStream(make(folder, 14)), repeat((2, 3))) as ahead:
        next(ahead)
        next(ahead)  # the last one; the thread has already found no third
        ahead.drain()
        for _ in range(2):
            with pytest.raises(DataError, match="has 8 tokens left"):
                next(ahead)
        assert ahead.cursor == Cursor(0, 12)


@pytest.mark.parametrize("spare", [1, 128, 129, 5_000])
def test_held_out_text_begins_at_any_aligned_place_behind_the_scored_text(spare):
    rules = replace(track.load("smoke-cpu").data, val_tokens=2_048, held_tokens=1_024)
    starts = {rules.held_start(f"{nonce:016x}", 2_048 + 1_024 + spare) for nonce in range(1_000)}
    assert starts == {*range(2_048, 2_048 + spare, track.ALIGNED)}
    line = track.load("smoke-cpu").synthetic
    assert line is not None
    assert track.ALIGNED % (1 + line["line_words"]) == 0
