"""Reads `source.txt`, which is untrusted: its files, and the names that they import and bind. Executes nothing."""

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from speedrun.base.sourcefile import check_path
from speedrun.record.layout import sha256

_MARKER = re.compile(r"#### file: (\S+) sha256:([0-9a-f]{64}) lines:(0|[1-9][0-9]{0,6})")
#: Larger files are data or an attack, and are not parsed. Our largest has 20,000.
_MOST_BYTES = 2**18

#: Files that the author of a recipe may change. All others are the harness.
SCIENCE = ("speedrun/science/", "speedrun/recipes/")
#: These find recipes by name, so they belong to the harness.
_REGISTERS = frozenset(f"{folder}__init__.py" for folder in SCIENCE)


def split_source(text: str) -> dict[str, str]:
    """Return the files of a source text by relative path, in order; raise ValueError for any damage."""
    files: dict[str, str] = {}
    lines = text.split("\n")
    if lines.pop():
        raise ValueError("the source text was cut: it does not end in a newline")
    at = 0
    while at < len(lines):
        marker = _MARKER.fullmatch(lines[at])
        if not marker:
            raise ValueError(f"line {at + 1}: need a file marker, got {lines[at][:80]!r}")
        path, digest, count = check_path(marker[1]), marker[2], int(marker[3])
        body = lines[at + 1 : at + 1 + count]
        content = "".join(f"{line}\n" for line in body)
        if path in files:
            raise ValueError(f"line {at + 1}: {path} appears twice")
        if len(body) != count or sha256(content.encode()) != digest:
            raise ValueError(f"{path}: its text does not match the size and digest in its marker")
        files[path] = content
        at += 1 + count
    return files


def is_science(path: str) -> bool:
    """Return whether a file of a source text is science."""
    return path.startswith(SCIENCE) and path.endswith(".py") and path not in _REGISTERS


def changed_lines(source_text: str, parent_source_text: str) -> int:
    """Return how many non-blank lines of science a source text has that its parent's lacks.

    Lines are compared as multisets over all files: edited and copied lines count, moved ones do not.
    """
    return (_science_lines(source_text) - _science_lines(parent_source_text)).total()


def _science_lines(source_text: str) -> Counter[str]:
    texts = [text for path, text in split_source(source_text).items() if is_science(path)]
    return Counter(line for text in texts for line in text.split("\n") if line.strip())


class Import(NamedTuple):
    """A name that an import statement binds."""

    line: int
    module: str
    name: str | None  #: None: the module itself


#: A declaration of the encoding in one of the first two lines (PEP 263).
_ENCODING = re.compile(r"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")


class Names(NamedTuple):
    """Names of one file."""

    imports: list[Import]  #: wherever they stand
    bound: set[str]  #: at its top level


@lru_cache(512)  # records of one batch, and of one day, share most files
def read(text: str) -> Names:
    """Return the names in a Python file; raise ValueError if it cannot be parsed."""
    if (size := len(text.encode(errors="replace"))) > _MOST_BYTES:
        raise ValueError(f"{size:,} bytes; at most {_MOST_BYTES:,} are read")
    for name in (name for line in text.split("\n", 2)[:2] for name in _ENCODING.findall(line)):
        if name != "utf-8":
            raise ValueError(
                f"declares the encoding {name}, need utf-8: Python would read another text than people do"
            )
    try:
        with warnings.catch_warnings():  # about odd escapes
            warnings.simplefilter("ignore")
            tree = ast.parse(text)  # compiling could take all memory for nested `finally`
    # Everything that a parser may raise on hostile input.
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    except OverflowError as error:
        raise ValueError(str(error)) from None
    except (RecursionError, MemoryError):
        raise ValueError("nested too deep for Python's parser") from None
    return Names(list(_imports(tree)), {name for node in tree.body for name in _bound(node)})


def _imports(tree: ast.Module) -> Iterator[Import]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (Import(node.lineno, alias.name, None) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                yield from (Import(node.lineno, "." * level + (module or ""), alias.name) for alias in names)


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds, also inside its blocks."""
    for inner in ast.walk(node):
        match inner:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=asname):
                yield asname or name.split(".")[0]
