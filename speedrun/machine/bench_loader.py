"""Time the loader, against the tokens that eight H100 consume."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path

import msgspec
import numpy as np

from speedrun.base.clock import Stopwatch
from speedrun.base.errors import DataError
from speedrun.data.shards import UINT16_IDS, Shard, open_shard, write_shard
from speedrun.data.stream import Prefetch, TokenStream

#: Record 21 takes about 100 ms for a step of 393,216 tokens on eight H100.
H100_TOKENS_PER_S = 4e6

_NUM_SHARDS = 2
_SYNTHETIC_TOKENS = 100_000_000  #: in each, as in FineWeb's
_LOOPS_S = 1.0  #: batches are read for so long
_MANY_EPOCHS = 2**20


class Pace(msgspec.Struct, frozen=True):
    """The loader by itself on this machine."""

    batch_tokens: int
    tokens_per_s: float  #: from batch to batch, files in memory
    times_h100: float  #: that rate, relative to what eight H100 consume
    first_batch_ms: float  #: from its request, files not in memory
    step_ms: float  #: of a simulated step
    waited: float  #: share of the time of simulated steps spent waiting, without the first batch

    def __str__(self) -> str:
        return (
            f"rate    {self.tokens_per_s:,.0f} tokens/s | {self.times_h100:.0f} x what 8 H100 consume\n"
            f"wait    {self.waited:.2%} of steps of {self.step_ms:g} ms and {self.batch_tokens:,} tokens\n"
            f"first   batch after {self.first_batch_ms:.1f} ms, from the disk"
        )


def measure(
    shards: Sequence[Shard],
    shape: tuple[int, int] = (8, 49_152),
    *,
    step_ms: float = 100,
    num_steps: int = 30,
) -> Pace:
    """Read batches beside simulated steps, then as fast as possible. By default those of record 21 on eight H100.

    Args:
        shards: read in order, repeatedly.
        shape: number and length of the sequences of a batch.
        step_ms: duration of a simulated step.
        num_steps: number of simulated steps.
    """
    for shard in shards:
        _forget(shard.path)
    with Prefetch(TokenStream([*shards] * _MANY_EPOCHS), repeat(shape)) as batches:
        next(batches)
        first_s, watch = batches.wait_s, Stopwatch()
        for _ in range(num_steps):
            time.sleep(step_ms / 1e3)
            next(batches)
        waited = (batches.wait_s - first_s) / watch.seconds
    stream = TokenStream([*shards] * _MANY_EPOCHS)
    for shard in shards:
        shard.path.read_bytes()
    watch, num_batches = Stopwatch(), 0
    while (seconds := watch.seconds) < _LOOPS_S:
        stream.batch(*shape)
        num_batches += 1
    rate = num_batches * shape[0] * shape[1] / seconds
    return Pace(shape[0] * shape[1], rate, rate / H100_TOKENS_PER_S, first_s * 1e3, step_ms, waited)


def _forget(path: Path) -> None:
    """Drop a file from the page cache, so that the next read is from the disk."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def folder_shards(folder: Path, most: int | None = _NUM_SHARDS) -> list[Shard]:
    """Return the first `most` training shards of a folder; None: all. Raise DataError if there are none."""
    paths = sorted(folder.glob("*_train_*.bin"))
    if not paths:
        raise DataError(f"{folder}: no *_train_*.bin; need shards of tokens; or leave out the folder")
    return [open_shard(path, vocab_size=UINT16_IDS) for path in paths[:most]]


@contextmanager
def synthetic_shards() -> Iterator[list[Shard]]:
    """Make two full shards, 0.4 GB of temporary files, and remove them afterwards."""
    ids = np.resize(np.arange(UINT16_IDS, dtype=np.uint16), _SYNTHETIC_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(_NUM_SHARDS):
            write_shard(Path(folder) / f"any_train_{i:06d}.bin", ids)
        yield folder_shards(Path(folder))
