"""The bytes of each id of a track's data, and the prefixes among them."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from speedrun.cli import command
from speedrun.data import fetch, inventory, tokenizer, vocabulary
from speedrun.ground import track as tracks
from speedrun.ground.errors import DataError
from speedrun.science.models.record89_tokens import prefixes

ROOT = Path(__file__).parent.parent
RANKS = ROOT.parent / "shared" / "data" / "gpt2-bpe" / "r50k_base.tiktoken"
GOLDEN = Path(os.environ.get("SPEEDRUN_GOLDEN", ROOT / "tests" / "golden")) / "units2026.npz"
needs_ranks = pytest.mark.skipif(not RANKS.exists(), reason="needs ../shared/data: GPT-2's ranks")

MAIN, DOCS = tracks.load("main-8xh100"), tracks.load("docs-cpu")


@pytest.fixture(scope="module")
def of_gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, ...]:
    folder = tmp_path_factory.mktemp("fineweb")
    (folder / "r50k_base.tiktoken").write_bytes(RANKS.read_bytes())
    return vocabulary.load(MAIN, folder)


@needs_ranks
def test_the_bytes_of_gpt2_are_tiktokens(of_gpt2: tuple[bytes, ...]):
    reference = tokenizer.load(str(RANKS))
    assert isinstance(reference, tokenizer.Tiktoken)
    encoding: tiktoken.Encoding = reference.encoding
    assert of_gpt2 == (*map(encoding.decode_single_token_bytes, range(50256)), b"")


def test_the_bytes_of_a_bpe_are_those_of_its_texts(tmp_path: Path):
    """Every byte of UTF-8 is in the texts, so no character of the spelling is left out."""
    texts = [chr(i) for i in [*range(0xD800), *range(0x10000, 0x110000, 4001)]] + [
        "naïve 你好 a b\n\t  c" * 9
    ]
    size = tokenizer.train_bpe(iter(texts), 400, tmp_path / "tokenizer.json")
    bpe = tokenizer.load(str(tmp_path / "tokenizer.json"))
    known = vocabulary.byte_level((tmp_path / "tokenizer.json").read_bytes())
    assert sorted(known) == [*range(1, size)]
    assert bpe.document_token == 0
    for text, ids in zip(texts, bpe.encode(texts), strict=True):
        assert b"".join(known[i] for i in ids.tolist()) == text.encode()
    found = vocabulary.load(DOCS, tmp_path)
    assert (len(found), found[0], found[1], found[size:]) == (4096, b"", known[1], (b"",) * (4096 - size))


def test_a_track_says_what_its_ids_stand_for_or_there_is_no_vocabulary(tmp_path: Path):
    for name in tracks.names():
        track = tracks.load(name)
        if track.data.hub is not None:
            ids = track.data.vocab_size, track.data.document_token
            assert ids == (tokenizer.Tiktoken.vocab_size, tokenizer.Tiktoken.document_token)
        elif track.python_docs is None:
            assert vocabulary.load(track, tmp_path) == ()


@pytest.mark.parametrize(
    ("track", "name", "content"),
    [
        (MAIN, "r50k_base.tiktoken", None),
        (MAIN, "r50k_base.tiktoken", b"IQ== 0\n"),  # another digest
        (DOCS, "tokenizer.json", None),
        (DOCS, "tokenizer.json", b"{"),
        (DOCS, "tokenizer.json", b"{}"),
        (DOCS, "tokenizer.json", b'{"added_tokens": [], "model": {"vocab": []}}'),
        (DOCS, "tokenizer.json", b'{"added_tokens": [], "model": {"vocab": {"\\n": 3}}}'),
    ],
)
def test_a_missing_or_foreign_file_is_told_in_one_line(
    tmp_path: Path, track: tracks.Track, name: str, content: bytes | None
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name) as info:
        vocabulary.load(track, tmp_path)
    assert "\n" not in str(info.value)


@needs_ranks
def test_the_ranks_come_with_the_shards_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = inventory.Manifest("kjj0/fineweb10B-gpt2", {"revision": "a"}, 50257, 50256, {})
    monkeypatch.setattr(fetch, "fetch", lambda folder, *_: folder.mkdir() or made)
    monkeypatch.setattr(tokenizer, "cached_ranks", RANKS.read_bytes)
    words = ["data", "get", "--track", "main-8xh100", "--out", str(tmp_path / "fineweb"), "--vocabulary"]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    assert len(vocabulary.load(MAIN, tmp_path / "fineweb")) == 50257


# --- prefixes


@given(st.lists(st.binary(max_size=4).map(lambda raw: bytes(b % 3 for b in raw)), unique=True, max_size=60))
def test_a_prefix_is_the_longest(tokens: list[bytes]):
    found = prefixes(tuple(tokens))
    assert (found.dtype, found.shape) == (np.int32, (len(tokens),))
    for token, prefix in zip(tokens, found.tolist(), strict=True):
        proper = [i for i, other in enumerate(tokens) if other and other != token and token.startswith(other)]
        assert prefix == max(proper, key=lambda i: len(tokens[i]), default=-1)


@needs_ranks
@pytest.mark.skipif(not GOLDEN.exists(), reason=f"no {GOLDEN}; SPEEDRUN_GOLDEN names its folder")
def test_golden_89_prefixes_of_gpt2(of_gpt2: tuple[bytes, ...]):
    found = prefixes(of_gpt2 + (b"",) * (50304 - len(of_gpt2)))
    with np.load(GOLDEN) as golden:
        np.testing.assert_array_equal(found[golden["prefix/probe_ids"]], golden["prefix/probe"])
        assert hashlib.sha256(found.astype("<i4").tobytes()).hexdigest() == golden["prefix/sha256_int32le"]
    assert (found[:50257] == -1).sum() == 257
