"""The bytes of each id of a track, from the tokenizer's file next to the shards."""

import base64
import hashlib
import json
from pathlib import Path

from speedrun.base.errors import translate_read_errors
from speedrun.base.track import Track

RANKS, TOKENIZER = "r50k_base.tiktoken", "tokenizer.json"
#: Source: tiktoken, `tiktoken_ext/openai_public.py`.
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"

#: Byte-level models spell printable bytes as themselves, others as 256, 257, ... Source: GPT-2, `encoder.py`.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted({*range(256)} - {*_PRINTABLE})
_BYTES = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


def load(track: Track, folder: Path) -> tuple[bytes, ...]:
    """Return the bytes of each id, b"" for special tokens; () if the track has no tokenizer."""
    if track.data.hub is None and track.python_docs is None:
        return ()
    read, name, get = (ranks, RANKS, " --vocabulary") if track.data.hub else (byte_level, TOKENIZER, "")
    advice = f"the recipe needs the bytes of each id; get them: {track.data.get}{get}"
    with translate_read_errors(folder / name, advice, LookupError, TypeError, AttributeError):
        tokens = read((folder / name).read_bytes())
    return tuple(tokens.get(index, b"") for index in range(track.data.vocab_size))


def ranks(raw: bytes) -> dict[int, bytes]:
    """Return the bytes of GPT-2's ids; raise ValueError if the digest of the file differs."""
    if (got := hashlib.sha256(raw).hexdigest()) != RANKS_SHA256:
        raise ValueError(f"sha256 is {got}; GPT-2's ranks have {RANKS_SHA256}")
    return {int(index): base64.b64decode(token) for token, index in map(bytes.split, raw.splitlines())}


def byte_level(raw: bytes) -> dict[int, bytes]:
    """Return the bytes of the ids of a byte-level file of `tokenizers`, without special ones."""
    found = json.loads(raw)
    added = {token["id"]: token for token in found["added_tokens"]}
    vocab = found["model"]["vocab"].items()
    spelled = {index: bytes(map(_BYTES.__getitem__, token)) for token, index in vocab if index not in added}
    return spelled | {i: token["content"].encode() for i, token in added.items() if not token["special"]}
