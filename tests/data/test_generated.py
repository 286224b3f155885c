"""The synthetic stream against its entropy rate, and the corpus of Python's documentation: texts, order, shards."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from speedrun.base import track
from speedrun.base.errors import DataError, UsageError
from speedrun.data import generated, prepare, shards, synthetic, tokenizer
from speedrun.data.documents import open_source
from speedrun.data.generated import collect
from speedrun.data.overview import verify
from speedrun.data.synthetic import ONE, Source

SMOKE = track.load("smoke-cpu")
assert SMOKE.synthetic is not None
SOURCE = Source(**SMOKE.synthetic)


def rows_CVV(source: Source) -> np.ndarray:
    """Distribution of the next word, f64 [C, V, V]: by class, word, next word."""
    next_CVS, weights_S = synthetic.successors_CVS(source), synthetic.slot_weights_S(source) / ONE
    rows = np.tile(synthetic.zipf_weights_V(source) / ONE * (source.noise / ONE), (*next_CVS.shape[:2], 1))
    first, second = np.ogrid[: source.num_classes, : source.vocab_size]
    for s in range(source.num_successors):
        rows[first, second, next_CVS[:, :, s]] += weights_S[s]
    return rows


def entropy_nats(p: np.ndarray) -> np.ndarray:
    """-sum p ln p over the last axis."""
    return -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=-1)


def entropy_rate_nats(source: Source) -> float:
    """Exact conditional entropy of a token given all before it: lines are independent and equally long."""
    rows = rows_CVV(source)
    row_entropy_CV = entropy_nats(rows)
    p_V = synthetic.zipf_weights_V(source) / ONE
    words = entropy_nats(p_V)
    p_CV = np.zeros(row_entropy_CV.shape)
    p_CV[0] = p_V  # the opener before the first word has class 0
    for _ in range(source.line_words - 1):
        words += np.sum(p_CV * row_entropy_CV)
        p_VV = np.einsum("cv,cvw->vw", p_CV, rows)
        p_CV = np.stack([p_VV[c :: source.num_classes].sum(axis=0) for c in range(source.num_classes)])
    end, repeat = source.end / ONE, source.repeat / ONE
    # The first line of a document is never a repeat.
    opener = entropy_nats(np.array([end, (1 - end) * repeat, (1 - end) * (1 - repeat)]))
    return float((opener + (1 - (1 - end) * repeat) * words) / source.line_tokens)


def test_the_smoke_track_has_an_entropy_rate_of_three_nats():
    assert entropy_rate_nats(SOURCE) == pytest.approx(SMOKE.target.entropy_rate, abs=1e-8)


def test_correct_shards_are_not_written_again(tmp_path):
    """They are those of the track, and another program may be reading them."""
    manifest = synthetic.write(SMOKE, tmp_path)
    assert {name: entry.sha256 for name, entry in manifest.shards.items()} == SMOKE.data.sha256
    assert len(verify(tmp_path, SMOKE.data, full=True)) == 1 + SOURCE.num_shards
    before = {path.name: path.stat().st_ino for path in tmp_path.glob("*.bin")}
    wrong = min(tmp_path.glob("*.bin"))
    wrong.write_bytes(wrong.read_bytes()[:-2] + b"\0\0")
    synthetic.write(SMOKE, tmp_path)
    after = {path.name: path.stat().st_ino for path in tmp_path.glob("*.bin")}
    assert [name for name in before if before[name] != after[name]] == [wrong.name]
    data = msgspec.structs.replace(SMOKE.data, sha256=dict.fromkeys(SMOKE.data.sha256, "0" * 64))
    with pytest.raises(DataError, match="makes other bytes"):
        synthetic.write(msgspec.structs.replace(SMOKE, data=data), tmp_path)


LONG = "A sentence that is long enough to be worth reading, and so it is taken, as it stands here."

MODULE = f'''"""{LONG} It opens the module."""
raise SystemExit("this file is read and never run")

class Thing:
    """{LONG} It describes a class."""

    def act(self):
        r"""{LONG} It holds \\d, of a method."""

    def quiet(self):
        """Too short."""

async def last():
    """{LONG} It ends the module."""
'''


@pytest.fixture
def roots(tmp_path) -> dict[str, Path]:
    files = {
        "lib/module.py": MODULE,
        "lib/again.py": f'"""{LONG} It opens the module."""\ndef f():\n    """{LONG} It is new."""\n',
        "lib/broken.py": "def (",
        "lib/binary.py": "\0",
        "lib/tests/left_out.py": f'"""{LONG}"""',
        "lib/site-packages/left_out.py": f'"""{LONG}"""',
        "python/pydoc_data/topics.py": "topics = {'b': 'Text of b.\\n', 'a': 'Text of a.'}",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return {"lib": tmp_path / "lib", "python": tmp_path / "python"}


def test_docstrings_keep_their_order_and_no_code_runs(roots):
    """The order of documents is deterministic, and mixes folders."""
    documents, again = collect(roots), collect(dict(reversed(roots.items())))
    assert list(documents.items()) == list(again.items()) != sorted(documents.items())
    topics = {f"python/pydoc_data/topics.py:{topic}" for topic in "ab"}
    assert set(documents) == {"lib/module.py", "lib/again.py", *topics}
    assert documents["python/pydoc_data/topics.py:b"] == "Text of b."
    sentences = ("opens the module.", "describes a class.", "holds \\d, of a method.", "ends the module.")
    found = [documents["lib/module.py"].find(f"It {sentence}") for sentence in sentences]
    # Only the first of two documents has a shared docstring.
    assert found[1:] == sorted(found[1:])
    assert -1 not in found[1:]
    assert "Too short" not in documents["lib/module.py"]
    openings = [text for text in documents.values() if "It opens the module." in text]
    assert len(openings) == 1


def small() -> track.Track:
    """A track with a vocabulary small enough for a few files."""
    rules = track.load("docs-cpu")
    wanted = {"vocab_size": 400, "shard_tokens": 3_000}
    data = msgspec.structs.replace(rules.data, vocab_size=400, val_tokens=1_000, held_tokens=1_000)
    return msgspec.structs.replace(rules, data=data, python_docs=wanted)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The folder of the small track; its documentation is that of the package `email`."""
    import email

    root = Path(email.__file__).parent
    monkeypatch.setattr(generated, "installed", lambda: {"email": root})
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path))
    return tmp_path / "docs"


def test_an_empty_variable_names_no_folder(monkeypatch):
    monkeypatch.setenv("SPEEDRUN_DATA", "")
    assert shards.data_folder(small(), None).parts[0] == "data"


def test_the_shards_verify_under_the_track(folder):
    rules, said = small(), []
    generated.ensure(rules, None, said.append)
    assert len(verify(folder, rules.data, full=True)) > 3
    manifest = shards.read_manifest(folder)
    assert manifest is not None
    assert (manifest.scored_tokens, manifest.vocab_size, manifest.document_token) == (1_000, 400, 0)
    # The bytes of the scored tokens, decoded by the tokenizer's library.
    import tokenizers

    ids = np.fromfile(folder / "docs_val_000000.bin", "<u2", offset=1024)[1:1_001]
    text = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids.tolist())
    assert manifest.scored_bytes == len(text.encode())
    generated.ensure(rules, None, said.append)
    assert len(said) == 1, "it is complete"
    other = folder.with_name("other")
    for _ in range(2):  # the second replaces its own shards
        generated.make(rules, other)
        made, again = ({path.name: path.read_bytes() for path in one.iterdir()} for one in (folder, other))
        assert made == again


def test_other_shards_are_not_replaced(folder):
    rows = folder.with_name("corpus.jsonl")
    rows.write_text('{"text": "abc"}\n' * 9)
    prepare.prepare(open_source([str(rows)]), tokenizer.load("bytes"), prepare.Cut("docs", 10), folder)
    for left in (shards.MANIFEST, "docs_val_000000.bin"):
        before = {path: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(UsageError, match="holds other shards; docs-cpu@2 would replace them"):
            generated.make(small(), folder)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
        (folder / left).unlink()


def test_too_little_documentation(tmp_path, monkeypatch, roots):
    monkeypatch.setattr(generated, "installed", lambda: roots)
    with pytest.raises(DataError, match="docs-cpu@2 needs 400; this Python has too little"):
        generated.make(small(), tmp_path / "out")
