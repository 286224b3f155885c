"""Documents in the order of their source: files of text, or a dataset of the hub.

A source hands out blocks, about a megabyte of documents each, which worker processes take apart. The order is
that of the files' names and of the rows inside; it can be entered again at any row. A document is the text of
one row of parquet, of one line of JSON that is not blank, or of a whole .txt file.

pyarrow, datasets and huggingface_hub are imported by the readers that need them.
"""

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from speedrun.data.inventory import Place
from speedrun.errors import DataError, UsageError

#: A block is closed when it holds this much text. Larger ones cost memory, smaller ones messages.
BLOCK_BYTES = 2**20
#: Rows of parquet that are decoded at once; FineWeb's hold 3 kB each.
_BATCH_ROWS = 256

HUB = "hub:"
_TOKEN_COUNT = "token_count"  #: FineWeb's own column: GPT-2 tokens of a document


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


def open_source(names: Sequence[str], *, column: str = "text", revision: str | None = None) -> Source:
    """The source of these names: files and folders, or one `hub:OWNER/NAME[:CONFIG]`.

    Args:
        names: a folder stands for all files in it that can be read, by name.
        column: which field of a row is the text.
        revision: of a dataset of the hub; resolved to a commit.

    Raises:
        UsageError: if the names do not go together, or a package is missing.
        DataError: if there is no such file, or the hub cannot be reached.
    """
    hub = [name for name in names if name.startswith(HUB)]
    if not hub:
        if revision is not None:
            raise UsageError(
                f"--revision {revision} of {names[0]}; only a {HUB} source has one; leave it out"
            )
        return Files(names, column)
    if len(names) > 1:
        raise UsageError(f"{len(names)} sources with {hub[0]}; a dataset of the hub comes alone; name one")
    repository, _, config = hub[0].removeprefix(HUB).partition(":")
    commit = _commit(repository, revision)
    return Dataset(repository, config or None, commit, column=column)


class Files:
    """Files of parquet, JSON lines (also gzipped) and plain text."""

    def __init__(self, names: Sequence[str], column: str) -> None:
        """Finds the files; reads none.

        Raises:
            UsageError: if two of them have one name; without it no row could be found again.
            DataError: if there are none.
        """
        self.name = " ".join(names)
        self._column = column
        found = [file for name in names for file in _files_of(Path(name))]
        self._paths = dict(found)
        if len(self._paths) < len(found):
            twice = next(label for label, path in found if self._paths[label] != path)
            raise UsageError(
                f"{self.name}: two files are {twice}; names must differ; give the folder above them"
            )
        if any(suffix_of(path) == ".parquet" for path in self._paths.values()):
            need("pyarrow")
        self._bytes = {label: path.stat().st_size for label, path in found}
        self.total_bytes = sum(self._bytes.values())

    def identity(self) -> dict[str, str | int]:
        """Names and sizes of the files: reading all of them would take as long as the work itself."""
        listing = json.dumps(list(self._bytes.items()))
        return {
            "files": len(self._bytes),
            "files_sha256": hashlib.sha256(listing.encode()).hexdigest(),
            "column": self._column,
        }

    def blocks(self, start: Place) -> Iterator[Block]:
        """All blocks from `start` on.

        Raises:
            DataError: if a file cannot be read or has no such column.
        """
        labels = list(self._paths)
        first = labels.index(start.file) if start.file else 0
        read_bytes = sum(self._bytes[label] for label in labels[:first])
        for label in labels[first:]:
            path = self._paths[label]
            row = start.row if label == start.file else 0
            try:
                for block in READERS[suffix_of(path)](path, row, self._column):
                    place = Place(label, block.first.row)
                    yield block._replace(first=place, read_bytes=read_bytes + block.read_bytes)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{path}: {error}; a readable file is needed; get it again") from None
            read_bytes += self._bytes[label]


def suffix_of(path: Path) -> str:
    """The kind of a file: a key of `READERS`, or something else."""
    return next((suffix for suffix in READERS if path.name.endswith(suffix)), path.suffix)


def _files_of(path: Path) -> list[tuple[str, Path]]:
    """The files that a name stands for, and what to call each of them."""
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if suffix_of(file) in READERS and file.is_file())
        if not inside:
            raise DataError(f"{path}: no file to read; need {', '.join(READERS)}; name another folder")
        return [(file.relative_to(path).as_posix(), file) for file in inside]
    if not path.is_file():
        raise DataError(f"{path}: no such file; a --source is a file, a folder, or {HUB}OWNER/NAME[:CONFIG]")
    if suffix_of(path) not in READERS:
        raise DataError(f"{path}: cannot be read; need {', '.join(READERS)}; convert it first")
    return [(path.name, path)]


# --- readers of files -------------------------------------------------------------------------------------


def _json_lines(path: Path, row: int, column: str) -> Iterator[Block]:
    """Lines as they are: taking them apart is work for many processes."""
    with path.open("rb") as file:
        # GzipFile's own lines are made one by one in Python.
        unpacked: IO[bytes] = (
            io.BufferedReader(gzip.GzipFile(fileobj=file), BLOCK_BYTES) if path.name.endswith(".gz") else file
        )
        lines, size = [], 0
        for number, line in enumerate(line for line in unpacked if not line.isspace()):
            if number < row:
                continue
            lines.append(line)
            size += len(line)
            if size >= BLOCK_BYTES:
                yield Block(Place("", row), len(lines), b"".join(lines), None, file.tell())
                row, lines, size = row + len(lines), [], 0
        if lines:
            yield Block(Place("", row), len(lines), b"".join(lines), None, file.tell())


def _text(path: Path, row: int, column: str) -> Iterator[Block]:
    """One document."""
    if row > 0:
        return
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start:,} is no UTF-8; convert the file first") from None
    yield Block(Place("", 0), 1, [text], None, path.stat().st_size)


def _parquet(path: Path, row: int, column: str) -> Iterator[Block]:
    """Row group by row group; those before `row` are not read."""
    import pyarrow.parquet
    from pyarrow import ArrowInvalid

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise DataError(
                    f"{path}: no column {column!r}; it has {', '.join(names)}; choose with --column"
                )
            wanted = [name for name in (column, _TOKEN_COUNT) if name in names]
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            group, skipped = 0, 0
            while group < len(sizes) and skipped + sizes[group] <= row:
                skipped, group = skipped + sizes[group], group + 1
            groups = list(range(group, len(sizes)))
            batches = file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=wanted, use_threads=False)
            per_row = path.stat().st_size / max(1, sum(sizes))
            for block in _of_batches(batches, column, Place("", skipped), row, str(path)):
                yield block._replace(read_bytes=round(per_row * (block.first.row + block.num_rows)))
    except ArrowInvalid as error:
        raise DataError(f"{path}: {error}; a whole parquet file is needed; get it again") from None


READERS = {".parquet": _parquet, ".jsonl": _json_lines, ".jsonl.gz": _json_lines, ".txt": _text}


def _of_batches(batches: Iterable[Any], column: str, at: Place, row: int, name: str) -> Iterator[Block]:
    """Arrow's batches or tables as blocks; `at` is where they begin, `row` where the documents that count do."""
    for batch in batches:
        skip = min(max(0, row - at.row), batch.num_rows)
        texts = batch.column(column).to_pylist()[skip:]
        tokens = batch.column(_TOKEN_COUNT).to_pylist()[skip:] if _TOKEN_COUNT in batch.schema.names else None
        for offset, text in enumerate(texts):
            if not isinstance(text, str):
                raise _no_text(name, at.row + skip + offset, column, text)
        if texts:
            yield Block(Place(at.file, at.row + skip), len(texts), texts, tokens, 0)
        at = Place(at.file, at.row + batch.num_rows)


def _no_text(name: str, row: int, column: str, got: object) -> DataError:
    return DataError(
        f"{name}: row {row:,} has {type(got).__name__} as {column!r}; need a text; choose with --column or repair it"
    )


# --- a dataset of the hub ---------------------------------------------------------------------------------


class Dataset:
    """The `train` split of a dataset, read as a stream by `datasets`; nothing is stored."""

    def __init__(self, path: str, config: str | None, revision: str | None, *, column: str) -> None:
        """Names it; reads nothing.

        Args:
            path: a repository of the hub, or a folder that `datasets` can read.
            config: which part of it.
            revision: a commit; None for a folder.
            column: which one is the text.

        Raises:
            UsageError: if `datasets` is not installed.
        """
        need("datasets")
        self.name = f"{HUB}{path}" + (f":{config}" if config else "")
        self.total_bytes = 0
        self._path, self._config, self._revision, self._column = path, config, revision, column

    def identity(self) -> dict[str, str | int]:
        """Repository, config and commit."""
        chosen = {"dataset": self._path, "config": self._config, "revision": self._revision}
        return {**{key: value for key, value in chosen.items() if value}, "column": self._column}

    def blocks(self, start: Place) -> Iterator[Block]:
        """All blocks from `start` on; the reader's own state leads back to the file that row stands in.

        Raises:
            DataError: if the connection breaks, or there is no such column.
        """
        import datasets
        from datasets.exceptions import DatasetsError

        try:
            rows = datasets.load_dataset(
                self._path, self._config, split="train", streaming=True, revision=self._revision
            )
            names = rows.column_names or [self._column]
            if self._column not in names:
                raise DataError(
                    f"{self.name}: no column {self._column!r}; it has {', '.join(names)}; choose with --column"
                )
            rows = rows.select_columns([name for name in (self._column, _TOKEN_COUNT) if name in names])
            rows = rows.with_format("arrow")
            at = start.reader or {"row": 0, "state": None}
            if at["state"] is not None:
                rows.load_state_dict(at["state"])
            tables: Any = rows.iter(_BATCH_ROWS)
            for table in tables:
                after = {"row": at["row"] + table.num_rows, "state": rows.state_dict()}
                for block in _of_batches(
                    [table], self._column, Place("train", at["row"]), start.row, self.name
                ):
                    yield block._replace(first=Place("train", block.first.row, reader=at))
                at = after
        except (*_network_errors(), ValueError, DatasetsError) as error:
            raise _unreachable(self.name, error) from None


def _commit(repository: str, revision: str | None) -> str:
    """The commit that a revision of a dataset stands for today.

    Raises:
        DataError: if the hub cannot be reached, or has no such thing.
    """
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(repository, revision=revision, timeout=10).sha
    except (*_network_errors(), ValueError) as error:
        raise _unreachable(f"{HUB}{repository}", error) from None
    if commit is None:
        raise DataError(f"{HUB}{repository}: the hub names no commit; one is needed; pass --revision COMMIT")
    return commit


def _network_errors() -> tuple[type[BaseException], ...]:
    """What the hub's client raises: the errors of its HTTP library, whose name changed, and OSError."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__


def _unreachable(name: str, error: BaseException) -> DataError:
    said = " ".join(str(error).split())[:200] or type(error).__name__
    return DataError(
        f"{name}: {said}; wanted its rows from the hub; check the name and the network and go on with the same "
        "command, or pass files that are here: --source FOLDER"
    )


# --- in the workers ---------------------------------------------------------------------------------------


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
            raise _no_text(block.first.file, block.first.row + number, column, text)
        texts.append(valid(text))
    counts = [count for row in rows if isinstance(count := row.get(_TOKEN_COUNT), int)]
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
        row = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{first.file}: row {first.row + number:,} is no JSON: {error}; repair or remove it"
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{first.file}: row {first.row + number:,} is no JSON object; repair or remove it")
    return row


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
