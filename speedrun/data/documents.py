"""Documents in the order of their source, in blocks that workers take apart.

A source hands out small blocks, and can be entered again at any document. What a source is stands
in `text_files` and `hub_rows`.
"""

import json
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import msgspec

from speedrun.data.inventory import Place
from speedrun.errors import DataError, UsageError

#: Rows of parquet that are decoded at once; FineWeb's hold 3 kB each.
BATCH_ROWS = 256

TOKEN_COUNT = "token_count"  #: FineWeb's own column: GPT-2 tokens of a document


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
        DataError: if a row has no text.
    """
    for batch in batches:
        skip = min(max(0, row - at.row), batch.num_rows)
        texts = batch.column(column).to_pylist()[skip:]
        tokens = batch.column(TOKEN_COUNT).to_pylist()[skip:] if TOKEN_COUNT in batch.schema.names else None
        for offset, text in enumerate(texts):
            if not isinstance(text, str):
                raise no_text(name, at.row + skip + offset, column, text)
        if texts:
            yield Block(Place(at.file, at.row + skip), len(texts), texts, tokens, 0)
        at = Place(at.file, at.row + batch.num_rows)


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
    counts = [count for row in rows if isinstance(count := row.get(TOKEN_COUNT), int)]
    return Documents(texts, counts if len(counts) == len(rows) else None)


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
    except ValueError as error:
        raise DataError(
            f"{first.file}: row {first.row + number:,} is no JSON: {error}; repair or remove it"
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{first.file}: row {first.row + number:,} is no JSON object; repair or remove it")
    return row


def _parsed(line: bytes) -> Any:
    """As `json.loads`, twice as fast; what is stricter than that, as with lone surrogates, is left to it."""
    try:
        return msgspec.json.decode(line)
    except ValueError:  # msgspec's own errors are some of these
        return json.loads(line)


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
