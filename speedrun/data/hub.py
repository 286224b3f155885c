"""The Hugging Face hub: what a dataset repository holds, and single files of it.

`huggingface_hub` reads endpoint and token from HF_ENDPOINT, HF_TOKEN and `hf auth login`. It resumes a broken
transfer within one process and checks only the size of a file: callers of `download` check the digest.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

from speedrun.ground.errors import refusals_told

if TYPE_CHECKING:
    from huggingface_hub.hf_api import DatasetInfo, RepoSibling

_TIMEOUT_S = 10.0  #: of a request for metadata
_MAX_RESTARTS = 3  #: of one transfer, by servers that do not resume


class Listing(NamedTuple):
    """A dataset at one commit."""

    repo: str  #: as OWNER/NAME
    commit: str
    files: "dict[str, RepoSibling]"  #: by name


class HubError(Exception):
    """Why a request to the hub failed, as the middle part of an error message."""


def reach(timeout_s: float) -> None:
    """Send one request to the hub.

    Raises:
        HubError: if there is no answer in time. Name resolution does not count.
    """
    endpoint = _endpoint()
    from huggingface_hub.utils import get_session

    with _client_errors():
        get_session().head(endpoint, timeout=timeout_s)


def commit_of(repo: str, revision: str | None) -> str:
    """Return the commit of a branch or tag of a dataset; of the default branch for None.

    Raises:
        HubError: if there is no answer, or no such repository or revision.
    """
    return _info(repo, revision).sha or ""


def listing(repo: str, revision: str) -> Listing:
    """Return the files of a dataset, with sizes and digests.

    Raises:
        HubError: if there is no answer, or no such repository or revision.
    """
    info = _info(repo, revision, files_metadata=True)
    return Listing(repo, info.sha or "", {file.rfilename: file for file in info.siblings or ()})


def _info(repo: str, revision: str | None, *, files_metadata: bool = False) -> "DatasetInfo":
    # The tests cover plain HTTP, not Xet. The client reads this variable at import.
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    endpoint = _endpoint()
    from huggingface_hub import HfApi
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # its warnings contain signed addresses
    ask = partial(HfApi(endpoint=endpoint).dataset_info, repo, revision=revision, timeout=_TIMEOUT_S)
    with _client_errors():
        info = ask(files_metadata=files_metadata)
    if not info.sha:
        raise HubError("the hub names no commit")
    return info


def download(remote: Listing, name: str, folder: Path, count: Callable[[int], None]) -> None:
    """Download one file into a folder, unless an earlier call put it there. It appears when it is complete.

    Args:
        remote: a dataset.
        name: of the file.
        folder: also gets a `.cache` with the client's metadata and parts of files.
        count: gets the bytes of each piece, negative if a transfer starts over. May raise to stop it.

    Raises:
        HubError: if the client gives up.
        StorageError: if the file cannot be written.
    """
    from huggingface_hub import hf_hub_download

    fetch = partial(hf_hub_download, remote.repo, name, repo_type="dataset", revision=remote.commit)
    meter: Any = partial(_Meter, count)
    with refusals_told(folder / name), _client_errors():
        fetch(local_dir=folder, endpoint=_endpoint(), tqdm_class=meter)


class _Meter:
    """Replaces the client's progress bar and only counts."""

    def __init__(self, count: Callable[[int], None], **_options: object) -> None:
        self._count = count
        self._restarts = 0

    def update(self, num_bytes: int) -> None:
        """Count a piece; end a transfer that keeps starting over, which the client would follow without end."""
        self._restarts += num_bytes < 0
        if self._restarts > _MAX_RESTARTS:
            raise HubError(f"the transfer broke off and started over {self._restarts} times")
        self._count(num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def _endpoint() -> str:
    """Return the address of the hub. The client reads it at import only, and fails there if it is malformed."""
    address = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    try:
        parts = urlsplit(address)
        is_address = parts.hostname is not None and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise HubError(f"HF_ENDPOINT is {address!r}, need an address such as https://huggingface.co")
    return address


@contextmanager
def _client_errors() -> Iterator[None]:
    """Raise HubError in place of the client's own exceptions. Errors of the disk pass."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import httpx

    try:
        yield
    except (httpx.HTTPError, HFValidationError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise HubError(_reason(error)) from None


def _reason(error: Exception) -> str:
    """Return what went wrong, in one line without addresses: they may be signed."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return _reason(error.__cause__)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, HfHubHTTPError):
        return f"the hub answers {error.response.status_code}, {type(error).__name__}"
    words = " ".join(str(error).split()) or type(error).__name__
    return f"no connection ({words})" if isinstance(error, httpx.HTTPError) else words
