"""The Hugging Face hub: listings of datasets, and files of datasets and models.

`huggingface_hub` reads HF_ENDPOINT, HF_TOKEN and `hf auth login`. It resumes a broken transfer within one process, and
checks only the size of a file: callers of `download` check the digest.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from speedrun.base.errors import translate_os_errors

if TYPE_CHECKING:
    from huggingface_hub.hf_api import DatasetInfo

PAUSES_S = (1, 2, 4)  #: after failed attempts

_TIMEOUT_S = 10.0  #: of a request for metadata
_BUSY = (408, 429, *range(500, 600))  #: status codes that are worth a retry
#: Raised by the client for a foreign answer, such as the login page of a network.
_NO_ANSWER = (JSONDecodeError, UnicodeDecodeError, TypeError, KeyError)


class HubError(Exception):
    """A failed request; the message is the middle part of an error message. `may_pass`: worth a retry."""

    def __init__(self, reason: str, *, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


def reach(timeout_s: float) -> None:
    """Raise HubError unless the hub answers in time, not counting name resolution."""
    endpoint = _endpoint()
    from huggingface_hub.utils import get_session

    with _client_errors():
        get_session().head(endpoint, timeout=timeout_s)


def dataset_info(repo: str, revision: str | None, *, files_metadata: bool = False) -> "DatasetInfo":
    """Return the commit and the files of a dataset repository, with retries; raise HubError.

    `revision` is a branch, tag or commit; None: the default branch. With `files_metadata`, files have size and digest.
    """
    # Read at import. The tests cover plain HTTP, not Xet, which needs a real progress bar.
    os.environ["HF_HUB_DISABLE_XET"] = "1"
    endpoint = _endpoint()
    from huggingface_hub import HfApi
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # its warnings contain signed addresses
    request = partial(HfApi(endpoint=endpoint).dataset_info, repo, revision=revision, timeout=_TIMEOUT_S)
    for pause_s in (*PAUSES_S, None):
        try:
            with _client_errors():
                info = request(files_metadata=files_metadata)
            if info.sha:
                return info
            raise HubError("the hub names no commit")
        except _NO_ANSWER:
            break
        except HubError as error:
            if not error.may_pass or pause_s is None:
                raise
            threading.Event().wait(pause_s)
    raise HubError("the answer is not that of a hub")


def download(repo: str, commit: str, name: str, folder: Path, count: Callable[[int], None]) -> None:
    """Download one file into a folder, unless an earlier call did; raise HubError if the client gives up.

    The file appears when it is complete. `count` gets the bytes of each piece, negative if the transfer starts over; it
    may raise to stop the transfer.
    """
    from huggingface_hub import hf_hub_download

    fetch = partial(hf_hub_download, repo, name, repo_type="dataset", revision=commit, local_dir=folder)
    bar: Any = lambda **_options: nullcontext(SimpleNamespace(update=count))  # noqa: E731
    with translate_os_errors(folder / name), _client_errors():
        fetch(endpoint=_endpoint(), tqdm_class=bar)


def model_folder(repo: str, names: Sequence[str]) -> Path:
    """Return the folder of the client's cache with these files of a model; its name is the commit.

    Missing files are downloaded. Without a connection, the newest commit in the cache is used. Raises HubError.
    """
    os.environ["HF_HUB_DISABLE_XET"] = "1"  # as above
    offline = None
    try:
        reach(_TIMEOUT_S)
    except HubError as error:  # the client would retry for half a minute
        offline = error
    from huggingface_hub import hf_hub_download

    fetch = partial(hf_hub_download, repo, endpoint=_endpoint(), local_files_only=offline is not None)
    with translate_os_errors(repo):
        try:
            with _client_errors():
                folder = Path(fetch(names[0], revision="main")).parent
                for name in names[1:]:
                    fetch(name, revision=folder.name)
        except HubError as error:
            raise offline or error from None
    return folder


def _endpoint() -> str:
    """Return the address of the hub; the client would read it only at import, and crash on a malformed one."""
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
    """Raise HubError for the client's exceptions, except errors of the disk.

    All threads share a session. A thread that cannot connect closes it, and the others then raise a network error, a
    RuntimeError or an AttributeError.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import get_session, httpx

    session = get_session()
    try:
        yield
    except (httpx.HTTPError, HFValidationError, OSError, RuntimeError, AttributeError) as error:
        was_closed = session is not get_session()
        is_ours = isinstance(error, RuntimeError | AttributeError) and not was_closed
        if is_ours or (isinstance(error, OSError) and error.errno is not None):
            raise
        is_busy = isinstance(error, HfHubHTTPError) and error.response.status_code in _BUSY
        is_broken = isinstance(error, httpx.TransportError) and not isinstance(error, httpx.ConnectError)
        raise HubError(_reason(error), may_pass=was_closed or is_busy or is_broken) from None


def _reason(error: BaseException) -> str:
    """Return the cause in one line, without addresses, which may be signed."""
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
