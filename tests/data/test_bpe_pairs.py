"""Pairs of ids that no tokenizer emits: the published table, and text that a tokenizer has written."""

import json
from pathlib import Path

import golden_files
import numpy as np
import pytest

from speedrun.base.bpe_pairs import Pairs, impossible_pairs
from speedrun.data import tokenizer, vocabulary

SHARED = Path(__file__).parents[3] / "shared"
needs_shared = pytest.mark.skipif(
    not SHARED.exists(), reason="the reference files are not part of the project"
)


@pytest.fixture(scope="module")
def published() -> dict[str, np.ndarray]:
    found = golden_files.arrays("record92_a.npz")
    return {name.removeprefix("unit/mask/"): x for name, x in found.items() if "unit/mask/" in name}


def table(pairs: Pairs) -> np.ndarray:
    """Return bool [id, next]."""
    bits = np.unpackbits(pairs.bits, axis=1, bitorder="little").astype(bool)
    return bits[pairs.row_of][:, pairs.column_of]


def test_a_toy_vocabulary_has_the_published_pairs(published):
    tokens = [text.encode("latin-1") for text in json.loads(str(published["bytes"]))]
    want = np.unpackbits(published["packed"], axis=1, bitorder="little").astype(bool)
    found, want = table(impossible_pairs(tokens)), want[: len(tokens), : len(tokens)]
    # The published rule holds where 's, 're, 've, 'll and 'd are tokens, as GPT-2's are. Here they come in pieces.
    loose = np.isin(tokens, [b"s", b"e", b"re", b"ve", b"l", b"ll", b"d"])
    np.testing.assert_array_equal(found[~loose], want[~loose])
    assert want[loose].any()
    assert not found[loose].any()


@needs_shared
@pytest.mark.compile
def test_gpt2_has_as_many_as_the_published_table_within_the_limit_of_constants(published):
    found = vocabulary.ranks((SHARED / "data" / "gpt2-bpe" / vocabulary.RANKS).read_bytes())
    pairs = impossible_pairs([found.get(i, b"") for i in range(50_257)])
    columns = np.bincount(pairs.column_of, minlength=8 * pairs.bits.shape[1])
    each = [np.unpackbits(row, bitorder="little") @ columns for row in pairs.bits]
    assert np.bincount(pairs.row_of) @ each == published["gpt2_set_bits"]
    assert pairs.bits.nbytes < 18.6e6


def test_what_a_tokenizer_writes_has_none(tmp_path):
    """Texts of this repository, in words and in pairs of tokens."""
    root, path = Path(__file__).parents[2], tmp_path / "tokenizer.json"
    # Endings that are no tokens with their apostrophes, at the start of a line, where they are contractions.
    rare = "he'll've we'd they're i'm don't it's\n'mech\n'rest\n'vest\n'llow\n'the\n'dex\n"
    texts = [
        (root / "docs" / "LOG.md").read_text(),
        (root / "speedrun" / "base" / "bpe_pairs.py").read_text(),
        rare,
    ]
    tokenizer.train_bpe(iter(texts), 1000, path)
    bpe, known = tokenizer.load(str(path)), vocabulary.byte_level(path.read_bytes())
    found = table(impossible_pairs([known.get(i, b"") for i in range(1000)]))
    for ids in bpe.encode([*texts, (root / "README.md").read_text()]):
        assert not found[ids[:-1], ids[1:]].any()
    pairs = np.argwhere(found)
    assert len(pairs) > 10_000
    for i, j in np.random.default_rng(0).choice(pairs, 500):
        (ids,) = bpe.encode([(known[i] + known[j]).decode(errors="ignore")])
        assert ids.tolist() != [i, j]
