"""Reads untrusted Python: what a file imports, which names it uses, and how much data it carries.

Nothing is executed: the text is parsed and its tree walked.
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

from speedrun.ledger.literals import Literals, docstrings
from speedrun.ledger.reaches import Import, Reach, Reaches, imports_of, names_given
from speedrun.ledger.source import split_source

#: Larger files are data, or an attack on the parser; they are not parsed. The largest of ours has 20,000.
MOST_BYTES = 2**18

#: Files that a recipe's author may change, since they shape the loss curve. All others are instruments.
SCIENCE = "speedrun/science/"
#: Science in the layout before 2026-11-22: folders, and files.
_FOLDERS_BEFORE = tuple(f"speedrun/{name}/" for name in ("recipes", "models", "kernels", "optim"))
_FILES_BEFORE = frozenset(f"speedrun/{name}.py" for name in ("nn", "params", "recipe", "step"))
#: They find recipes by name, or could replace the files that do, so they are instruments.
_REGISTERS = frozenset(
    f"{folder}/{name}"
    for folder in ("speedrun/science", "speedrun")
    for name in ("__init__.py", "recipes.py", "recipes/__init__.py")
)


def is_science(path: str) -> bool:
    """Return whether a file of a source text is science."""
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
    """The content of one file."""

    problem: str = ""  #: why it cannot be read; then the other fields are empty
    imports: list[Import] = field(default_factory=list)
    bound: set[str] = field(default_factory=set)  #: names at its top level
    defined: set[str] = field(default_factory=set)  #: those that it does not import
    given: set[str] = field(default_factory=set)  #: names of everything that it defines, attributes included
    reaches: list[Reach] = field(default_factory=list)  #: if it were science
    literals: Literals = field(default_factory=Literals)
    prose: str = ""  #: docstrings and comments: not executed, but a cheat could store data there
    packed_bytes: int = 0  #: of the whole text after zlib: a bound on the data it can hide


#: A comment in the first two lines that declares the encoding of a file (PEP 263).
_ENCODING = re.compile(r"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")


@lru_cache(maxsize=4096)
def read(path: str, text: str) -> Code:
    """Read a Python or TOML file.

    Args:
        path: its ending decides which of the two.
        text: its content; above MOST_BYTES bytes it is a problem and not parsed.
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
    # Everything that a parser may raise on hostile input.
    except SyntaxError as error:
        code.problem = f"line {error.lineno}: {error.msg}"
    except tokenize.TokenError as error:
        code.problem = str(error)
    except (ValueError, OverflowError) as error:
        code.problem = str(error)
    except (RecursionError, MemoryError):
        code.problem = "nested too deep for Python's parser"
    return code


#: Python's TOML parser takes time and memory quadratic in the parts of a dotted key, so that a line of 200,000
#: characters fills the memory. Tracks are a tenth of this, with lines of a third.
_MOST_TABLE_BYTES = 2**15
_LONGEST_LINE = 400


def _read_table(text: str, code: Code) -> None:
    """Count the literals of a TOML file."""
    longest = max(map(len, text.split("\n")))
    if len(text) > _MOST_TABLE_BYTES or longest > _LONGEST_LINE:
        raise ValueError(
            f"{len(text):,} characters, the longest line {longest:,}; "
            f"at most {_MOST_TABLE_BYTES:,} and {_LONGEST_LINE} are read"
        )
    code.literals.note_data(tomllib.loads(text))


def _read_python(text: str, code: Code) -> None:
    if other := [
        name for line in text.split("\n", 2)[:2] for name in _ENCODING.findall(line) if name != "utf-8"
    ]:
        raise ValueError(
            f"declares the encoding {other[0]}, in which Python reads another text than people do"
        )
    with warnings.catch_warnings():  # about odd escapes
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
    """Yield the comments of a text that was parsed before."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def _names_bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds, also inside its blocks."""
    for inner in ast.walk(node):
        match inner:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=asname):
                yield asname or name.split(".")[0]
