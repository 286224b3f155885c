"""Documents in the order of their source, in blocks that workers decode.

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
    """Consecutive documents, not yet decoded."""

    first: Place  #: of the first document
    num_rows: int
    raw: bytes | list[str]  #: lines of JSON, or texts
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
        skip = min(max(0, row - at.row), batch.num_rows)
        if texts := _texts(batch.column(column).slice(skip), name, at.row + skip, column):
            yield Block(Place(at.file, at.row + skip), len(texts), texts, 0)
        at = Place(at.file, at.row + batch.num_rows)


def _texts(values: Any, name: str, first_row: int, column: str) -> list[str]:
    texts = []
    for row, value in enumerate(values, first_row):
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:  # Arrow itself does not check
            raise _not_utf8(name, row, error) from None
        if not isinstance(text, str):
            raise _no_text(name, row, column, text)
        texts.append(text)
    return texts


def require_column(name: str, column: str, names: Sequence[str]) -> None:
    """Raise DataError, with its columns, unless a source has that of the text."""
    if column not in names:
        raise DataError(f"{name}: no column {column!r}; it has {', '.join(names)}; choose with --column")


def _no_text(name: str, row: int, column: str, got: object) -> DataError:
    return DataError(
        f"{name}: row {row:,} has {type(got).__name__} as {column!r}; need a text; choose with --column or repair it"
    )


def _not_utf8(name: str, row: int, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{name}: row {row:,} is not UTF-8 at its byte {error.start:,}; repair or remove it")


# --- in the workers ------------------------------------------------------------------------------------------


def read(block: Block, column: str) -> list[str]:
    """Decode the texts of a block; raise DataError if a line is not JSON or has no text."""
    if isinstance(block.raw, list):
        return [valid(text) for text in block.raw]
    lines = [line for line in block.raw.split(b"\n") if line and not line.isspace()]
    texts = []
    for number, line in enumerate(lines, block.first.row):
        text = _row(line, block.first.file, number).get(column)
        if not isinstance(text, str):
            raise _no_text(block.first.file, number, column, text)
        texts.append(valid(text))
    return texts


def texts(source: Source, column: str) -> Iterator[str]:
    """Yield all texts of a source; raise DataError as `read` and the source do."""
    for block in source.blocks(Place("", 0)):
        yield from read(block, column)


def _row(line: bytes, file: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # from bytes, it would accept surrogates and UTF-16
    except UnicodeDecodeError as error:
        raise _not_utf8(file, number, error) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: row {number:,} is not JSON: {error}; repair or remove it") from None
    if not isinstance(row, dict):
        raise DataError(f"{file}: row {number:,} is not a JSON object; repair or remove it")
    return row


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
