"""Sources of documents, by name: files and folders, or a dataset of the hub.

Documents of files are rows of parquet, non-blank lines of JSON, or a whole .txt file, sorted by file name, then by row.
`pyarrow` and `datasets` are imported where they are used.
"""

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import IO, Any

from speedrun.data import documents, hub
from speedrun.data.documents import Block, Source, need, of_batches, valid
from speedrun.data.inventory import Place
from speedrun.ground.errors import DataError, UsageError, translate_read_errors

HUB = "hub:"  #: prefix of the names of datasets
BLOCK_BYTES = 2**19  #: of text in a block: larger ones take memory, smaller ones more calls


def open_source(names: Sequence[str], *, column: str = "text", revision: str | None = None) -> Source:
    """Return the source with these names: files and folders, or one `hub:OWNER/NAME[:CONFIG]`.

    Args:
        names: a folder stands for all readable files in it, sorted by name.
        column: the field of a row that holds the text.
        revision: of a dataset of the hub; resolved to a commit.

    Raises:
        UsageError: if the names cannot be combined, or a package is missing.
        DataError: if a file is missing, or the hub cannot be reached.
    """
    remote = [name for name in names if name.startswith(HUB)]
    if not remote:
        if revision is not None:
            raise UsageError(
                f"--revision {revision} of {names[0]}; only a {HUB} source has one; leave it out"
            )
        return Files(names, column)
    if len(names) > 1:
        raise UsageError(f"{len(names)} sources with {remote[0]}; a dataset of the hub comes alone; name one")
    repo, _, config = remote[0].removeprefix(HUB).partition(":")
    try:
        commit = hub.dataset_info(repo, revision).sha
    except hub.HubError as error:
        raise _unreachable(f"{HUB}{repo}", error) from None
    return Dataset(repo, config or None, commit, column=column)


class Dataset:
    """The `train` split of a dataset, streamed by `datasets` without storing it."""

    def __init__(self, path: str, config: str | None, revision: str | None, *, column: str) -> None:
        """Keep the names; read nothing.

        `path` is a repository of the hub, or a folder that `datasets` can read.

        Raises:
            UsageError: if `datasets` is not installed.
        """
        need("datasets")
        self.name = f"{HUB}{path}" + (f":{config}" if config else "")
        self.total_bytes = 0
        self._path, self._config, self._revision, self._column = path, config, revision, column

    def identity(self) -> dict[str, str | int]:
        """Return repository, config, commit and column."""
        chosen = {"dataset": self._path, "config": self._config, "revision": self._revision}
        return {**{key: value for key, value in chosen.items() if value}, "column": self._column}

    def blocks(self, start: Place) -> Iterator[Block]:
        """Yield all blocks from `start` on. `Place.reader` holds the state of `datasets` before that block.

        Raises:
            DataError: if the connection breaks, or there is no such column.
        """
        import datasets
        from datasets.exceptions import DatasetsError
        from huggingface_hub.utils import httpx

        try:
            rows = datasets.load_dataset(
                self._path, self._config, split="train", streaming=True, revision=self._revision
            )
            documents.require_column(self.name, self._column, rows.column_names or [self._column])
            rows = rows.select_columns([self._column]).with_format("arrow")
            at = start.reader or {"row": 0, "state": None}
            if at["state"] is not None:
                rows.load_state_dict(at["state"])
            tables: Any = rows.iter(documents.BATCH_ROWS)
            for table in tables:
                after = {"row": at["row"] + table.num_rows, "state": rows.state_dict()}
                for block in of_batches(
                    [table], self._column, Place("train", at["row"]), start.row, self.name
                ):
                    yield block._replace(first=Place("train", block.first.row, reader=at))
                at = after
        except (httpx.HTTPError, OSError, ValueError, DatasetsError) as error:
            raise _unreachable(self.name, error) from None


def _unreachable(name: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return DataError(
        f"{name}: {reason}; its rows are needed from the hub; check the name and the network and run the same "
        "command again, or pass local files: --source FOLDER"
    )


# --- files ---------------------------------------------------------------------------------------------


class Files:
    """Files of parquet, JSON lines (also gzipped) and plain text."""

    def __init__(self, names: Sequence[str], column: str) -> None:
        """Find the files; read none.

        Raises:
            UsageError: if two files have the same name: places in them would be ambiguous.
            DataError: if there are none, or a name is not UTF-8.
        """
        self.name = " ".join(names)
        self._column = column
        found = [file for name in names for file in _files_of(Path(name))]
        self._paths = dict(found)
        if len(self._paths) < len(found):
            raise UsageError(f"{self.name}: two files have one name; need others; give the folder above them")
        for label, path in found:
            if valid(self.name + label) != self.name + label:  # Python turns other bytes into surrogates
                raise DataError(
                    f"{str(path)!r}: the name is not UTF-8; the manifest needs it; rename the file"
                )
        if any(suffix_of(path) == ".parquet" for path in self._paths.values()):
            need("pyarrow")
        self._bytes = {label: path.stat().st_size for label, path in found}
        self.total_bytes = sum(self._bytes.values())

    def identity(self) -> dict[str, str | int]:
        """Return a digest of names and contents. To tokenize takes many times as long as to read.

        Raises:
            DataError: if a file cannot be read.
        """
        digests = {}
        for label, path in self._paths.items():
            with _one_line(path), path.open("rb") as file:
                digests[label] = hashlib.file_digest(file, "sha256").hexdigest()
        listing = json.dumps(list(digests.items()))
        return {
            "files": len(self._bytes),
            "files_sha256": hashlib.sha256(listing.encode()).hexdigest(),
            "column": self._column,
        }

    def blocks(self, start: Place) -> Iterator[Block]:
        """Yield all blocks from `start` on.

        Raises:
            DataError: if a file cannot be read or has no such column.
        """
        labels = list(self._paths)
        first = labels.index(start.file) if start.file else 0
        read_bytes = sum(self._bytes[label] for label in labels[:first])
        for label in labels[first:]:
            path = self._paths[label]
            row = start.row if label == start.file else 0
            with _one_line(path):
                for block in READERS[suffix_of(path)](path, row, self._column):
                    place = Place(label, block.first.row)
                    yield block._replace(first=place, read_bytes=read_bytes + block.read_bytes)
            read_bytes += self._bytes[label]


def _one_line(path: Path) -> AbstractContextManager[None]:
    return translate_read_errors(path, "a readable file is needed; get it again", EOFError, zlib.error)


def suffix_of(path: Path) -> str:
    """Return the suffix of a file: a key of `READERS`, or another one."""
    return next((suffix for suffix in READERS if path.name.endswith(suffix)), path.suffix)


def _files_of(path: Path) -> list[tuple[str, Path]]:
    """Return the files that a name stands for, with the label of each in places."""
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if suffix_of(file) in READERS and file.is_file())
        if not inside:
            raise DataError(f"{path}: no file to read; need {', '.join(READERS)}; name another folder")
        return [(file.relative_to(path).as_posix(), file) for file in inside]
    if not path.is_file():
        raise DataError(f"{path}: no such file; a --source is a file, a folder, or hub:OWNER/NAME[:CONFIG]")
    if suffix_of(path) not in READERS:
        raise DataError(f"{path}: cannot be read; need {', '.join(READERS)}; convert it first")
    return [(path.name, path)]


# --- readers of files -------------------------------------------------------------------------------------


def _json_lines(path: Path, row: int, column: str) -> Iterator[Block]:
    """Yield the lines that are not blank."""
    with path.open("rb") as file:
        # GzipFile itself splits lines in Python.
        unpacked: IO[bytes] = (
            io.BufferedReader(gzip.GzipFile(fileobj=file), BLOCK_BYTES) if path.name.endswith(".gz") else file
        )
        texts, size = [], 0
        for number, line in islice(enumerate(line for line in unpacked if not line.isspace()), row, None):
            texts.append(documents.of_line(line, column, str(path), number))
            size += len(line)
            if size >= BLOCK_BYTES:
                yield Block(Place("", row), texts, file.tell())
                row, texts, size = number + 1, [], 0
        if texts:
            yield Block(Place("", row), texts, file.tell())


def _text(path: Path, row: int, column: str) -> Iterator[Block]:
    """Yield one document."""
    if row == 0:
        text = path.read_bytes().decode()  # not read_text, which would turn CRLF into LF
        yield Block(Place("", 0), [text], path.stat().st_size)


def _parquet(path: Path, row: int, column: str) -> Iterator[Block]:
    """Yield rows, without reading the row groups before `row`."""
    import pyarrow.parquet
    from pyarrow import ArrowException

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            documents.require_column(str(path), column, file.schema_arrow.names)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            group, skipped = 0, 0
            while group < len(sizes) and skipped + sizes[group] <= row:
                skipped, group = skipped + sizes[group], group + 1
            groups = list(range(group, len(sizes)))
            batches = file.iter_batches(
                documents.BATCH_ROWS, row_groups=groups, columns=[column], use_threads=False
            )
            per_row = path.stat().st_size / max(1, sum(sizes))
            for block in of_batches(batches, column, Place("", skipped), row, str(path)):
                yield block._replace(read_bytes=round(per_row * (block.first.row + len(block.texts))))
    except (ArrowException, UnicodeDecodeError) as error:  # names of columns may not be UTF-8
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: {reason}; a whole parquet file is needed; get it again") from None


READERS = {".parquet": _parquet, ".jsonl": _json_lines, ".jsonl.gz": _json_lines, ".txt": _text}
