"""Documents in the order of their source, in blocks that workers take apart.

A source hands out small blocks, and can be entered again at any document. What a source is stands
in `text_files` and `hub_rows`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import msgspec

from speedrun.data.inventory import Place
from speedrun.ground.errors import DataError, UsageError

#: Rows of parquet that are decoded at once; FineWeb's hold 3 kB each.
BATCH_ROWS = 256

TOKEN_COUNT = "token_count"  #: FineWeb's own column: GPT-2 tokens of a document
_MOST_TOKENS = 2**31 - 1  #: of one document


class Block(NamedTuple):
    """Documents that follow each other, as they were read."""

    first: Place  #: of the first document
    num_rows: int
    raw: bytes | list[str]  #: lines of JSON, or texts
    source_tokens: list[int] | None  #: what the source says each document holds; None for lines of JSON
    read_bytes: int  #: of the source's files, up to the end of this block


class Documents(NamedTuple):
    """What a block holds."""

    texts: list[str]
    source_tokens: list[int] | None  #: of each text, where the source says it


class Source(Protocol):
    """Where documents come from."""

    name: str  #: as it was asked for
    total_bytes: int  #: of its files; 0: not known

    def identity(self) -> dict[str, str | int]:
        """What must be equal for the same documents to come in the same order."""
        ...

    def blocks(self, start: Place) -> Iterator[Block]:
        """All blocks, from this row on."""
        ...


def of_batches(batches: Iterable[Any], column: str, at: Place, row: int, name: str) -> Iterator[Block]:
    """Arrow's batches or tables as blocks; `at` is where they begin, `row` where the documents that count do.

    Raises:
        DataError: if a row has no text, or one that is no UTF-8.
    """
    for batch in batches:
        skip = min(max(0, row - at.row), batch.num_rows)
        texts = _values(batch.column(column).slice(skip), name, at.row + skip)
        counts = None
        if TOKEN_COUNT in batch.schema.names:
            counts = _counts(batch.column(TOKEN_COUNT).slice(skip).to_pylist())
        for offset, text in enumerate(texts):
            if not isinstance(text, str):
                raise no_text(name, at.row + skip + offset, column, text)
        if texts:
            yield Block(Place(at.file, at.row + skip), len(texts), texts, counts, 0)
        at = Place(at.file, at.row + batch.num_rows)


def _values(column: Any, name: str, first_row: int) -> list[Any]:
    """A column of Arrow's as Python values.

    Raises:
        DataError: if a text is no UTF-8; Arrow itself does not look.
    """
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        for row, value in enumerate(column, first_row):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{name}: row {row:,} is no UTF-8 at its byte {error.start:,}; repair or remove it"
                ) from None
        raise


def _counts(values: list[Any]) -> list[int] | None:
    """What a source says its documents hold, in tokens; None unless each of them has a number that can be one."""
    known = [value for value in values if type(value) is int and 0 <= value <= _MOST_TOKENS]
    return known if len(known) == len(values) else None


def require_column(name: str, column: str, names: Sequence[str]) -> None:
    """Check that a source has the column of the text.

    Raises:
        DataError: if it does not; lists those it has.
    """
    if column not in names:
        raise DataError(f"{name}: no column {column!r}; it has {', '.join(names)}; choose with --column")


def no_text(name: str, row: int, column: str, got: object) -> DataError:
    """The error for a row whose text is something else."""
    return DataError(
        f"{name}: row {row:,} has {type(got).__name__} as {column!r}; need a text; choose with --column or repair it"
    )


# --- in the workers ------------------------------------------------------------------------------------------


def read(block: Block, column: str) -> Documents:
    """Takes a block apart.

    Raises:
        DataError: if a line is not JSON or has no text.
    """
    if isinstance(block.raw, list):
        return Documents([valid(text) for text in block.raw], block.source_tokens)
    lines = [line for line in block.raw.split(b"\n") if line and not line.isspace()]
    rows = [_row(line, block.first, number) for number, line in enumerate(lines)]
    texts = []
    for number, row in enumerate(rows):
        if not isinstance(text := row.get(column), str):
            raise no_text(block.first.file, block.first.row + number, column, text)
        texts.append(valid(text))
    return Documents(texts, _counts([row.get(TOKEN_COUNT) for row in rows]))


def texts(source: Source, column: str) -> Iterator[str]:
    """All texts of a source, one by one.

    Raises:
        DataError: of `read` and of the source.
    """
    for block in source.blocks(Place("", 0)):
        yield from read(block, column).texts


def _row(line: bytes, first: Place, number: int) -> dict[str, Any]:
    try:
        row = _parsed(line)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{first.file}: row {first.row + number:,} is no UTF-8 at its byte {error.start:,}; repair or remove it"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{first.file}: row {first.row + number:,} is no JSON: {error}; repair or remove it"
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{first.file}: row {first.row + number:,} is no JSON object; repair or remove it")
    return row


def _parsed(line: bytes) -> Any:
    """As `json.loads`, twice as fast; NaN and escapes of lone surrogates, which msgspec refuses, are left to it."""
    try:
        return msgspec.json.decode(line)
    except ValueError:  # msgspec's own errors are some of these
        return json.loads(line.decode("utf-8-sig"))  # given bytes, it would let surrogates and UTF-16 pass


def valid(text: str) -> str:
    """The text with surrogates joined to pairs; those that stand alone become U+FFFD, as in tiktoken."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def need(package: str) -> None:
    """Refuses work for which a package is missing.

    Raises:
        UsageError: names it and how to install it.
    """
    if find_spec(package) is None:
        raise UsageError(
            f"package {package} is not installed; it is needed here; scripts/install.sh prep adds it"
        )
