"""Measures the data in the literals of a file: weights hidden in a source text are long and many."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: Prose has a space before this many characters; a blob need not.
_LONGEST_WORD = 120
_MOST_BYTES_LITERAL = 128
_MOST_BITS = 256
_MOST_NUMBERS = 256
_FEW_BYTES = 8  #: integers up to this size are sizes or seeds


class Literal(NamedTuple):
    """A literal that is longer than a person would type."""

    line: int
    what: str


@dataclass
class Literals:
    """The literals of one file."""

    large: list[Literal] = field(default_factory=list)
    num_bytes: int = 0  #: of all strings but docstrings, and of long integers
    num_numbers: int = 0

    def note_tree(self, nodes: list[ast.AST]) -> None:
        """Note all literals of a tree. A docstring is only searched for blobs."""
        docstrings = {id(string) for node in nodes if (string := _docstring(node)) is not None}
        for node in nodes:
            match node:
                case ast.Constant(value=bool() | None):
                    pass
                case ast.Constant(value=str() | bytes() as value):
                    self.note_string(node.lineno, value, counts=id(node) not in docstrings)
                case ast.Constant(value=int() | float() | complex() as value):
                    self.note_number(node.lineno, value)
                case ast.List(elts=row) | ast.Tuple(elts=row) | ast.Set(elts=row) | ast.Call(args=row):
                    self.note_row(node.lineno, row)
                case ast.Dict(keys=keys, values=row):
                    self.note_row(node.lineno, [*keys, *row])
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    if len(name) > _LONGEST_WORD:
                        self.large.append(Literal(node.lineno, f"a name of {len(name):,} letters"))

    def note_data(self, data: Any) -> None:
        """Note a document of TOML or JSON, with its keys."""
        left = [data]
        while left:
            match left.pop():
                case dict() as table:
                    left += [*table, *table.values()]
                case list() | tuple() as row:
                    left += row
                    self.note_row(1, list(row))
                case str() as string:
                    self.note_string(1, string)
                case int() | float() as number if not isinstance(number, bool):
                    self.note_number(1, number)

    def note_string(self, line: int, value: str | bytes, *, counts: bool = True) -> None:
        """Note a string; `counts` says whether it adds to the total."""
        size = len(value.encode(errors="replace") if isinstance(value, str) else value)
        self.num_bytes += size * counts
        if isinstance(value, bytes) and size > _MOST_BYTES_LITERAL:
            self.large.append(Literal(line, f"{size:,} bytes in one literal"))
        elif isinstance(value, str) and size > _LONGEST_WORD:
            word = max(map(len, value.split()), default=0)
            if word > _LONGEST_WORD:
                self.large.append(Literal(line, f"a word of {word:,} characters in a string"))

    def note_number(self, line: int, value: complex) -> None:
        """Note a number of any kind."""
        self.num_numbers += 1
        size = value.bit_length() // 8 if isinstance(value, int) else 0
        if size > _FEW_BYTES:
            self.num_bytes += size
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            self.large.append(Literal(line, f"an integer of {size:,} bytes"))

    def note_row(self, line: int, row: list[Any]) -> None:
        """Note values side by side."""
        if len(row) > _MOST_NUMBERS:
            self.large.append(Literal(line, f"{len(row):,} values in a row"))


def docstrings(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield all strings that are statements by themselves."""
    for node in nodes:
        if (string := _docstring(node)) is not None:
            yield str(string.value)


def _docstring(node: ast.AST) -> ast.Constant | None:
    match node:
        case ast.Expr(value=ast.Constant(value=str()) as string):
            return string
    return None
