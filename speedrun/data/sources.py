"""A source of documents by its name: files and folders, or a dataset of the hub."""

from collections.abc import Sequence

from speedrun.data.documents import Source
from speedrun.data.hub_rows import HUB, Dataset, commit_of
from speedrun.data.text_files import Files
from speedrun.ground.errors import UsageError


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
    commit = commit_of(repository, revision)
    return Dataset(repository, config or None, commit, column=column)
