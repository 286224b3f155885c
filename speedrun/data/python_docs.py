"""The English that every Python brings along, as a corpus: docstrings and help topics, read and never imported.

A document is a module's docstrings, or one topic of `help()`: of the standard library, and of the packages of the
run that are installed. Files are parsed, not run. A docstring that stood in an earlier document is left out. The
order is that of a digest of the documents' names, so that validation, which comes first, is like the rest.

The texts depend on the versions that are installed: numbers compare on one machine only. Nothing of it is stored
in this project; a corpus is made where it is used. Licences: PSF, BSD, Apache.
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
from speedrun.ground.errors import DataError, UsageError
from speedrun.ground.lock import alone_in
from speedrun.ground.track import PythonDocs, Track
from speedrun.ground.wholefile import write_whole

#: Those that `speedrun run` needs anyway, with English worth reading.
PACKAGES = ("jax", "numpy", "scipy", "optax", "matplotlib")
#: Folders without documentation of their own, or with much that is no English.
_LEFT_OUT = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "__pycache__",
    "_vendor",
}
#: Shorter ones are remarks such as "See help(type(self))."
_MIN_CHARACTERS = 80

CORPUS, TOKENIZER = "corpus.jsonl", "tokenizer.json"
#: In the manifest.
SOURCE = "the documentation of this Python"


class Document(NamedTuple):
    """A text and where it is from."""

    name: str  #: as `jax/numpy/linalg.py`
    text: str


def installed() -> dict[str, Path]:
    """The folders that are read, by name: the standard library and those of `PACKAGES` that are there."""
    roots = {"python": Path(sysconfig.get_path("stdlib"))}
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            roots[package] = Path(spec.origin).parent
    return roots


def collect(roots: dict[str, Path]) -> list[Document]:
    """All documents of some folders, in their order."""
    files = [
        (f"{name}/{path.relative_to(root).as_posix()}", path)
        for name, root in roots.items()
        for path in sorted(root.rglob("*.py"))
        if not _LEFT_OUT & set(path.relative_to(root).parts)
    ]
    files.sort(key=lambda named: hashlib.sha256(named[0].encode()).digest())
    seen: set[str] = set()
    return [document for name, path in files for document in _documents_of(name, path, seen)]


def _documents_of(name: str, path: Path, seen: set[str]) -> Iterator[Document]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other people's escapes
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # a file that this Python cannot read holds no documentation of it
    if name == "python/pydoc_data/topics.py":
        texts = sorted(_topics(tree).items())
        yield from (Document(f"{name}:{topic}", text.strip()) for topic, text in texts)
        return
    fresh = [text for text in _docstrings(tree) if text not in seen]
    seen.update(fresh)
    if fresh:
        yield Document(name, "\n\n".join(fresh))


def _topics(tree: ast.Module) -> dict[str, str]:
    """The one table of pydoc's topics."""
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    return ast.literal_eval(tables[0]) if len(tables) == 1 else {}


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Those of the module, its classes and functions, in the order of the file."""
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
    """Makes corpus, tokenizer and shards of a track anew, each through the code that other corpora take.

    Args:
        track: one that asks for this documentation.
        folder: whose shards are replaced.
        num_workers: threads that tokenize.
        say: is told if another program has to end first.

    Raises:
        UsageError: if the track's data or the folder's shards are others, or `tokenizers` is not installed.
        DataError: if this Python has too little documentation, or the folder cannot be written.
    """
    wanted = _wanted(track)
    documents.need("tokenizers")
    with alone_in(folder, say):
        return _made(track, wanted, folder, num_workers)


def ensure(
    track: Track, folder: Path, *, say: Callable[[str], None] = lambda _: None
) -> prep.Prepared | None:
    """Makes the data of a track of this kind unless its folder is complete; other tracks bring theirs.

    Raises:
        UsageError: of `make`.
        DataError: of `make`.
    """
    if track.python_docs is None or _is_complete(folder):
        return None
    documents.need("tokenizers")
    with alone_in(folder, say):
        if _is_complete(folder):  # by the program that held the lock
            return None
        made = _made(track, track.python_docs, folder, 1)
    say(f"made  the shards of Python's documentation in {folder}: {made.facts()['tokens']:,} tokens")
    return made


def _is_complete(folder: Path) -> bool:
    found = read_manifest(folder)
    return found is not None and found.complete


def _made(track: Track, wanted: PythonDocs, folder: Path, num_workers: int) -> prep.Prepared:
    _remove_old(folder, track)
    texts = collect(installed())
    write_whole(folder / CORPUS, *(msgspec.json.encode(text._asdict()) + b"\n" for text in texts))
    size = tokenizer.train_bpe((text.text for text in texts), wanted.vocab_size, folder / TOKENIZER)
    if size != track.data.vocab_size:
        raise DataError(
            f"{folder / TOKENIZER}: {size:,} ids; {track.id} needs {track.data.vocab_size:,}; this Python has too "
            "little documentation: install the packages of a run"
        )
    cut = prep.Cut(
        prefix=track.data.val.partition("_val_")[0],
        shard_tokens=wanted.shard_tokens,
        scored_tokens=track.data.val_tokens,
    )
    source = open_source([str(folder / CORPUS)])
    source.name = SOURCE  # not a path: it tells whose shards a folder holds, wherever that lies
    choice = tokenizer.choose(str(folder / TOKENIZER))
    return prep.prepare(source, choice, cut, folder, num_workers=num_workers)


def _remove_old(folder: Path, track: Track) -> None:
    """Removes the shards of an earlier time, and never those of anything else."""
    old, manifest = sorted(folder.glob("*.bin")), read_manifest(folder)
    if (old or manifest) and (manifest is None or manifest.source != SOURCE):
        whose = f"shards of {manifest.source}" if manifest else f"{old[0].name} without {MANIFEST}"
        raise UsageError(
            f"{folder}: holds {whose}; {track.id} would replace them; choose another folder, or remove them"
        )
    for pattern in (track.data.train, track.data.val, MANIFEST):
        for path in folder.glob(pattern):
            path.unlink()


def _wanted(track: Track) -> PythonDocs:
    if track.python_docs is None:
        raise UsageError(
            f"track {track.name!r} is not made of Python's documentation; get its data: {track.data.get}"
        )
    return track.python_docs
