"""From texts to ids: GPT-2's tokenizer, any file of the `tokenizers` library, or bytes.

A tokenizer is named by a small value, `Choice`; what is loaded has the digest that was chosen. What stands in a text is
text: the characters "<|endoftext|>" on a web page become ordinary ids and never a document token.

`tokenizers` is imported by what needs it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from speedrun.data.documents import need
from speedrun.data.gpt2 import END_OF_TEXT, RANKS_SHA256, Gigatoken, Tiktoken, cached_ranks, check_ranks
from speedrun.ground.errors import DataError, UsageError, unknown
from speedrun.ground.wholefile import write_whole

ENGINES = ("auto", "tiktoken", "gigatoken")


class Choice(NamedTuple):
    """Which tokenizer."""

    name: str  #: gpt2, bytes, or the name of a file of `tokenizers`
    path: Path | None  #: its file; None for bytes
    sha256: str  #: of that file; empty for bytes
    engine: str = ""  #: tiktoken or gigatoken, for gpt2
    document_text: str = END_OF_TEXT  #: which token of the file opens documents


class Tokenizer(Protocol):
    """Texts to ids. Every id is below `vocab_size`, and none is the document token."""

    vocab_size: int
    document_token: int

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, without document token: unsigned integers, one axis."""
        ...

    def id_bytes_V(self) -> np.ndarray | None:
        """How many bytes of UTF-8 each id stands for: int64 [V]. None if that depends on the text around it."""
        ...


def choose(name: str, *, engine: str = "auto", document_text: str = END_OF_TEXT) -> Choice:
    """Finds a tokenizer's file and looks at its digest.

    Args:
        name: `gpt2`, `bytes`, a .tiktoken file with GPT-2's ranks, or a .json file of `tokenizers`.
        engine: for GPT-2, one of `ENGINES`.
        document_text: for a .json file, the token that opens documents.

    Raises:
        UsageError: if the name means nothing, or a package is missing.
        DataError: if there is no such file, or its ranks are not GPT-2's.
    """
    if name == "bytes":
        return Choice("bytes", None, "")
    if name.endswith(".json"):
        need("tokenizers")
        path = Path(name)
        return Choice(path.name, path, _sha256(_read(path)), document_text=document_text)
    if name == "gpt2" or name.endswith(".tiktoken"):
        need("tiktoken")
        path = cached_ranks() if name == "gpt2" else Path(name)
        check_ranks(path, _read(path))
        return Choice("gpt2", path, RANKS_SHA256, _engine(engine))
    raise unknown("tokenizer", name, ("gpt2", "bytes", "FILE.tiktoken", "FILE.json"))


def load(choice: Choice, *, num_threads: int = 1) -> Tokenizer:
    """The tokenizer of a choice, for so many threads at the same time.

    Raises:
        DataError: if its file has changed since, or gigatoken encodes otherwise than tiktoken.
        UsageError: if it does not fit into uint16, or has no such document token.
    """
    if choice.path is None:
        return Bytes()
    raw = _read(choice.path)
    if (got := _sha256(raw)) != choice.sha256:
        raise DataError(f"{choice.path}: sha256 is {got}; it was {choice.sha256} at the start; start again")
    if choice.name != "gpt2":
        return FromFile(choice.path, raw, choice.document_text)
    if choice.engine == "gigatoken":
        return Gigatoken(choice.path)
    return Tiktoken(choice.path, num_threads=num_threads)


def _engine(asked: str) -> str:
    if asked not in ENGINES:
        raise unknown("engine", asked, ENGINES)
    if asked == "auto":
        return "gigatoken" if find_spec("gigatoken") else "tiktoken"
    need(asked)
    return asked


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; a tokenizer's file is needed; name another with --tokenizer"
        ) from None


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


# --- bytes ------------------------------------------------------------------------------------------------


class Bytes:
    """Ids 0 to 255 are the bytes of UTF-8; 256 opens documents."""

    vocab_size = 257
    document_token = 256

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """As `Tokenizer`."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def id_bytes_V(self) -> np.ndarray:
        """As `Tokenizer`."""
        return (np.arange(self.vocab_size) < self.document_token).astype(np.int64)


# --- a file of `tokenizers` -------------------------------------------------------------------------------


class FromFile:
    """A JSON file of the `tokenizers` library. Its special tokens are not looked for in texts."""

    def __init__(self, path: Path, raw: bytes, document_text: str) -> None:
        """Loads it.

        Raises:
            DataError: if it is no such file.
            UsageError: if ids do not fit into uint16, or `document_text` is no token of it.
        """
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(raw.decode())
        except Exception as error:  # noqa: BLE001 - the library raises nothing more exact
            raise DataError(
                f"{path}: {error}; a file as `tokenizers` saves it is needed; name another"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._path = path
        vocab = self._tokenizer.get_vocab()
        self.vocab_size = max(vocab.values()) + 1
        if self.vocab_size > 2**16:
            raise UsageError(f"{path}: {self.vocab_size:,} ids; a shard holds 65,536; choose a smaller one")
        if document_text not in vocab:
            special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
            raise UsageError(
                f"{path}: has no token {document_text!r} to open documents; its special tokens are "
                f"{', '.join(special) or 'none'}; choose with --document-token"
            )
        self.document_token = vocab[document_text]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """As `Tokenizer`.

        Raises:
            DataError: if it makes a document token of a text.
        """
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        if any((of_text == self.document_token).any() for of_text in ids):
            raise DataError(
                f"{self._path}: a text became token {self.document_token}, which opens documents; it must be a "
                "special token of the file; make it one"
            )
        return ids

    def id_bytes_V(self) -> np.ndarray | None:
        """As `Tokenizer`; known where tokens are spelt in bytes, one character for each, as GPT-2 does."""
        import tokenizers

        if not isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel):
            return None
        if self._tokenizer.normalizer is not None:
            return None
        id_bytes_V = np.zeros(self.vocab_size, np.int64)
        for token, index in self._tokenizer.get_vocab(with_added_tokens=False).items():
            id_bytes_V[index] = len(token)
        for index, token in self._tokenizer.get_added_tokens_decoder().items():
            id_bytes_V[index] = 0 if token.special else len(token.content.encode())
        return id_bytes_V


# --- a tokenizer of one's own -----------------------------------------------------------------------------


def train_bpe(texts: Iterator[str], vocab_size: int, out: Path, *, document_text: str = END_OF_TEXT) -> int:
    """Trains a byte-level BPE through `tokenizers`; the same texts give the same file.

    Args:
        texts: read once.
        vocab_size: ids: the document token is 0, then come 256 bytes, then merges.
        out: where the JSON file goes.
        document_text: how the file spells its document token.

    Returns:
        The number of ids; less than `vocab_size` if the texts have no more pairs to merge.

    Raises:
        UsageError: if `vocab_size` holds no merge or does not fit into uint16, or `out` is no .json file.
        DataError: if the file cannot be written.
    """
    need("tokenizers")
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if out.suffix != ".json":
        raise UsageError(f"{out}: a tokenizer's file is recognised by its ending; need .json; rename it")
    if not 257 < vocab_size <= 2**16:
        raise UsageError(
            f"a vocabulary of {vocab_size:,}; need 258 to 65,536: bytes, a document token, merges"
        )
    tokenizer = Model(models.BPE())
    # mypy-like checkers know these as read-only; the library's own examples set them.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[document_text],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    write_whole(out, tokenizer.to_str(pretty=True).encode(), b"\n")
    return tokenizer.get_vocab_size()


def joined(texts: Sequence[np.ndarray], document_token: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents in a row, each opened by its token.

    Returns:
        ids, uint16 [N + D]; starts, int64 [D]: where the document tokens stand.
    """
    counts = np.array([1 + len(ids) for ids in texts], np.int64)
    starts = np.cumsum(counts) - counts
    ids = np.empty(counts.sum(), np.uint16)
    ids[starts] = document_token
    for start, of_text in zip(starts, texts, strict=True):
        ids[start + 1 : start + 1 + len(of_text)] = of_text
    return ids, starts
