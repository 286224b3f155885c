"""Generated data: the synthetic stream, and a corpus from the documentation of this Python.

A document of the corpus holds the docstrings of a module, parsed and never executed, or one topic of `help()`, from the
standard library and the packages of a run. They depend on the installed versions, so losses compare on one machine
only. Licences of the texts: PSF, BSD, Apache.
"""

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec

from speedrun.base.atomic_files import lock_folder, write_whole
from speedrun.base.console import memory
from speedrun.base.errors import DataError, UsageError, translate_os_errors
from speedrun.base.progress import Progress, over, working
from speedrun.base.track import Track
from speedrun.data import prepare, synthetic, tokenizer
from speedrun.data.documents import open_source, valid
from speedrun.data.shards import MANIFEST, Manifest, data_folder, read_manifest
from speedrun.data.vocabulary import TOKENIZER

PACKAGES = ("jax", "numpy", "scipy", "optax", "matplotlib")  #: dependencies of `speedrun run`
#: Folders with little documentation.
_SKIPPED = {
    *("test", "tests", "site-packages", "dist-packages"),
    *("idlelib", "lib2to3", "__pycache__", "_vendor"),
}
_MIN_CHARACTERS = 80  #: shorter docstrings say little, such as "See help(type(self))."

CORPUS = "corpus.jsonl"
SOURCE = "the documentation of this Python"  #: in the manifest


def make(track: Track, folder: Path) -> Manifest:
    """Make the shards of a track again; callers lock the folder."""
    if track.synthetic is not None:
        return synthetic.write(track, folder)
    if track.python_docs is not None:
        return _make_docs(track, folder)
    raise UsageError(f"track {track.name!r} has no generated shards; get its shards: {track.data.get}")


def ensure(track: Track, data: Path | None, say: Callable[[str], None]) -> None:
    """Make the shards of a track that has generated ones, unless they are complete or `data` names others."""
    folder = data_folder(track, None)
    if (
        data is not None
        or (track.synthetic is None and track.python_docs is None)
        or _is_complete(track, folder)
    ):
        return
    with lock_folder(folder, say):
        if _is_complete(track, folder):  # another program made them
            return
        made = make(track, folder)
    kind = "shards of Python's documentation" if track.synthetic is None else "synthetic shards"
    tokens = sum(shard.tokens for shard in made.shards.values())
    size = memory(sum((folder / name).stat().st_size for name in made.shards))
    say(f"made  {len(made.shards)} {kind} in {folder}: {tokens:,} tokens, {size}")


def _is_complete(track: Track, folder: Path) -> bool:
    """Return whether all shards are there, and none is of another version of the track."""
    if (found := read_manifest(folder)) is None or not found.complete:
        return False
    data, need = track.data, track.data.val_tokens + track.data.held_tokens
    old = (one.sha256 != data.sha256.get(name, one.sha256) for name, one in found.shards.items())
    return not any(old) and next(iter(found.shards.values())).tokens > need  # that for validation


def installed() -> dict[str, Path]:
    """Return the folders to read, by name: the standard library and the installed `PACKAGES`."""
    specs = {package: find_spec(package) for package in PACKAGES}
    roots = {name: Path(spec.origin).parent for name, spec in specs.items() if spec and spec.origin}
    return {"python": Path(sysconfig.get_path("stdlib")), **roots}


def collect(roots: dict[str, Path]) -> dict[str, str]:
    """Return the texts of some folders by names such as `jax/numpy/linalg.py`.

    They are sorted by a digest of their names, so that validation, which comes first, resembles the rest.
    """
    files = [
        (f"{name}/{path.relative_to(root).as_posix()}", path)
        for name, root in roots.items()
        for path in sorted(root.rglob("*.py"))
        if not _SKIPPED & set(path.relative_to(root).parts)
    ]
    files.sort(key=lambda named: hashlib.sha256(named[0].encode()).digest())
    found: dict[str, str] = {}
    seen: set[str] = set()
    for name, path in over("read", files, "files"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes in other people's code
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # this Python cannot parse the file
        if name == "python/pydoc_data/topics.py":
            tables = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)]
            topics = [item for table in tables for item in sorted(table.items())]
            found |= {f"{name}:{topic}": text.strip() for topic, text in topics}
        elif fresh := [text for text in _docstrings(tree) if text not in seen]:
            seen.update(fresh)
            found[name] = "\n\n".join(fresh)
    return found


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of module, classes and functions, in the order of the file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: 0 if isinstance(node, ast.Module) else node.lineno)
    for node in nodes:
        text = ast.get_docstring(node)
        if text and len(text) >= _MIN_CHARACTERS:
            yield valid(text)


def _make_docs(track: Track, folder: Path) -> Manifest:
    """Make corpus, tokenizer and shards of a track again."""
    settings = track.python_docs or {}
    manifest = read_manifest(folder)
    is_ours = manifest is not None and manifest.source == SOURCE
    if not is_ours and (manifest or any(folder.glob("*.bin"))):
        found = f"{folder}: holds other shards"
        raise UsageError(f"{found}; {track.id} would replace them; choose another folder, or remove them")
    with translate_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for pattern in (track.data.train, track.data.val, MANIFEST):
        for path in folder.glob(pattern):
            path.unlink()
    texts = collect(installed())
    rows = ({"name": name, "text": text} for name, text in texts.items())
    write_whole(folder / CORPUS, *(msgspec.json.encode(row) + b"\n" for row in rows))
    with working("tokenizer"):
        size = tokenizer.train_bpe(iter(texts.values()), settings["vocab_size"], folder / TOKENIZER)
    if size != track.data.vocab_size:
        raise DataError(
            f"{folder / TOKENIZER}: {size:,} ids; {track.id} needs {track.data.vocab_size:,}; this Python has too "
            "little documentation: install the packages of a run"
        )
    prefix = track.data.val.partition("_val_")[0]
    cut = prepare.Cut(prefix, settings["shard_tokens"], scored_tokens=track.data.val_tokens)
    source = open_source([str(folder / CORPUS)])
    source.name = SOURCE  # independent of the folder's path
    chosen = tokenizer.load(str(folder / TOKENIZER))
    with Progress("shards") as progress:
        return prepare.prepare(source, chosen, cut, folder, report=progress.update).manifest
