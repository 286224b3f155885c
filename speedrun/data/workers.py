"""Encodes blocks of documents on threads, in the order of their source.

The tokenizers release Python's lock while they work, as gzip does. So threads are as fast as processes here, share
one tokenizer and start at once. Results are taken in the order of submission, and only a few blocks are in flight:
the output does not depend on the number of threads, and memory does not grow with the corpus.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from speedrun.data import documents, tokenizer
from speedrun.data.documents import Block
from speedrun.data.inventory import Place
from speedrun.data.tokenizer import Tokenizer

#: Blocks in flight for each worker: one being encoded, one waiting, one done and not yet taken.
_BLOCKS_PER_WORKER = 3


class Encoded(NamedTuple):
    """A block as ids; a document token precedes each document."""

    first: Place  #: of the first document
    ids: np.ndarray  #: uint16 [N]
    starts: np.ndarray  #: int64 [D]: positions of the document tokens
    source_tokens: np.ndarray | None  #: int64 [D]: tokens of each document, as the source counts them
    read_bytes: int  #: of the source, up to the end of this block


def encoded(
    blocks: Iterable[Block], chosen: Tokenizer, column: str, *, num_workers: int
) -> Generator[Encoded, None, None]:
    """Yield all blocks as ids, in order. The calling thread reads them; a single worker is the calling thread.

    Raises:
        DataError: if a document cannot be read.
    """
    encode = _encoder(chosen, column)
    if num_workers == 1:
        yield from map(encode, blocks)
        return
    in_flight: deque[Future[Encoded]] = deque()
    pool = ThreadPoolExecutor(num_workers, "encode")
    try:
        for block in blocks:
            in_flight.append(pool.submit(encode, block))
            if len(in_flight) >= _BLOCKS_PER_WORKER * num_workers:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _encoder(chosen: Tokenizer, column: str) -> Callable[[Block], Encoded]:
    def encode(block: Block) -> Encoded:
        texts, counts = documents.read(block, column)
        ids, starts = tokenizer.joined(chosen.encode(texts), chosen.document_token)
        source_tokens = None if counts is None else np.array(counts, np.int64)
        return Encoded(block.first, ids, starts, source_tokens, block.read_bytes)

    return encode
