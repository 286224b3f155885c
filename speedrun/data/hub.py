"""The Hugging Face hub: what a dataset repository holds, and single files of it or of a model's repository.

`huggingface_hub` reads endpoint and token from HF_ENDPOINT, HF_TOKEN and `hf auth login`. It resumes a broken
transfer within one process and checks only the size of a file: callers of `download` check the digest.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from speedrun.ground.errors import translate_os_errors

if TYPE_CHECKING:
    from huggingface_hub.hf_api import DatasetInfo

_TIMEOUT_S = 10.0  #: of a request for metadata


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


def dataset_info(repo: str, revision: str | None, *, files_metadata: bool = False) -> "DatasetInfo":
    """Return the commit and the files of a dataset repository.

    `revision` is a branch, tag or commit; None: the default branch. With `files_metadata`, files have size and digest.

    Raises:
        HubError: if there is no answer, or no such repository or revision.
    """
    # The tests cover plain HTTP, not Xet, which needs a real progress bar. The client reads this at import.
    os.environ["HF_HUB_DISABLE_XET"] = "1"
    endpoint = _endpoint()
    from huggingface_hub import HfApi
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # its warnings contain signed addresses
    request = partial(HfApi(endpoint=endpoint).dataset_info, repo, revision=revision, timeout=_TIMEOUT_S)
    with _client_errors():
        try:
            info = request(files_metadata=files_metadata)
        except (
            JSONDecodeError,
            UnicodeDecodeError,
            TypeError,
            KeyError,
        ):  # such as the page of a network's login
            raise HubError("the answer is not that of a hub") from None
    if not info.sha:
        raise HubError("the hub names no commit")
    return info


def download(repo: str, commit: str, name: str, folder: Path, count: Callable[[int], None]) -> None:
    """Download one file into a folder, unless an earlier call put it there. It appears when it is complete.

    The folder also gets a `.cache` with the client's metadata and parts of files. `count` is called with the bytes of
    each piece, negative if the transfer starts over; it may raise to stop it.

    Raises:
        HubError: if the client gives up.
        StorageError: if the file cannot be written.
    """
    from huggingface_hub import hf_hub_download

    fetch = partial(hf_hub_download, repo, name, repo_type="dataset", revision=commit, local_dir=folder)
    bar: Any = lambda **_options: nullcontext(SimpleNamespace(update=count))  # noqa: E731
    with translate_os_errors(folder / name), _client_errors():
        fetch(endpoint=_endpoint(), tqdm_class=bar)


def model_file(repo: str, name: str, revision: str = "main") -> Path:
    """Return a file of a model repository in the client's cache, downloaded if it is not there.

    The folder of its snapshot is named by the commit. Without a network, the newest one in the cache is taken.

    Raises:
        HubError: if there is no answer and no such file in the cache.
        StorageError: if it cannot be written.
    """
    os.environ["HF_HUB_DISABLE_XET"] = "1"  # as above
    endpoint = _endpoint()
    from huggingface_hub import hf_hub_download

    with translate_os_errors(name), _client_errors():
        return Path(hf_hub_download(repo, name, revision=revision, endpoint=endpoint))


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


def _reason(error: BaseException) -> str:
    """Return what went wrong, in one line without addresses: they may be signed."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx

    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return _reason(error.__cause__)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, HfHubHTTPError):
        return f"the hub answers {error.response.status_code}, {type(error).__name__}"
    words = " ".join(str(error).split()) or type(error).__name__
    return f"no connection ({words})" if isinstance(error, httpx.HTTPError) else words
