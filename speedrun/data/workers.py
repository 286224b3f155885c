"""Blocks of documents become ids on threads, and come back in the order of their source.

The tokenizers let go of Python's lock while they work, as gzip does: threads are as fast as processes here, share
one tokenizer, start at once and cost no copies. The order does not depend on who is faster: results are taken in
the order in which blocks were handed out, and only a few are out at a time: memory does not grow with the corpus.
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

#: Blocks handed out for each worker: one that it works on, one that waits, one that is done and not yet taken.
_BLOCKS_EACH = 3


class Encoded(NamedTuple):
    """A block as ids, each document opened by its token."""

    first: Place  #: of the first document
    ids: np.ndarray  #: uint16 [N]
    starts: np.ndarray  #: int64 [D]: where the document tokens stand
    text_bytes: int | None  #: of UTF-8 that the ids stand for, where that is known
    source_tokens: np.ndarray | None  #: int64 [D]: what the source says each document holds
    read_bytes: int  #: of the source, up to the end of this block


def encoded(
    blocks: Iterable[Block], chosen: Tokenizer, column: str, *, num_workers: int
) -> Generator[Encoded, None, None]:
    """All blocks as ids, in their order. The thread that asks reads them; one worker is that thread itself.

    Raises:
        DataError: if a document cannot be read.
    """
    encode = _encoder(chosen, column)
    if num_workers == 1:
        yield from map(encode, blocks)
        return
    out: deque[Future[Encoded]] = deque()
    pool = ThreadPoolExecutor(num_workers, "encode")
    try:
        for block in blocks:
            out.append(pool.submit(encode, block))
            if len(out) >= _BLOCKS_EACH * num_workers:
                yield out.popleft().result()
        while out:
            yield out.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _encoder(chosen: Tokenizer, column: str) -> Callable[[Block], Encoded]:
    id_bytes_V = chosen.id_bytes_V()

    def encode(block: Block) -> Encoded:
        texts, counts = documents.read(block, column)
        ids, starts = tokenizer.joined(chosen.encode(texts), chosen.document_token)
        source_tokens = None if counts is None else np.array(counts, np.int64)
        text_bytes = None if id_bytes_V is None else int(id_bytes_V[ids].sum())
        return Encoded(block.first, ids, starts, text_bytes, source_tokens, block.read_bytes)

    return encode
