"""Documents in the order of their source, in blocks that workers tokenize.

A source (`data.sources`) yields small blocks, from any document on.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

from speedrun.data.inventory import Place
from speedrun.ground.errors import DataError, UsageError

BATCH_ROWS = 256  #: rows of parquet decoded at a time; those of FineWeb hold 3 kB each


class Block(NamedTuple):
    """Consecutive documents."""

    first: Place  #: of the first document
    texts: list[str]
    read_bytes: int  #: of the source's files, up to the end of this block


class Source(Protocol):
    """Where documents come from."""

    name: str  #: as the user gave it
    total_bytes: int  #: of its files; 0 if unknown

    def identity(self) -> dict[str, str | int]:
        """Return what determines the documents and their order."""
        ...

    def blocks(self, start: Place) -> Iterator[Block]:
        """Yield all blocks from this row on."""
        ...


def of_batches(batches: Iterable[Any], column: str, at: Place, row: int, name: str) -> Iterator[Block]:
    """Yield Arrow's batches or tables as blocks.

    Args:
        batches: consecutive ones.
        column: holds the text.
        at: place of the first row.
        row: the first row to yield.
        name: of the source, for errors.

    Raises:
        DataError: if a row has no text, or one that is not UTF-8.
    """
    for batch in batches:
        first, texts = max(row, at.row), []
        for number, value in enumerate(batch.column(column).slice(first - at.row), first):
            try:
                texts.append(_checked(value.as_py(), name, number, column))
            except UnicodeDecodeError as error:  # Arrow itself does not check
                raise _not_utf8(name, number, error) from None
        if texts:
            yield Block(Place(at.file, first), texts, 0)
        at = Place(at.file, at.row + batch.num_rows)


def require_column(name: str, column: str, names: Sequence[str]) -> None:
    """Raise DataError, with its columns, unless a source has that of the text."""
    if column not in names:
        raise DataError(f"{name}: no column {column!r}; it has {', '.join(names)}; choose with --column")


def of_line(line: bytes, column: str, name: str, row: int) -> str:
    """Return the text of a line of JSON; `name` and `row` are for errors.

    Raises:
        DataError: if the line is not an object of JSON in UTF-8, or has no text.
    """
    try:
        found = json.loads(line.decode("utf-8-sig"))  # from bytes, it would accept surrogates and UTF-16
    except UnicodeDecodeError as error:
        raise _not_utf8(name, row, error) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: row {row:,} is not JSON: {error}; repair or remove it") from None
    if not isinstance(found, dict):
        raise DataError(f"{name}: row {row:,} is not a JSON object; repair or remove it")
    return _checked(found.get(column), name, row, column)


def texts(source: Source) -> Iterator[str]:
    """Yield all texts of a source; raise DataError as the source does."""
    for block in source.blocks(Place("", 0)):
        yield from block.texts


def _checked(text: object, name: str, row: int, column: str) -> str:
    if not isinstance(text, str):
        got = f"{type(text).__name__} as {column!r}"
        raise DataError(f"{name}: row {row:,} has {got}; need a text; choose with --column or repair it")
    return valid(text)


def _not_utf8(name: str, row: int, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{name}: row {row:,} is not UTF-8 at its byte {error.start:,}; repair or remove it")


def valid(text: str) -> str:
    """Return the text with surrogate pairs joined, and lone surrogates replaced by U+FFFD as in tiktoken."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def need(package: str) -> None:
    """Raise UsageError, which says how to install it, unless a package is there."""
    if find_spec(package) is None:
        raise UsageError(
            f"package {package} is not installed; it is needed here; scripts/install.sh prep adds it"
        )
