"""A corpus from the documentation of this Python: docstrings and help topics, parsed and never executed.

A document is the docstrings of a module, or one topic of `help()`: from the standard library, and from installed
packages that a run needs. A docstring that an earlier document has is skipped. Documents are sorted by a digest of
their names, so that validation, which comes first, resembles the rest.

The texts depend on the installed versions, so losses compare on one machine only. The corpus is made where it is used,
and none of it is part of this project. Licences: PSF, BSD, Apache.
"""

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

from speedrun.data import documents, prep, tokenizer
from speedrun.data.inventory import MANIFEST, read_manifest
from speedrun.data.sources import open_source
from speedrun.data.vocabulary import TOKENIZER
from speedrun.ground.errors import DataError, UsageError
from speedrun.ground.lock import lock_folder
from speedrun.ground.track import Track
from speedrun.ground.wholefile import write_whole

PACKAGES = ("jax", "numpy", "scipy", "optax", "matplotlib")  #: dependencies of `speedrun run`
#: Folders without documentation, or with little English.
_SKIPPED = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "__pycache__",
    "_vendor",
}
_MIN_CHARACTERS = 80  #: shorter docstrings are remarks such as "See help(type(self))."

CORPUS = "corpus.jsonl"
SOURCE = "the documentation of this Python"  #: in the manifest


class Document(NamedTuple):
    """A text and its origin."""

    name: str  #: such as `jax/numpy/linalg.py`
    text: str


def installed() -> dict[str, Path]:
    """Return the folders to read, by name: the standard library and the installed ones of `PACKAGES`."""
    roots = {"python": Path(sysconfig.get_path("stdlib"))}
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            roots[package] = Path(spec.origin).parent
    return roots


def collect(roots: dict[str, Path]) -> list[Document]:
    """Return all documents of some folders, in order."""
    files = [
        (f"{name}/{path.relative_to(root).as_posix()}", path)
        for name, root in roots.items()
        for path in sorted(root.rglob("*.py"))
        if not _SKIPPED & set(path.relative_to(root).parts)
    ]
    files.sort(key=lambda named: hashlib.sha256(named[0].encode()).digest())
    seen: set[str] = set()
    return [document for name, path in files for document in _documents_of(name, path, seen)]


def _documents_of(name: str, path: Path, seen: set[str]) -> Iterator[Document]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in other people's code
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # this Python cannot read the file, so it is not part of its documentation
    if name == "python/pydoc_data/topics.py":
        texts = sorted(_topics(tree).items())
        yield from (Document(f"{name}:{topic}", text.strip()) for topic, text in texts)
        return
    fresh = [text for text in _docstrings(tree) if text not in seen]
    seen.update(fresh)
    if fresh:
        yield Document(name, "\n\n".join(fresh))


def _topics(tree: ast.Module) -> dict[str, str]:
    """Return pydoc's topics: the only assignment of the file."""
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    return ast.literal_eval(tables[0]) if len(tables) == 1 else {}


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of module, classes and functions, in the order of the file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: 0 if isinstance(node, ast.Module) else node.lineno)
    for node in nodes:
        text = ast.get_docstring(node)
        if text and len(text) >= _MIN_CHARACTERS:
            yield documents.valid(text)


def make(
    track: Track, folder: Path, *, num_workers: int = 1, say: Callable[[str], None] = lambda _: None
) -> prep.Prepared:
    """Make corpus, tokenizer and shards of a track anew, with the code that makes any other shards.

    Raises:
        UsageError: if the track needs other data, or the folder holds other shards.
        DataError: if this Python has too little documentation, or the folder cannot be written.
    """
    if track.python_docs is None:
        raise UsageError(
            f"track {track.name!r} is not made of Python's documentation; get its data: {track.data.get}"
        )
    with lock_folder(folder, say):
        return _make(track, track.python_docs, folder, num_workers)


def ensure(
    track: Track, folder: Path, *, say: Callable[[str], None] = lambda _: None
) -> prep.Prepared | None:
    """Make the shards as `make` does, if the track has `python_docs` and the folder is not complete."""
    if track.python_docs is None or _is_complete(folder):
        return None
    with lock_folder(folder, say):
        if _is_complete(folder):  # by the program that held the lock
            return None
        made = _make(track, track.python_docs, folder, 1)
    say(f"made  the shards of Python's documentation in {folder}: {made.facts()['tokens']:,} tokens")
    return made


def _is_complete(folder: Path) -> bool:
    found = read_manifest(folder)
    return found is not None and found.complete


def _make(track: Track, wanted: dict[str, int], folder: Path, num_workers: int) -> prep.Prepared:
    _remove_old(folder, track)
    texts = collect(installed())
    write_whole(folder / CORPUS, *(msgspec.json.encode(text._asdict()) + b"\n" for text in texts))
    size = tokenizer.train_bpe((text.text for text in texts), wanted["vocab_size"], folder / TOKENIZER)
    if size != track.data.vocab_size:
        raise DataError(
            f"{folder / TOKENIZER}: {size:,} ids; {track.id} needs {track.data.vocab_size:,}; this Python has too "
            "little documentation: install the packages of a run"
        )
    cut = prep.Cut(
        prefix=track.data.val.partition("_val_")[0],
        shard_tokens=wanted["shard_tokens"],
        scored_tokens=track.data.val_tokens,
    )
    source = open_source([str(folder / CORPUS)])
    source.name = SOURCE  # independent of the folder's path
    choice = tokenizer.choose(str(folder / TOKENIZER))
    return prep.prepare(source, choice, cut, folder, num_workers=num_workers)


def _remove_old(folder: Path, track: Track) -> None:
    """Remove earlier shards of this kind; refuse a folder with others."""
    old, manifest = sorted(folder.glob("*.bin")), read_manifest(folder)
    if (old or manifest) and (manifest is None or manifest.source != SOURCE):
        found = f"shards of {manifest.source}" if manifest else f"{old[0].name} without {MANIFEST}"
        raise UsageError(
            f"{folder}: holds {found}; {track.id} would replace them; choose another folder, or remove them"
        )
    for pattern in (track.data.train, track.data.val, MANIFEST):
        for path in folder.glob(pattern):
            path.unlink()
