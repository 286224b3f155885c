"""Tokenizers: GPT-2's, any file of the `tokenizers` library, or bytes.

Special tokens in a text are ordinary text: "<|endoftext|>" on a web page never becomes a document token. `tiktoken` and
`tokenizers` are imported on use.
"""

import re
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from functools import cached_property, partial
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, NamedTuple
from urllib.request import urlopen

import numpy as np

from speedrun.base.atomic_files import read_regular, write_whole
from speedrun.base.errors import DataError, UsageError, translate_read_errors, unknown
from speedrun.data import vocabulary
from speedrun.data.documents import Block, need
from speedrun.data.shards import Position

END_OF_TEXT = "<|endoftext|>"

#: GPT-2's ranks in one file. Source: tiktoken, `tiktoken_ext/openai_public.py`.
RANKS_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
_ANSWER_S = 10.0
#: The words of GPT-2, which are encoded independently. Source: the same.
_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def load(name: str, *, document_text: str = END_OF_TEXT) -> "Tokenizer":
    """Load `gpt2`, `bytes`, a .tiktoken file with GPT-2's ranks, or a .json file of `tokenizers`.

    `document_text` is the document token of a .json file.
    """
    if name == "bytes":
        return Bytes()
    if name.endswith(".json"):
        return FromFile(Path(name).name, _read(name), document_text)
    if name == "gpt2" or name.endswith(".tiktoken"):
        need("tiktoken")
        raw = cached_ranks() if name == "gpt2" else _read(name)
        with translate_read_errors(name, "delete the file, or name another with --tokenizer PATH.tiktoken"):
            return Tiktoken(raw)
    raise unknown("tokenizer", name, ("gpt2", "bytes", "FILE.tiktoken", "FILE.json"))


def _read(name: str) -> bytes:
    with translate_read_errors(name, "need a tokenizer's file; name another with --tokenizer"):
        return read_regular(Path(name))


class Bytes:
    """Ids 0 to 255 are the bytes of UTF-8; 256 is the document token."""

    name, raw = "bytes", b""  #: `raw` is the content of a tokenizer's file
    vocab_size, document_token = 257, 256
    #: The bytes of each id, without special ones.
    tokens: ClassVar = {byte: bytes([byte]) for byte in range(256)}

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, unsigned integers [N] without document tokens."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def cached_ranks() -> bytes:
    """Return GPT-2's ranks, from tiktoken's cache if it is installed; download them if they are missing or damaged."""
    try:
        if find_spec("tiktoken"):
            from tiktoken.load import read_file_cached

            return read_file_cached(RANKS_URL, vocabulary.RANKS_SHA256)
        with urlopen(RANKS_URL, timeout=_ANSWER_S) as answer:
            vocabulary.ranks(raw := answer.read())
        return raw
    except (OSError, ValueError, HTTPException) as error:  # also those of tiktoken's network
        raise DataError(
            f"GPT-2's ranks are not in $TIKTOKEN_CACHE_DIR and cannot be downloaded ({type(error).__name__}); "
            f"need {RANKS_URL}; copy that file next to the shards, or pass --tokenizer PATH/r50k_base.tiktoken"
        ) from None


class Tiktoken:
    """GPT-2's tokenizer."""

    name = "gpt2"
    vocab_size, document_token = 50257, 50256

    def __init__(self, raw: bytes) -> None:
        """Load the content of a file of ranks; raise ValueError if they are not GPT-2's."""
        import tiktoken

        self.raw = raw
        self.tokens = vocabulary.ranks(raw)
        self.encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=_WORDS,
            mergeable_ranks={token: index for index, token in self.tokens.items()},
            special_tokens={END_OF_TEXT: self.document_token},
            explicit_n_vocab=self.vocab_size,
        )
        #: A copy for each thread: two threads with one encoding were sometimes slower than one thread.
        self._own = threading.local()

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of `encode_ordinary`, as arrays."""
        if not hasattr(self._own, "encoding"):
            self._own.encoding = copy(self.encoding)  # 25 ms
        encode = partial(self._own.encoding.encode_to_numpy, disallowed_special=())
        return [np.concatenate([*map(encode, parts(text))]) for text in texts]


#: Longer documents are split, since tiktoken fails on very long white space before a word.
_LONG_CHARACTERS = 2**16
_WHITE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
#: Starts of words: white space after printable ASCII, and the last character of long white space.
_BORDER = re.compile(rf"(?<=[!-~])(?=[{_WHITE}])")
_LONG_WHITE = re.compile(rf"(?<![{_WHITE}])[{_WHITE}]{{1000,}}(?=[{_WHITE}][^{_WHITE}])")


def parts(text: str) -> Iterator[str]:
    """Split a long document at starts of words; the parts encode to the ids of the whole."""
    start, scanned = 0, text if len(text) > _LONG_CHARACTERS else ""
    for end in (*(white.end() for white in _LONG_WHITE.finditer(scanned)), len(text)):
        while border := _BORDER.search(text, start + _LONG_CHARACTERS, end):
            yield text[start : border.start()]
            start = border.start()
        yield text[start:end]
        start = end


class FromFile:
    """A JSON file of the `tokenizers` library."""

    def __init__(self, name: str, raw: bytes, document_text: str) -> None:
        import tokenizers

        self.name, self.raw, self.document_text = name, raw, document_text
        advice = "need a file as `tokenizers` saves it; name another"
        with translate_read_errors(name, advice, Exception):  # the library raises nothing more specific
            self._tokenizer = tokenizers.Tokenizer.from_str(raw.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocab = self._tokenizer.get_vocab()
        self.vocab_size = max(vocab.values()) + 1
        if self.vocab_size > 2**16:
            raise UsageError(f"{name}: {self.vocab_size:,} ids; need at most 65,536; choose a smaller one")
        if document_text not in vocab:
            special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
            raise UsageError(
                f"{name}: has no token {document_text!r} for documents; its special tokens are "
                f"{', '.join(special) or 'none'}; choose with --document-token"
            )
        self.document_token = vocab[document_text]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text; raise DataError for a document token in a text, if the file allows it."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        if any((of_text == self.document_token).any() for of_text in ids):
            found = f"{self.name}: a text became token {self.document_token}, the document token"
            raise DataError(f"{found}; need a special token in the file; mark it so")
        return ids

    @cached_property
    def tokens(self) -> dict[int, bytes] | None:
        """The bytes of each id, without special ones; None unless the model is byte-level."""
        from tokenizers.decoders import ByteLevel

        if isinstance(self._tokenizer.decoder, ByteLevel) and self._tokenizer.normalizer is None:
            with suppress(KeyError):  # a character without a byte
                return vocabulary.byte_level(self.raw)
        return None


Tokenizer = Bytes | Tiktoken | FromFile


def id_bytes_V(chosen: Tokenizer) -> np.ndarray | None:
    """Return the number of UTF-8 bytes of each id, int64 [V]; None if unknown."""
    if (tokens := chosen.tokens) is None:
        return None
    return np.array([len(tokens.get(index, b"")) for index in range(chosen.vocab_size)], np.int64)


def train_bpe(texts: Iterator[str], vocab_size: int, out: Path, *, document_text: str = END_OF_TEXT) -> int:
    """Train a byte-level BPE: id 0 is the document token, then come 256 bytes and merges.

    Returns:
        The number of ids; fewer than `vocab_size` if the texts have no more pairs to merge.
    """
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if out.suffix != ".json":
        raise UsageError(f"{out}: the suffix marks the kind of tokenizer; need .json; rename it")
    tokenizer = Model(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = [document_text], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    write_whole(out, tokenizer.to_str(pretty=True).encode(), b"\n")
    return tokenizer.get_vocab_size()


#: Blocks in flight for each worker: one being encoded, one waiting, one done and not yet taken.
_BLOCKS_PER_WORKER = 3


class Encoded(NamedTuple):
    """The ids of a block; a document token precedes each document."""

    first: Position  #: of the first document
    ids: np.ndarray  #: uint16 [N]
    starts: np.ndarray  #: int64 [D]: positions of the document tokens
    read_bytes: int  #: bytes of the source up to the end of this block


def encoded(
    blocks: Iterable[Block], chosen: Tokenizer, *, num_workers: int
) -> Generator[Encoded, None, None]:
    """Yield the ids of all blocks, in order; the calling thread reads them.

    Tokenizers release the GIL, so threads are as fast as processes. Few blocks are in flight, so memory does not grow
    with the corpus.
    """
    in_flight: deque[Future[Encoded]] = deque()
    pool = ThreadPoolExecutor(num_workers, "encode")
    try:
        for block in blocks:
            in_flight.append(pool.submit(_encoded, chosen, block))
            if len(in_flight) >= _BLOCKS_PER_WORKER * num_workers:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _encoded(chosen: Tokenizer, block: Block) -> Encoded:
    texts = chosen.encode(block.texts)
    counts = np.array([1 + len(ids) for ids in texts], np.int64)
    starts = np.cumsum(counts) - counts
    ids = np.empty(counts.sum(), np.uint16)
    ids[starts] = chosen.document_token
    for start, of_text in zip(starts, texts, strict=True):
        ids[start + 1 : start + 1 + len(of_text)] = of_text
    return Encoded(block.first, ids, starts, block.read_bytes)
