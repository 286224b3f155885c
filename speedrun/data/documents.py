"""Documents in the order of their source: files and folders, or a dataset of the hub.

A document is a row of parquet, a non-blank line of JSON, or a whole .txt file; the last two may be compressed. A source
yields blocks of documents, starting at any document. `pyarrow` and `datasets` are imported on use.
"""

import hashlib
import io
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from speedrun.base.errors import DataError, UsageError, translate_read_errors
from speedrun.base.subprocesses import say
from speedrun.data import hub
from speedrun.data.shards import Position, sha256

HUB = "hub:"  #: prefix of the names of datasets
BLOCK_BYTES = 2**19  #: of text in a block: a larger one takes more memory, a smaller one more calls
BATCH_ROWS = 256  #: rows of parquet decoded at a time, of 3 kB each in FineWeb


class Block(NamedTuple):
    """Consecutive documents."""

    first: Position  #: of the first document
    texts: list[str]
    read_bytes: int  #: bytes of the source up to the end of this block


def open_source(names: Sequence[str], *, column: str = "text", revision: str | None = None) -> "Source":
    """Return the source with these names: files and folders, or one `hub:OWNER/NAME[:CONFIG]`.

    A folder stands for all its readable files, sorted by name; a line says what is left out. `column` is the field of a
    row that holds the text. The `revision` of a dataset is resolved to a commit.
    """
    if "" in names:
        raise UsageError("an empty --source; need a file, a folder, or hub:OWNER/NAME[:CONFIG]; name one")
    remote = [name for name in names if name.startswith(HUB)]
    if not remote:
        if revision is not None:
            raise UsageError(f"--revision {revision}; only {HUB} sources have one; leave it out")
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
    """The `train` split of a dataset, streamed by `datasets`."""

    def __init__(self, path: str, config: str | None, revision: str | None, *, column: str) -> None:
        """Read nothing yet; `path` is a repository of the hub, or a folder that `datasets` can read."""
        need("datasets")
        self.name = f"{HUB}{path}" + (f":{config}" if config else "")
        self.total_bytes = 0  # unknown
        self._path, self._config, self._revision, self._column = path, config, revision, column

    def identity(self) -> dict[str, str | int]:
        """Return what determines the documents and their order: repository, config, commit and column."""
        chosen = {"dataset": self._path, "config": self._config, "revision": self._revision}
        return {**{key: value for key, value in chosen.items() if value}, "column": self._column}

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield all blocks from `start` on; `Position.reader` is the state of `datasets` before the block."""
        import datasets
        from datasets.exceptions import DatasetsError
        from huggingface_hub.utils import httpx

        try:
            rows = datasets.load_dataset(
                self._path, self._config, split="train", streaming=True, revision=self._revision
            )
            _require_column(self.name, self._column, rows.column_names or [self._column])
            rows = rows.select_columns([self._column]).with_format("arrow")
            at = start.reader or {"row": 0, "state": None}
            if at["state"] is not None:
                rows.load_state_dict(at["state"])
            tables: Any = rows.iter(BATCH_ROWS)
            for table in tables:
                after = {"row": at["row"] + table.num_rows, "state": rows.state_dict()}
                place = Position("train", at["row"], reader=at)
                yield from _of_batches([table], self._column, place, start.row, self.name)
                at = after
        except UnicodeDecodeError as error:
            raise DataError(f"{self.name}: {error}; need text in UTF-8; correct the dataset") from None
        except (hub.HubError, httpx.HTTPError, OSError, ValueError, DatasetsError) as error:
            raise _unreachable(self.name, error) from None


def _unreachable(name: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return DataError(
        f"{name}: {reason}; need its rows from the hub; check name and network and run the same command again, "
        "or pass local files: --source FOLDER"
    )


class Files:
    """Files of parquet, JSON lines and plain text, also compressed."""

    def __init__(self, names: Sequence[str], column: str) -> None:
        """Find the files and read none; raise UsageError if two have the same name, as places would be ambiguous."""
        self.name = " ".join(names)
        self._column = column
        found = [file for name in names for file in _files_of(Path(name))]
        self._paths = dict(found)
        if len(self._paths) < len(found):
            raise UsageError(f"{self.name}: two files have the same name; give the folder above them")
        for label, path in found:
            if valid(self.name + label) != self.name + label:  # Python turns other bytes into surrogates
                raise DataError(f"{str(path)!r}: the name is not UTF-8; the manifest needs it; rename it")
        if any(format_of(path)[0] == ".parquet" or format_of(path)[1] for path in self._paths.values()):
            need("pyarrow")
        self._bytes = {label: path.stat().st_size for label, path in found}
        self.total_bytes = sum(self._bytes.values())

    def identity(self) -> dict[str, str | int]:
        """Return what determines the documents and their order: a digest of names and contents, and the column."""
        digests = {}
        for label, path in self._paths.items():
            with _one_line(path):
                digests[label] = sha256(path)
        listing = json.dumps(list(digests.items()))
        return {
            "files": len(self._bytes),
            "files_sha256": hashlib.sha256(listing.encode()).hexdigest(),
            "column": self._column,
        }

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield all blocks from `start` on."""
        labels = list(self._paths)
        first = labels.index(start.file) if start.file else 0
        read_bytes = sum(self._bytes[label] for label in labels[:first])
        for label in labels[first:]:
            path = self._paths[label]
            row = start.row if label == start.file else 0
            with _one_line(path):
                for block in _READERS[format_of(path)[0]](path, row, self._column):
                    place = Position(label, block.first.row)
                    yield block._replace(first=place, read_bytes=read_bytes + block.read_bytes)
            read_bytes += self._bytes[label]


Source = Dataset | Files


def _one_line(path: Path) -> AbstractContextManager[None]:
    return translate_read_errors(path, "need a readable file, its text in UTF-8; convert it or get it again")


def format_of(path: Path) -> tuple[str, str]:
    """Return the suffix of a file in small letters, and that of its compression, which may be empty."""
    name = path.name.lower()
    packed = next((suffix for suffix in _PACKED if name.endswith(suffix)), "")
    return Path(name.removesuffix(packed)).suffix, packed


def _is_readable(path: Path) -> bool:
    return "".join(format_of(path)) in READERS


def _files_of(path: Path) -> list[tuple[str, Path]]:
    """Return the files of a name, with their labels in places; `say` what is left out."""
    if path.is_dir():
        inside, others = [], defaultdict[str, list[str]](list)
        for file, why in _below(path, set()):
            label = file.relative_to(path).as_posix()
            others[why].append(label) if why else inside.append((label, file))
        said = (f"{len(some)} {why} ({some[0]}{', ...' * (len(some) > 1)})" for why, some in others.items())
        left = ", ".join(said)
        if left:
            say(f"left out of {path}: {left}")
        if not inside:
            raise DataError(f"{path}: no file to read; need {', '.join(READERS)}; name another folder")
        return inside
    if not path.is_file():
        raise DataError(f"{path}: no such file; a --source is a file, a folder, or hub:OWNER/NAME[:CONFIG]")
    if not _is_readable(path):
        raise DataError(f"{path}: cannot be read; need {', '.join(READERS)}; convert it first")
    return [(path.name, path)]


def _below(folder: Path, seen: set[str]) -> Iterator[tuple[Path, str]]:
    """Yield the files below a folder, also through links, in order, with the reason to leave one out, or none."""
    if (real := os.path.realpath(folder)) in seen:
        yield folder, "linked twice"
        return
    seen.add(real)
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            yield path, "hidden"
        elif path.is_dir():
            yield from _below(path, seen)
        elif not path.is_file():
            yield path, "no file"
        else:
            suffix = "".join(path.suffixes[-1 - (path.suffix in _PACKED) :])
            yield path, "" if _is_readable(path) else suffix or "without suffix"


_PACKED = {".gz": "gzip", ".zst": "zstd"}  #: suffix of a compression -> its name in Arrow


def _unpacked(file: IO[bytes], path: Path) -> IO[bytes]:
    if not (packed := format_of(path)[1]):
        return file
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(file, _PACKED[packed]), BLOCK_BYTES)


def _json_lines(path: Path, row: int, column: str) -> Iterator[Block]:
    with path.open("rb") as file:
        texts, size, unpacked = [], 0, _unpacked(file, path)
        for number, line in islice(enumerate(line for line in unpacked if not line.isspace()), row, None):
            texts.append(_of_line(line, column, str(path), number))
            size += len(line)
            if size >= BLOCK_BYTES:
                yield Block(Position("", row), texts, file.tell())
                row, texts, size = number + 1, [], 0
        if texts:
            yield Block(Position("", row), texts, file.tell())


def _text(path: Path, row: int, column: str) -> Iterator[Block]:
    if row == 0:
        with path.open("rb") as file:
            text = _unpacked(file, path).read().decode("utf-8-sig")  # keeps CRLF
        if "\0" in text:
            raise DataError(f"{path}: has NUL characters, as UTF-16 and binary files do; convert it to UTF-8")
        yield Block(Position("", 0), [text], path.stat().st_size)


def _parquet(path: Path, row: int, column: str) -> Iterator[Block]:
    """Yield rows; skip the row groups before `row`."""
    import pyarrow.parquet
    from pyarrow import ArrowException

    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            _require_column(str(path), column, file.schema_arrow.names)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            group, skipped = 0, 0
            while group < len(sizes) and skipped + sizes[group] <= row:
                skipped, group = skipped + sizes[group], group + 1
            groups = list(range(group, len(sizes)))
            batches = file.iter_batches(BATCH_ROWS, row_groups=groups, columns=[column], use_threads=False)
            per_row = path.stat().st_size / max(1, sum(sizes))
            for block in _of_batches(batches, column, Position("", skipped), row, str(path)):
                yield block._replace(read_bytes=round(per_row * (block.first.row + len(block.texts))))
    except (ArrowException, UnicodeDecodeError) as error:  # Arrow does not check names and texts
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: {reason}; need a whole parquet file; get it again") from None


_READERS = {".parquet": _parquet, ".jsonl": _json_lines, ".txt": _text}
#: Suffixes of files that are read, in any case.
READERS = [".parquet", *(form + packed for form in (".jsonl", ".txt") for packed in ("", *_PACKED))]


def texts(source: Source) -> Iterator[str]:
    """Yield all texts of a source."""
    for block in source.blocks(Position("", 0)):
        yield from block.texts


def valid(text: str) -> str:
    """Return the text with surrogate pairs joined and lone surrogates replaced by U+FFFD, as tiktoken does."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def need(package: str) -> None:
    """Raise UsageError unless a package is installed."""
    if find_spec(package) is None:
        raise UsageError(f"package {package} is not installed; scripts/install.sh prep adds it")


def _of_batches(batches: Iterable[Any], column: str, at: Position, row: int, name: str) -> Iterator[Block]:
    """Yield blocks of Arrow's batches or tables from a row on; the first batch is at `at`."""
    for batch in batches:
        first, texts = max(row, at.row), []
        for number, value in enumerate(batch.column(column).slice(first - at.row), first):
            texts.append(_checked(value.as_py(), name, number, column))
        if texts:
            yield Block(msgspec.structs.replace(at, row=first), texts, 0)
        at = msgspec.structs.replace(at, row=at.row + batch.num_rows)


def _require_column(name: str, column: str, names: Sequence[str]) -> None:
    if names.count(column) != 1:
        raise DataError(f"{name}: need {column!r} once; it has {', '.join(names)}; choose with --column")


def _of_line(line: bytes, column: str, name: str, row: int) -> str:
    try:
        found = json.loads(line.decode("utf-8-sig"))  # from bytes, json accepts surrogates and UTF-16
    except UnicodeDecodeError as error:
        said = f"row {row:,} is not UTF-8 at its byte {error.start:,}"
        raise DataError(f"{name}: {said}; repair or remove it") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: row {row:,} is not JSON: {error}; repair or remove it") from None
    if not isinstance(found, dict):
        raise DataError(f"{name}: row {row:,} is not a JSON object; repair or remove it")
    return _checked(found.get(column), name, row, column)


def _checked(text: object, name: str, row: int, column: str) -> str:
    if not isinstance(text, str):
        got = f"{type(text).__name__} as {column!r}"
        raise DataError(f"{name}: row {row:,} has {got}; need a text; choose with --column or repair it")
    return valid(text)
