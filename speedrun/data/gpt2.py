"""GPT-2's tokenizer, with two engines that give the same ids.

tiktoken is the reference. gigatoken is about ten times as fast; when it is loaded, its ids of difficult texts are
compared with tiktoken's. Both are imported where they are used.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from copy import copy
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from speedrun.data.vocabulary import RANKS_SHA256
from speedrun.ground.errors import DataError, translate_os_errors
from speedrun.ground.wholefile import write_whole

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE, DOCUMENT_TOKEN = 50257, 50256

#: GPT-2's ranks in one file. Source: tiktoken, `tiktoken_ext/openai_public.py`.
RANKS_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
#: GPT-2's words, which are encoded independently of each other. Source: the same.
_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_TIMEOUT_S = 10


def check_ranks(path: Path, raw: bytes) -> None:
    """Check the digest of GPT-2's ranks.

    Raises:
        DataError: if it differs.
    """
    if (got := hashlib.sha256(raw).hexdigest()) != RANKS_SHA256:
        raise DataError(
            f"{path}: sha256 is {got}; GPT-2's ranks have {RANKS_SHA256}; delete the file, or name another "
            "with --tokenizer PATH.tiktoken"
        )


def cached_ranks() -> Path:
    """Return the path of GPT-2's ranks in tiktoken's cache; download them if they are missing.

    Raises:
        DataError: if they cannot be downloaded, or have another digest.
    """
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    path = Path(folder or Path(tempfile.gettempdir()) / "data-gym-cache")
    # tiktoken's name; the digest protects nothing.
    path = path / hashlib.sha1(RANKS_URL.encode(), usedforsecurity=False).hexdigest()
    if not path.exists():
        raw = _download(RANKS_URL)
        check_ranks(path, raw)
        with translate_os_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, raw)
    return path


def _download(url: str) -> bytes:
    import requests

    try:
        response = requests.get(url, timeout=_TIMEOUT_S)
        response.raise_for_status()
    except requests.RequestException as error:
        raise DataError(
            f"GPT-2's ranks are not in $TIKTOKEN_CACHE_DIR and cannot be downloaded ({type(error).__name__}); "
            f"need {url}; copy that file and pass --tokenizer PATH/r50k_base.tiktoken"
        ) from None
    return response.content


class Tiktoken:
    """The reference engine."""

    vocab_size = VOCAB_SIZE
    document_token = DOCUMENT_TOKEN

    def __init__(self, path: Path, *, num_threads: int = 1) -> None:
        """Load the ranks; `choose` has checked their digest.

        Args:
            path: of the ranks.
            num_threads: each gets its own copy of the encoding: two threads that shared one were sometimes slower
                than one thread.
        """
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe

        self._ranks = load_tiktoken_bpe(str(path))
        self.encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=_WORDS,
            mergeable_ranks=self._ranks,
            special_tokens={END_OF_TEXT: self.document_token},
            explicit_n_vocab=self.vocab_size,
        )
        self._idle: SimpleQueue[tiktoken.Encoding] = SimpleQueue()
        for _ in range(num_threads):
            self._idle.put(copy(self.encoding))  # 25 ms

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """As `Tokenizer`; the ids of `encode_ordinary`, without a Python integer per token."""
        encoding = self._idle.get()
        try:
            return [_ids(encoding, text) for text in texts]
        finally:
            self._idle.put(encoding)

    def id_bytes_V(self) -> np.ndarray:
        """As `Tokenizer`."""
        id_bytes_V = np.zeros(self.vocab_size, np.int64)
        id_bytes_V[list(self._ranks.values())] = [len(token) for token in self._ranks]
        return id_bytes_V


def _ids(encoding: "tiktoken.Encoding", text: str) -> np.ndarray:
    return np.concatenate([encoding.encode_to_numpy(part, disallowed_special=()) for part in parts(text)])


class Gigatoken(Tiktoken):
    """The fast engine."""

    def __init__(self, path: Path) -> None:
        """Load both engines and compare them.

        Raises:
            DataError: if they differ.
        """
        from importlib.metadata import version

        import gigatoken

        super().__init__(path)
        # With special tokens, it would encode "<|endoftext|>" in a text as one.
        self._fast = gigatoken.Tokenizer.from_tiktoken(path, "gpt2", {})
        texts = list(difficult_texts())
        ours, reference = self.encode(texts), super().encode(texts)
        for text, got, want in zip(texts, ours, reference, strict=True):
            if not np.array_equal(got, want):
                raise DataError(
                    f"gigatoken {version('gigatoken')} makes {got[:8]} of {text[:40]!r}, tiktoken {want[:8]}; "
                    "they must agree; pass --engine tiktoken, and report it"
                )

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """As `Tokenizer`."""
        import awkward

        if not texts:
            return []
        batch = self._fast.encode_batch(texts)
        counts = awkward.num(batch).to_numpy()
        return np.split(awkward.flatten(batch).to_numpy(), np.cumsum(counts)[:-1])


#: Longer documents are split: tiktoken's matcher fails on much longer white space before a word.
_LONG_CHARACTERS = 2**16
_WHITE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
#: Starts of words: white space after printable ASCII, and the last character of long white space.
_BORDERS = re.compile(rf"(?<=[!-~])(?=[{_WHITE}])|(?=[{_WHITE}][^{_WHITE}])(?<=[{_WHITE}]{{1000}})")


def parts(text: str) -> Iterator[str]:
    """Split a long document at starts of words; the parts encode to the ids of the whole.

    This bounds memory, and lets tiktoken encode a million blanks before a word. A word is never split.
    """
    start = 0
    if len(text) > _LONG_CHARACTERS:
        for border in _BORDERS.finditer(text):
            far = border.start() - start >= _LONG_CHARACTERS
            if far or text[border.start() - 1].isspace():
                yield text[start : border.start()]
                start = border.start()
    yield text[start:]


def difficult_texts() -> Iterator[str]:
    """Yield texts on which tokenizers may differ: white space, contractions, scripts, numbers, control characters."""
    pieces = (
        "", " ", "  ", "\n", "\r\n", "\t \n  ", "\u00a0", "\u2003x", "\u3000 a", "\x1c\x85", "\ufeff", "\u200b", "\0",
        "don't", "DON'T", "it's 'tis 'll've", "\u2019s", "''s", " 's", "a's1's", "x'", "'re're",
        "1", "12345678901", "3.14", " 42", "½²Ⅷ", "٣४", "a1b2", "1a 2b",
        "naïve café", "e\u0301", "ſß", "ǅ", "ёж", "你好,世界", "日本語 テキスト", "한국어", "שלום", "नमस्ते", "ไทย",
        "👩‍👩‍👧‍👦", "🇩🇪🏳️‍🌈", "\U0001d4d0", "\ufffd", "\U0010ffff", "\ue000",
        "!!!", " ...", "--->", "$$ a_b", "<|endoftext|>", "a <|endoftext|> b", "<|endoftext|", "endoftext|>",
        "http://a.b/c?d=e&f", "def f(x):\n\treturn x\n\n", "    four", "a\n\n\nb", "a \n b", "end ", "end\n ",
    )  # fmt: skip
    yield from pieces
    yield from (f"{left}{right}" for left in pieces for right in pieces)
    yield from (
        "a" * 5_000,
        "ab" * 3_000,
        " " * 5_000 + "x",
        "\n " * 3_000,
        "." * 5_000,
        "1" * 999,
        "é" * 2_000,
    )
    yield " ".join(chain.from_iterable((pieces, reversed(pieces))))
