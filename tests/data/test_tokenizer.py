"""Tokenizers against their own libraries and against bytes; unusual documents; files that change; bytes of ids."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typed import invoke

from speedrun.base import track as tracks
from speedrun.base.errors import DataError, UsageError
from speedrun.data import fetch, shards, tokenizer, vocabulary
from speedrun.data.tokenizer import END_OF_TEXT
from speedrun.recipes.record89.tokens import prefixes

ROOT = Path(__file__).parents[2]
RANKS = ROOT.parent / "shared" / "data" / "gpt2-bpe" / "r50k_base.tiktoken"
needs_ranks = pytest.mark.skipif(not RANKS.exists(), reason="needs ../shared/data: GPT-2's ranks")

TEXTS = ["The cat sat on the mat. ", "don't ", "naïve café ", "a a a a\n\n", "1234 5678 ", "猫 "] * 20
TEXTS += [
    "Pack my box with five dozen liquor jugs, while the quick brown fox jumps over lazy dogs again. "
] * 9
#: White space, letters and punctuation, so that all kinds of words occur.
ANY_TEXT = st.text(st.characters(codec="utf-8") | st.sampled_from(" \n\t'sredlm1a.\u00a0é"), max_size=40)


@pytest.fixture(scope="module")
def reference():
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = load_tiktoken_bpe(str(RANKS))
    special = {END_OF_TEXT: 50256}
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)


@pytest.fixture(scope="module")
def ours() -> tokenizer.Tokenizer:
    return tokenizer.load(str(RANKS))


@needs_ranks
@settings(max_examples=200)
@given(texts=st.lists(ANY_TEXT, max_size=5))
def test_gpt2_is_tiktokens_encode_ordinary(ours, reference, texts):
    assert [ids.tolist() for ids in ours.encode(texts)] == [reference.encode_ordinary(t) for t in texts]


@needs_ranks
@pytest.mark.parametrize(
    "text",
    [
        *("", END_OF_TEXT, f"a{END_OF_TEXT}{END_OF_TEXT} b", "<|endoftext"),
        *("\0", "\ufffd\ufffd", " ", "\n" * 3),
        # Longer ones are split.
        "a" * 100_000,
        " " * 90_000,
        "word " * 40_000,
        "x" + "\n" * 80_000 + "y",
        "ab, cd.\n\n  " * 20_000 + " " * 3_000,
        "é" * 50_000 + "\u3000" * 2_000 + "1",
    ],
    ids=lambda text: repr(text[:9]),
)
def test_unusual_documents(ours, reference, text):
    (ids,) = ours.encode([text])
    assert ids.tolist() == reference.encode_ordinary(text)
    assert 50256 not in ids


@needs_ranks
def test_a_document_on_which_tiktoken_fails(ours, reference):
    """Its matcher overflows on a million blanks before a word."""
    text = "a" + " " * 1_000_000 + "b"
    with pytest.raises(ValueError, match="Max stack size"):
        reference.encode_to_numpy(text, disallowed_special=())
    ids = ours.encode([text])[0].tolist()
    assert reference.decode(ids) == text
    assert ids == [*reference.encode_ordinary("a" + " " * 999_999), *reference.encode_ordinary(" b")]


@needs_ranks
def test_ranks_are_read_from_tiktokens_cache_and_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    path = tmp_path / "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"  # tiktoken's name
    path.write_bytes(RANKS.read_bytes())
    assert tokenizer.load("gpt2").raw == RANKS.read_bytes()
    monkeypatch.setattr(tokenizer, "RANKS_URL", "http://127.0.0.1:9/r50k_base.tiktoken")
    with pytest.raises(DataError, match=r"need http.*; copy that file next to the shards"):
        tokenizer.load("gpt2")


def test_unknown_names_and_files(tmp_path):
    with pytest.raises(UsageError, match=r"need \.json; rename it"):
        tokenizer.train_bpe(iter(TEXTS), 300, tmp_path / "mine")
    with pytest.raises(UsageError, match="unknown tokenizer 'gtp2'; did you mean 'gpt2'"):
        tokenizer.load("gtp2")
    with pytest.raises(DataError, match="No such file"):
        tokenizer.load(str(tmp_path / "x.json"))
    for content in (b"{}", b'{"model": "\xff"}'):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(DataError, match="as `tokenizers` saves it"):
            tokenizer.load(str(tmp_path / "x.json"))


def test_a_document_token_in_a_text_is_text_or_refused(tmp_path):
    trained = tmp_path / "mine.json"
    assert tokenizer.train_bpe(iter(TEXTS), 300, trained) == 300
    loaded = tokenizer.load(str(trained))
    (ids,) = loaded.encode([f"a{END_OF_TEXT}b"])
    assert loaded.document_token == 0
    assert 0 not in ids
    model = json.loads(trained.read_text())
    model["added_tokens"][0]["special"] = False
    (tmp_path / "plain.json").write_text(json.dumps(model))
    loaded = tokenizer.load(str(tmp_path / "plain.json"))
    with pytest.raises(DataError, match="a text became token 0"):
        loaded.encode([END_OF_TEXT])
    with pytest.raises(UsageError, match="has no token '<s>'"):
        tokenizer.load(str(trained), document_text="<s>")


MAIN, DOCS = tracks.load("main-8xh100"), tracks.load("docs-cpu")


@needs_ranks
def test_the_bytes_of_gpt2_are_tiktokens(reference, tmp_path):
    (tmp_path / "r50k_base.tiktoken").write_bytes(RANKS.read_bytes())
    assert vocabulary.load(MAIN, tmp_path) == (*map(reference.decode_single_token_bytes, range(50256)), b"")


def test_the_bytes_of_a_bpe_are_those_of_its_texts(tmp_path):
    """Every byte of UTF-8 is in the texts, so no character of the spelling is left out."""
    texts = [*map(chr, range(0xD800)), *map(chr, range(0x10000, 0x110000, 4001)), "naïve 你好 a b\n\t  c" * 9]
    size = tokenizer.train_bpe(iter(texts), 400, tmp_path / "tokenizer.json")
    bpe = tokenizer.load(str(tmp_path / "tokenizer.json"))
    known = vocabulary.byte_level((tmp_path / "tokenizer.json").read_bytes())
    assert sorted(known) == [*range(1, size)]
    assert bpe.document_token == 0
    for text, ids in zip(texts, bpe.encode(texts), strict=True):
        assert b"".join(known[i] for i in ids.tolist()) == text.encode()
    found = vocabulary.load(DOCS, tmp_path)
    assert (len(found), found[0], found[1], found[size:]) == (4096, b"", known[1], (b"",) * (4096 - size))


def test_a_track_says_what_its_ids_stand_for_or_there_is_no_vocabulary(tmp_path):
    for name in tracks.files():
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
def test_a_missing_or_foreign_file_is_told_in_one_line(tmp_path, track, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name) as info:
        vocabulary.load(track, tmp_path)
    assert "\n" not in str(info.value)


@needs_ranks
def test_the_ranks_come_with_the_shards_if_asked_for(tmp_path, monkeypatch):
    made = shards.Manifest("kjj0/fineweb10B-gpt2", {"revision": "a"}, 50257, 50256, {})
    monkeypatch.setattr(fetch, "fetch", lambda folder, *_: folder.mkdir() or made)
    monkeypatch.setattr(tokenizer, "cached_ranks", RANKS.read_bytes)
    done = invoke("data", "get", "--track", "main-8xh100", "--out", tmp_path / "fineweb", "--vocabulary")
    assert done.exit_code == 0, done.output
    assert len(vocabulary.load(MAIN, tmp_path / "fineweb")) == 50257


@given(st.lists(st.binary(max_size=4).map(lambda raw: bytes(b % 3 for b in raw)), unique=True, max_size=60))
def test_a_prefix_is_the_longest(tokens):
    found = prefixes(tuple(tokens))
    assert (found.dtype, found.shape) == (np.int32, (len(tokens),))
    for token, prefix in zip(tokens, found.tolist(), strict=True):
        proper = [i for i, other in enumerate(tokens) if other and other != token and token.startswith(other)]
        assert prefix == max(proper, key=lambda i: len(tokens[i]), default=-1)
