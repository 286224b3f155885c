"""GPT-2's tokenizer, encoded by tiktoken, which is imported where it is used."""

import re
import threading
from collections.abc import Iterator
from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from speedrun.data import vocabulary
from speedrun.data.documents import need
from speedrun.ground.errors import DataError

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE, DOCUMENT_TOKEN = 50257, 50256

#: GPT-2's ranks in one file. Source: tiktoken, `tiktoken_ext/openai_public.py`.
RANKS_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
#: GPT-2's words, which are encoded independently of each other. Source: the same.
_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def cached_ranks() -> bytes:
    """Return GPT-2's ranks from tiktoken's cache; download them if they are missing there, or damaged.

    Raises:
        UsageError: if tiktoken is not installed.
        DataError: if they cannot be downloaded.
    """
    need("tiktoken")
    from tiktoken.load import read_file_cached

    try:
        return read_file_cached(RANKS_URL, vocabulary.RANKS_SHA256)
    except (OSError, ValueError) as error:  # also those of the network
        raise DataError(
            f"GPT-2's ranks are not in $TIKTOKEN_CACHE_DIR and cannot be downloaded ({type(error).__name__}); "
            f"need {RANKS_URL}; copy that file and pass --tokenizer PATH/r50k_base.tiktoken"
        ) from None


class Tiktoken:
    """GPT-2's tokenizer."""

    name = "gpt2"
    vocab_size, document_token = VOCAB_SIZE, DOCUMENT_TOKEN

    def __init__(self, raw: bytes) -> None:
        """Load the ranks from the content of their file; raise ValueError if they are not GPT-2's."""
        import tiktoken

        self.raw = raw
        self._ranks = {token: index for index, token in vocabulary.ranks(raw).items()}
        self.encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=_WORDS,
            mergeable_ranks=self._ranks,
            special_tokens={END_OF_TEXT: self.document_token},
            explicit_n_vocab=self.vocab_size,
        )
        #: Each thread has a copy: two that shared one were sometimes slower than one thread.
        self._own = threading.local()

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """As `Tokenizer`; the ids of `encode_ordinary`, without a Python integer per token."""
        if not hasattr(self._own, "encoding"):
            self._own.encoding = copy(self.encoding)  # 25 ms
        return [_ids(self._own.encoding, text) for text in texts]

    def id_bytes_V(self) -> np.ndarray:
        """As `Tokenizer`."""
        id_bytes_V = np.zeros(self.vocab_size, np.int64)
        id_bytes_V[list(self._ranks.values())] = [len(token) for token in self._ranks]
        return id_bytes_V


def _ids(encoding: "tiktoken.Encoding", text: str) -> np.ndarray:
    return np.concatenate([encoding.encode_to_numpy(part, disallowed_special=()) for part in parts(text)])


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
