"""Reads `source.txt`, which is untrusted: its files, what is science, and what they import. Executes nothing."""

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from speedrun.base.sourcefile import check_path
from speedrun.record.layout import sha256

_MARKER = re.compile(r"#### file: (\S+) sha256:([0-9a-f]{64}) lines:(0|[1-9][0-9]{0,6})")
#: Larger files are data, or an attack on the parser; they are not parsed. The largest of ours has 20,000.
MOST_BYTES = 2**18

#: Files that a recipe's author may change, since they shape the loss curve. All others are instruments.
SCIENCE = ("speedrun/science/", "speedrun/recipes/")
#: They find recipes by name, so they are instruments.
_REGISTERS = frozenset(f"{folder}__init__.py" for folder in SCIENCE)


def split_source(text: str) -> dict[str, str]:
    """Return the files of a source text: relative path -> text, in their order.

    Raises:
        ValueError: a missing, malformed or repeated marker, a path that `check_path` refuses, a text shorter than its
            marker says, or one with another digest.
    """
    files: dict[str, str] = {}
    lines = text.split("\n")
    if lines.pop():
        raise ValueError("the source text does not end in a newline; it was cut")
    at = 0
    while at < len(lines):
        marker = _MARKER.fullmatch(lines[at])
        if not marker:
            raise ValueError(f"line {at + 1}: want a file marker, got {lines[at][:80]!r}")
        path, digest, count = check_path(marker[1]), marker[2], int(marker[3])
        body = lines[at + 1 : at + 1 + count]
        content = "".join(f"{line}\n" for line in body)
        if path in files:
            raise ValueError(f"line {at + 1}: {path} stands here twice")
        if len(body) != count or sha256(content.encode()) != digest:
            raise ValueError(f"{path}: the text is not the one its marker was written for")
        files[path] = content
        at += 1 + count
    return files


def is_science(path: str) -> bool:
    """Return whether a file of a source text is science."""
    return path.startswith(SCIENCE) and path.endswith(".py") and path not in _REGISTERS


def changed_lines(source_text: str, parent_source_text: str) -> int:
    """Return the number of lines of science in a source text that its parent's does not hold.

    Counts the lines of all science files as a multiset, without blank lines: a line that moved within a file or to
    another is not counted, one that was edited or copied is. Instruments and tracks do not count. Linear time.

    Args:
        source_text: `source.txt` of a record.
        parent_source_text: that of its parent; "" counts all lines of science.

    Raises:
        ValueError: a text that `split_source` refuses.
    """
    return (_science_lines(source_text) - _science_lines(parent_source_text)).total()


def _science_lines(source_text: str) -> Counter[str]:
    texts = [text for path, text in split_source(source_text).items() if is_science(path)]
    return Counter(line for text in texts for line in text.split("\n") if line.strip())


class Import(NamedTuple):
    """A name that an import statement binds."""

    line: int
    module: str
    name: str | None  #: None for a whole module


#: A comment in the first two lines that declares the encoding of a file (PEP 263).
_ENCODING = re.compile(r"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")


class Names(NamedTuple):
    """Names of one file."""

    imports: list[Import]  #: wherever they stand
    bound: set[str]  #: at its top level


def read(text: str) -> Names:
    """Read a Python file.

    Raises:
        ValueError: if it cannot be read.
    """
    if (size := len(text.encode(errors="replace"))) > MOST_BYTES:
        raise ValueError(f"{size:,} bytes; at most {MOST_BYTES:,} are read")
    for name in (name for line in text.split("\n", 2)[:2] for name in _ENCODING.findall(line)):
        if name != "utf-8":
            raise ValueError(f"declares the encoding {name}: Python reads another text than people do")
    try:
        with warnings.catch_warnings():  # about odd escapes
            warnings.simplefilter("ignore")
            tree = ast.parse(text)  # not compiled: copies of nested `finally` take all memory
    # Everything that a parser may raise on hostile input.
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    except OverflowError as error:
        raise ValueError(str(error)) from None
    except (RecursionError, MemoryError):
        raise ValueError("nested too deep for Python's parser") from None
    left: list[ast.AST] = [tree]
    while left:
        if isinstance(node := left.pop(), ast.Return):
            raise ValueError(f"line {node.lineno}: 'return' outside function")
        inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        left += (child for child in ast.iter_child_nodes(node) if not isinstance(child, inner))
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
