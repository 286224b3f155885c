"""Documents of a dataset of the hub, streamed by `datasets`: nothing is stored, and any row is found again.

datasets and huggingface_hub are imported by what needs them.
"""

from collections.abc import Iterator
from typing import Any

from speedrun.data import documents
from speedrun.data.documents import TOKEN_COUNT, Block, need, of_batches
from speedrun.data.inventory import Place
from speedrun.ground.errors import DataError

HUB = "hub:"  #: opens the name of such a source


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
            rows = rows.select_columns([name for name in (self._column, TOKEN_COUNT) if name in names])
            rows = rows.with_format("arrow")
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
        except (*_network_errors(), ValueError, DatasetsError) as error:
            raise _unreachable(self.name, error) from None


def commit_of(repository: str, revision: str | None) -> str:
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
