"""The Hugging Face hub: listings of datasets, and files of datasets and models.

`huggingface_hub` reads HF_ENDPOINT, HF_TOKEN and `hf auth login`. Within one process it resumes a broken transfer, and
waits for files as long as a hub that limits requests says; a listing is asked for three times more. It checks only the
size of a file: callers of `download` check the digest.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from speedrun.base.errors import DataError, translate_os_errors

if TYPE_CHECKING:
    from huggingface_hub.hf_api import DatasetInfo

PAUSES_S = (1, 2, 4)  #: after failed attempts

_TIMEOUT_S = 10.0  #: of a request for metadata
_BUSY = (408, 429, *range(500, 600))  #: status codes that are worth a retry
#: Raised by the client for a foreign answer, such as the login page of a network.
_NO_ANSWER = (JSONDecodeError, UnicodeDecodeError, TypeError, KeyError)
_Answer = TypeVar("_Answer")


class HubError(Exception):
    """A failed request; the message is the middle part of an error message. `may_pass`: worth a retry."""

    def __init__(self, reason: str, *, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


def patiently(request: Callable[[], _Answer]) -> _Answer:
    """Return the answer to a request, asked again up to three times after failures that may pass, or wrong bytes."""
    for pause_s in PAUSES_S:
        try:
            return request()
        except (HubError, DataError) as error:
            if not getattr(error, "may_pass", True):
                raise
            threading.Event().wait(pause_s)
    return request()


def reach(timeout_s: float) -> None:
    """Raise HubError unless the hub answers in time, and accepts the token if there is one."""
    hub = _endpoint()
    from huggingface_hub.utils import build_hf_headers, get_session, get_token, hf_raise_for_status

    with _client_errors():
        get_session().head(hub, timeout=timeout_s)
        if get_token():
            who = get_session().get(f"{hub}/api/whoami-v2", headers=build_hf_headers(), timeout=timeout_s)
            if who.status_code == 401:  # a mirror may not know this address
                hf_raise_for_status(who)


def dataset_info(repo: str, revision: str | None, *, files_metadata: bool = False) -> "DatasetInfo":
    """Return the commit and the files of a dataset repository, `patiently`; raise HubError.

    `revision` is a branch, tag or commit; None: the default branch. With `files_metadata`, files have size and digest.
    """
    # Read at import. The tests cover plain HTTP, not Xet, which needs a real progress bar.
    os.environ["HF_HUB_DISABLE_XET"] = "1"
    endpoint = _endpoint()
    from huggingface_hub import HfApi
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # its warnings contain signed addresses
    api = HfApi(endpoint=endpoint)

    def request() -> "DatasetInfo":
        with _client_errors():
            return api.dataset_info(
                repo, revision=revision, timeout=_TIMEOUT_S, files_metadata=files_metadata
            )

    try:
        info = patiently(request)
    except _NO_ANSWER:
        raise HubError("the answer is not that of a hub") from None
    if not info.sha:
        raise HubError("the hub names no commit")
    return info


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
    from huggingface_hub import snapshot_download

    offline = True
    with suppress(HubError):  # the client would wait for ever for a hub that says nothing
        reach(_TIMEOUT_S)
        offline = False
    given: dict[str, Any] = {"endpoint": _endpoint(), "local_files_only": offline}
    with translate_os_errors(repo), _client_errors():
        return Path(snapshot_download(repo, allow_patterns=[*names], **given))


def _endpoint() -> str:
    """Return the address of the hub, which the client would read only at import."""
    address = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    if not re.match(r"https?://\w", address):
        raise HubError(f"HF_ENDPOINT is {address!r}, need an address such as https://huggingface.co")
    return address


@contextmanager
def _client_errors() -> Iterator[None]:
    """Raise HubError for the client's exceptions, except errors of the disk.

    All threads share a session. A thread that cannot connect closes it, and the others then raise a network error, a
    RuntimeError or an AttributeError.
    """
    from huggingface_hub import errors
    from huggingface_hub.utils import get_session, httpx

    try:
        session = get_session()
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:  # of a proxy, or a certificate
        cure = "mend or unset ALL_PROXY, HTTPS_PROXY, HTTP_PROXY, SSL_CERT_FILE or SSL_CERT_DIR"
        raise HubError(f"no connection ({' '.join(str(error).split())}): {cure}") from None
    try:
        yield
    except UnicodeEncodeError:  # of a header
        raise HubError("HF_TOKEN holds a letter that no token has: mend or unset it") from None
    except (httpx.HTTPError, errors.HFValidationError, OSError, RuntimeError, AttributeError) as error:
        was_closed = session is not get_session()
        is_ours = isinstance(error, RuntimeError | AttributeError) and not was_closed
        if is_ours or (isinstance(error, OSError) and error.errno is not None):
            raise
        if isinstance(error, errors.LocalEntryNotFoundError):
            error = error.__cause__ or error
        final = httpx.ConnectError, errors.OfflineModeIsEnabled, errors.HFValidationError
        is_final = isinstance(error, final)
        if isinstance(error, errors.HfHubHTTPError):
            is_final = error.response.status_code not in _BUSY
        raise HubError(_reason(error), may_pass=was_closed or not is_final) from None


def _reason(error: BaseException) -> str:
    """Return the cause in one line, without addresses, which may be signed."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import get_token, httpx

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code == 401 and get_token():
            source = (
                "HF_TOKEN: unset it" if os.environ.get("HF_TOKEN") else "the stored token: hf auth logout"
            )
            return f"the hub refuses (401) {source}, since public data needs none"
        return f"the hub answers {error.response.status_code}, {type(error).__name__}"
    words = " ".join(str(error).split()) or type(error).__name__
    return f"no connection ({words})" if isinstance(error, httpx.HTTPError) else words
