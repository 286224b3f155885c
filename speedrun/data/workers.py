"""Blocks of documents become ids in worker processes, and come back in the order of their source.

The order does not depend on who is faster: results are taken in the order in which blocks were handed out, and
only a few blocks are out at a time, so that memory does not grow with the corpus.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import NamedTuple, TypeVar

import numpy as np

from speedrun.data import documents, tokenizer
from speedrun.data.documents import Block
from speedrun.data.inventory import Place
from speedrun.errors import DataError

#: Blocks handed out for each worker: one that it works on, one that waits, one that is done and not yet taken.
_BLOCKS_EACH = 3
_START_TIMEOUT_S = 120


class Encoded(NamedTuple):
    """A block as ids, each document opened by its token."""

    first: Place  #: of the first document
    ids: np.ndarray  #: uint16 [N]
    starts: np.ndarray  #: int64 [D]: where the document tokens stand
    text_bytes: int | None  #: of UTF-8 that the ids stand for, where that is known
    source_tokens: np.ndarray | None  #: int64 [D]: what the source says each document holds
    read_bytes: int  #: of the source, up to the end of this block


_T = TypeVar("_T")

Encode = Callable[[Block], Encoded]
EncodeAll = Callable[[Iterable[Block]], Iterator[Encoded]]


def encoder(choice: tokenizer.Choice, column: str) -> Encode:
    """What a worker does with a block.

    Raises:
        DataError: of `tokenizer.load`; and by the function, if a document cannot be read.
    """
    chosen = tokenizer.load(choice)
    id_bytes_V = chosen.id_bytes_V()

    def encode(block: Block) -> Encoded:
        texts, counts = documents.read(block, column)
        ids, starts = tokenizer.joined(chosen.encode(texts), chosen.document_token)
        source_tokens = None if counts is None else np.array(counts, np.int64)
        text_bytes = None if id_bytes_V is None else int(id_bytes_V[ids].sum())
        return Encoded(block.first, ids, starts, text_bytes, source_tokens, block.read_bytes)

    return encode


@contextmanager
def workers(num_workers: int, choice: tokenizer.Choice, column: str) -> Iterator[EncodeAll]:
    """Starts the workers, all of them ready; inside the block they encode. One worker is this process itself.

    Raises:
        DataError: of `encoder`; or if a worker dies.
    """
    if num_workers == 1:
        encode = encoder(choice, column)
        yield lambda blocks: map(encode, blocks)
        return
    # Not a fork: a process with threads, such as JAX's, cannot be copied safely.
    context = multiprocessing.get_context("spawn")
    all_here = context.Barrier(num_workers)
    pool = ProcessPoolExecutor(num_workers, context, _start, (choice, column, all_here))
    try:
        for started in [pool.submit(_ready) for _ in range(num_workers)]:
            _result(started)
        yield lambda blocks: _in_order(pool, blocks, _BLOCKS_EACH * num_workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, blocks: Iterable[Block], num_out: int) -> Iterator[Encoded]:
    out: deque[Future[Encoded]] = deque()
    for block in blocks:
        out.append(pool.submit(_encode, block))
        if len(out) >= num_out:
            yield _result(out.popleft())
    while out:
        yield _result(out.popleft())


def _result(future: Future[_T]) -> _T:
    try:
        return future.result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process died, perhaps for want of memory; all of them are needed; the same command goes on "
            "after the last whole shard; with fewer --workers it needs less"
        ) from None


# --- inside a worker --------------------------------------------------------------------------------------


class _Worker:
    """What a worker process keeps."""

    encode: Encode
    all_here: threading.Barrier


def _start(choice: tokenizer.Choice, column: str, all_here: threading.Barrier) -> None:
    """Runs first in every worker. Its parent hears of signals and ends it; if the parent is killed, it ends itself."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _Worker.encode = staticmethod(encoder(choice, column))
    _Worker.all_here = all_here


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _ready() -> None:
    """Returns when every worker runs this: none can take two of these calls."""
    _Worker.all_here.wait(_START_TIMEOUT_S)


def _encode(block: Block) -> Encoded:
    return _Worker.encode(block)
