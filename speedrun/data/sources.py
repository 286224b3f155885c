"""Opens a source of documents by its name: files and folders, or a dataset of the hub."""

from collections.abc import Iterator, Sequence
from typing import Any

from speedrun.data import documents, hub
from speedrun.data.documents import Block, Source, need, of_batches
from speedrun.data.inventory import Place
from speedrun.data.text_files import Files
from speedrun.ground.errors import DataError, UsageError

HUB = "hub:"  #: prefix of the names of datasets


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
