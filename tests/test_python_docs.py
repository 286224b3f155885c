"""The corpus of Python's documentation: its texts, their order, and the shards."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from speedrun.data import generated, inventory, prep, python_docs, tokenizer
from speedrun.data.overview import verify
from speedrun.data.python_docs import collect
from speedrun.data.sources import open_source
from speedrun.ground import track
from speedrun.ground.errors import DataError, UsageError

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
def roots(tmp_path: Path) -> dict[str, Path]:
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


def test_docstrings_keep_their_order_and_no_code_runs(roots: dict[str, Path]):
    documents = collect(roots)
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


def test_the_order_is_deterministic_and_mixes_folders(roots: dict[str, Path]):
    once, again = list(collect(roots).items()), list(collect(dict(reversed(roots.items()))).items())
    assert once == again != sorted(once)


def small() -> track.Track:
    """A track with a vocabulary small enough for a few files."""
    rules = track.load("docs-cpu")
    wanted = {"vocab_size": 400, "shard_tokens": 3_000}
    data = msgspec.structs.replace(rules.data, vocab_size=400, val_tokens=1_000)
    return msgspec.structs.replace(rules, data=data, python_docs=wanted)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the small track; its documentation is that of the package `email`."""
    import email

    root = Path(email.__file__).parent
    monkeypatch.setattr(python_docs, "installed", lambda: {"email": root})
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path))
    return tmp_path / "docs"


def test_the_shards_verify_under_the_track(folder: Path):
    rules, said = small(), []
    generated.ensure(rules, None, said.append)
    assert len(verify(folder, rules.data, full=True)) > 3
    manifest = inventory.read_manifest(folder)
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
        python_docs.make(rules, other)
        made, again = ({path.name: path.read_bytes() for path in one.iterdir()} for one in (folder, other))
        assert made == again


def test_other_shards_are_not_replaced(folder: Path):
    rows = folder.with_name("corpus.jsonl")
    rows.write_text('{"text": "abc"}\n' * 9)
    prep.prepare(open_source([str(rows)]), tokenizer.load("bytes"), prep.Cut("docs", 10), folder)
    for left in (inventory.MANIFEST, "docs_val_000000.bin"):
        before = {path: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(UsageError, match="holds other shards; docs-cpu@1 would replace them"):
            python_docs.make(small(), folder)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
        (folder / left).unlink()


def test_too_little_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roots: dict[str, Path]):
    monkeypatch.setattr(python_docs, "installed", lambda: roots)
    with pytest.raises(DataError, match="docs-cpu@1 needs 400; this Python has too little"):
        python_docs.make(small(), tmp_path / "out")
