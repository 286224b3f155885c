"""The corpus of Python's documentation: its texts, their order, and the shards."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from speedrun.data import inventory, prep, python_docs, tokenizer, writing
from speedrun.data.python_docs import Document, collect
from speedrun.data.sources import open_source
from speedrun.data.verify import verify
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
    documents = {document.name: document.text for document in collect(roots)}
    assert set(documents) == {
        "lib/module.py",
        "lib/again.py",
        "python/pydoc_data/topics.py:a",
        "python/pydoc_data/topics.py:b",
    }
    assert documents["python/pydoc_data/topics.py:b"] == "Text of b."
    sentences = [
        "It opens the module.",
        "It describes a class.",
        "It holds \\d, of a method.",
        "It ends the module.",
    ]
    found = [documents["lib/module.py"].find(sentence) for sentence in sentences]
    # Only the first of two documents has a shared docstring.
    assert found[1:] == sorted(found[1:])
    assert -1 not in found[1:]
    assert "Too short" not in documents["lib/module.py"]
    openings = [text for text in documents.values() if "It opens the module." in text]
    assert len(openings) == 1


def test_the_order_is_deterministic_and_mixes_folders(roots: dict[str, Path]):
    once, again = collect(roots), collect(dict(reversed(roots.items())))
    assert once == again
    assert [document.name for document in once] != sorted(document.name for document in once)


def small(track_name: str = "docs-cpu", **changes: int) -> track.Track:
    """A track with a vocabulary small enough for a few files."""
    rules = track.load(track_name)
    wanted = {"vocab_size": 400, "shard_tokens": 3_000}
    data = msgspec.structs.replace(rules.data, vocab_size=400, val_tokens=1_000)
    return msgspec.structs.replace(rules, data=data, python_docs=wanted)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    import email

    folder = Path(email.__file__).parent
    monkeypatch.setattr(python_docs, "installed", lambda: {"email": folder})


@pytest.mark.usefixtures("few")
def test_the_shards_verify_under_the_track(tmp_path: Path):
    rules = small()
    made = python_docs.ensure(rules, tmp_path / "a")
    assert made is not None
    passed = verify(tmp_path / "a", rules.data, full=True)
    assert len(passed) > 3
    manifest = made.manifest
    assert (manifest.scored_tokens, manifest.vocab_size, manifest.document_token) == (1_000, 400, 0)
    # The bytes of the scored tokens, decoded by the tokenizer's library.
    import tokenizers

    ids = np.fromfile(tmp_path / "a" / "docs_val_000000.bin", "<u2", offset=1024)[1:1_001]
    text = tokenizers.Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json")).decode(ids.tolist())
    assert manifest.scored_bytes == len(text.encode())
    assert python_docs.ensure(rules, tmp_path / "a") is None, "it is complete"
    python_docs.make(rules, tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    python_docs.make(rules, tmp_path / "b")  # replaces its own shards


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("act", [python_docs.make, python_docs.ensure])
def test_other_shards_are_not_replaced(tmp_path: Path, act: Callable):
    rows, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    rows.write_text('{"text": "abc"}\n' * 9)
    made = prep.prepare(open_source([str(rows)]), tokenizer.choose("bytes"), prep.Cut("docs", 10), out)
    unfinished = msgspec.structs.replace(made.manifest, complete=False)
    writing.write_manifest(out, unfinished)  # `ensure` leaves a complete folder alone
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UsageError, match=rf"holds shards of {rows}; docs-cpu@1 would replace them"):
        act(small(), out)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    (out / inventory.MANIFEST).unlink()
    with pytest.raises(UsageError, match=r"holds docs_train_000001\.bin without manifest\.json"):
        act(small(), out)
    assert {path.name for path in out.iterdir()} == {path.name for path in before} - {inventory.MANIFEST}


@pytest.mark.usefixtures("few")
def test_a_program_that_waited_does_not_make_it_again(tmp_path: Path):
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(python_docs.ensure, small(), tmp_path / "a")
        while not (tmp_path / "a" / python_docs.CORPUS).exists():
            time.sleep(0.001)
        second = pool.submit(python_docs.ensure, small(), tmp_path / "a", say=said.append)
        assert first.result() is not None
        assert second.result() is None
    assert len(said) == 1, "it says that it waits"


def test_too_little_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roots: dict[str, Path]):
    monkeypatch.setattr(python_docs, "installed", lambda: roots)
    with pytest.raises(DataError, match="docs-cpu@1 needs 400; this Python has too little"):
        python_docs.make(small(), tmp_path / "out")


def test_other_tracks_are_refused(tmp_path: Path):
    assert python_docs.ensure(track.load("webmini"), tmp_path) is None
    with pytest.raises(UsageError, match="'webmini' is not made of Python's documentation"):
        python_docs.make(track.load("webmini"), tmp_path)


def test_the_real_list_of_folders():
    assert {"python", "jax", "numpy"} <= set(python_docs.installed())
    assert all(
        (folder / "__init__.py").exists() or (folder / "os.py").exists()
        for folder in python_docs.installed().values()
    )
    assert Document._fields == ("name", "text"), "fields of the rows; `data prep` reads the text"
