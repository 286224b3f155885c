"""Reads Python that nobody trusts: what a file imports, what it reaches for, and how much data it carries.

Nothing is executed: the text is parsed and its tree walked. A static reading sees what is written down.
"""

import ast
import io
import re
import tokenize
import tomllib
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from speedrun.ground.sourcefile import split_source
from speedrun.ledger.literals import Literals, docstrings
from speedrun.ledger.reaches import Import, Reach, Reaches, imports_of, names_given

#: Larger files are data, or made to keep a reader busy; they are not parsed. The largest of ours has 20,000.
MOST_BYTES = 2**18

#: What could change a loss curve: a recipe's author may change it. All else is an instrument, and the same for
#: everybody.
SCIENCE = "speedrun/science/"
#: The same in the layout before 2026-11-22: folders, and files.
_FOLDERS_BEFORE = tuple(f"speedrun/{name}/" for name in ("recipes", "models", "kernels", "optim"))
_FILES_BEFORE = frozenset(f"speedrun/{name}.py" for name in ("nn", "params", "recipe", "step"))
#: They find recipes by their names, or could stand in the way of what does: none of them is a recipe's.
_REGISTERS = frozenset(
    f"{folder}/{name}"
    for folder in ("speedrun/science", "speedrun")
    for name in ("__init__.py", "recipes.py", "recipes/__init__.py")
)


def is_science(path: str) -> bool:
    """Whether a file of a source text is one that a recipe's author may change."""
    if not path.endswith(".py") or path in _REGISTERS:
        return False
    return path.startswith((SCIENCE, *_FOLDERS_BEFORE)) or path in _FILES_BEFORE


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
    files = split_source(source_text).items()
    return Counter(
        line for path, text in files if is_science(path) for line in text.split("\n") if line.strip()
    )


@dataclass
class Code:
    """What one file holds."""

    problem: str = ""  #: why it cannot be read; then nothing else is known
    imports: list[Import] = field(default_factory=list)
    bound: set[str] = field(default_factory=set)  #: names at its top level
    defined: set[str] = field(default_factory=set)  #: those of them that it does not import
    given: set[str] = field(default_factory=set)  #: names that it gives to anything, attributes among them
    reaches: list[Reach] = field(default_factory=list)  #: as of a file of science
    literals: Literals = field(default_factory=Literals)
    prose: str = ""  #: docstrings and comments, which Python does not run and a cheat can read
    packed_bytes: int = 0  #: of the whole text after zlib: what it holds, wherever it is hidden


#: A comment in the first two lines that tells Python how to decode a file (PEP 263).
_ENCODING = re.compile(r"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")


@lru_cache(maxsize=4096)
def read(path: str, text: str) -> Code:
    """Reads a Python or TOML file.

    Args:
        path: decides which of the two.
        text: of at most MOST_BYTES bytes; larger ones have a problem and are not parsed.
    """
    raw = text.encode(errors="replace")
    code = Code(packed_bytes=len(zlib.compress(raw, 6)))
    if len(raw) > MOST_BYTES:
        code.problem = f"{len(raw):,} bytes; at most {MOST_BYTES:,} are read"
        return code
    try:
        if path.endswith(".toml"):
            _read_table(text, code)
        else:
            _read_python(text, code)
    # All that a parser may raise when it is fed nonsense.
    except SyntaxError as error:
        code.problem = f"line {error.lineno}: {error.msg}"
    except tokenize.TokenError as error:
        code.problem = str(error)
    except (ValueError, OverflowError) as error:
        code.problem = str(error)
    except (RecursionError, MemoryError):
        code.problem = "nested too deep for Python's parser"
    return code


#: Python's reader of TOML takes time and memory with the square of the parts of a dotted key: a line of 200,000
#: characters fills the machine. Tracks are a tenth of this, with lines of a third.
_MOST_TABLE_BYTES = 2**15
_LONGEST_LINE = 400


def _read_table(text: str, code: Code) -> None:
    """The data of a TOML file."""
    longest = max(map(len, text.split("\n")))
    if len(text) > _MOST_TABLE_BYTES or longest > _LONGEST_LINE:
        raise ValueError(
            f"{len(text):,} characters, the longest line {longest:,}; {_LONGEST_LINE} make a line"
        )
    left: list[Any] = [tomllib.loads(text)]
    while left:
        match left.pop():
            case dict() as table:
                left += [*table, *table.values()]
            case list() as row:
                left += row
                code.literals.note_row(1, row)
            case str() as string:
                code.literals.note_string(1, string)
            case bool():
                pass
            case int() | float() as number:
                code.literals.note_number(1, number)


def _read_python(text: str, code: Code) -> None:
    if other := [
        name for line in text.split("\n", 2)[:2] for name in _ENCODING.findall(line) if name != "utf-8"
    ]:
        raise ValueError(f"declares the encoding {other[0]}: Python would read another text than people do")
    with warnings.catch_warnings():  # of odd escapes: theirs to mend
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
        compile(
            tree, "source", "exec", dont_inherit=True
        )  # finds a return outside of functions, and the like
    nodes = list(ast.walk(tree))
    code.bound = {name for node in tree.body for name in _names_bound(node)}
    code.imports = [found for node in nodes for found in imports_of(node)]
    imported = {
        name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for name in _names_bound(node)
    }
    code.defined, code.given = code.bound - imported, names_given(nodes)
    code.reaches = list(Reaches(nodes).found())
    code.literals.note_tree(nodes)
    code.prose = "\n".join([*docstrings(nodes), *_comments(text)])


def _comments(text: str) -> Iterator[str]:
    """Of a text that was parsed already."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def _names_bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement binds; those inside of blocks, too."""
    for inner in ast.walk(node):
        match inner:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=asname):
                yield asname or name.split(".")[0]
