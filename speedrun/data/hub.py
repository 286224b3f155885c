"""The Hugging Face hub: what a dataset repository holds, and one file of it at a time. All network is here.

Everything goes through huggingface_hub, which takes endpoint and token from where its users put them
(HF_ENDPOINT, HF_TOKEN, `hf auth login`), continues a torn transfer while the process lives, and judges a file
by its size alone: whoever calls `download` checks the bytes.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

from speedrun.ground.errors import refusals_told

_ANSWER_S = 10.0  #: without a byte, a request is given up
_PAUSES_S = (1, 2, 4)  #: before the tries after the first
_MOST_TIMES = 4  #: a file whose bytes came so often over never ends
_PASSING = (408, 429, 500, 502, 503, 504)  #: answers of a server that may do better in a moment

T = TypeVar("T")


class RemoteFile(NamedTuple):
    """One file of a repository."""

    size_bytes: int
    sha256: str | None  #: the hub knows it of large files, as every shard is


class Listing(NamedTuple):
    """A dataset repository at one commit."""

    repo: str
    commit: str
    files: dict[str, RemoteFile]  #: by name


class HubError(Exception):
    """Why the hub did not give what was asked for, as the middle part of an error message."""


def reach(seconds: float) -> None:
    """Asks the hub whether it is there, once.

    Raises:
        HubError: if there is no answer within that time; finding its address is not counted.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import get_session, httpx

    try:
        get_session().head(_endpoint() or constants.ENDPOINT, timeout=seconds)
    except (httpx.HTTPError, OfflineModeIsEnabled) as error:
        raise HubError(_diagnosis(error)[0]) from None


def listing(repo: str, revision: str) -> Listing:
    """What a repository holds, and the commit that a branch stands for: one request.

    Raises:
        HubError: if there is no answer, or no such repository or revision.
    """
    # Xet, the hub's other way, retries and waits by rules of its own; ours are proven for plain HTTP. The client
    # reads this when it is imported.
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    from huggingface_hub import HfApi
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # each try that fails would print a signed address
    api = HfApi(endpoint=_endpoint())
    ask = partial(api.dataset_info, repo, revision=revision, files_metadata=True, timeout=_ANSWER_S)
    info = _insist(ask)
    if info.sha is None:
        raise HubError("the hub names no commit")
    files = {
        file.rfilename: RemoteFile(file.size or 0, file.lfs.sha256 if file.lfs else None)
        for file in info.siblings or ()
    }
    return Listing(repo, info.sha, files)


def download(source: Listing, name: str, folder: Path, count: Callable[[int], None]) -> None:
    """Puts one file into a folder, under its name only when all of its bytes are there.

    A file that an earlier call put there at the same commit stays, and nothing is sent.

    Args:
        source: the repository.
        name: of the file.
        folder: gets a hidden `.cache` besides, where torn transfers lie.
        count: is told the bytes as they come, less than nothing if some have to come again; may raise to end it.

    Raises:
        HubError: after all tries.
        StorageError: if the disk refuses.
    """
    from huggingface_hub import hf_hub_download

    meter: Any = partial(_Meter, count, _MOST_TIMES * source.files[name].size_bytes)
    fetch = partial(hf_hub_download, source.repo, name, repo_type="dataset", revision=source.commit)
    with refusals_told(folder / name):
        _insist(partial(fetch, local_dir=folder, endpoint=_endpoint(), tqdm_class=meter))


class _Meter:
    """What huggingface_hub takes for a progress bar; it only counts."""

    def __init__(self, count: Callable[[int], None], most_bytes: int, **_named: object) -> None:
        self._count = count
        self._left = most_bytes

    def update(self, num_bytes: int) -> None:
        """Called for each piece.

        Raises:
            HubError: for a server that begins anew for ever, which the client would follow for ever.
        """
        self._left -= max(0, num_bytes)
        if self._left < 0:
            raise HubError(f"it came {_MOST_TIMES} times over without an end")
        self._count(num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def _endpoint() -> str | None:
    """Read at each call; the client reads it when it is imported.

    Raises:
        HubError: if it is no address; the client would raise whatever it stumbles over.
    """
    address = os.environ.get("HF_ENDPOINT", "").rstrip("/")
    try:
        parts = urlsplit(address)
        is_address = not address or (parts.scheme in ("http", "https") and bool(parts.hostname))
        _ = parts.port
    except ValueError:
        is_address = False
    if not is_address:
        raise HubError(f"HF_ENDPOINT is {address!r}, need an address as in https://huggingface.co")
    return address or None


def _insist(attempt: Callable[[], T]) -> T:
    """Calls again after answers that may pass. Broken connections the client has already mended, or could not.

    Raises:
        HubError: what is wrong with the hub or the way to it.
        OSError: what is wrong with the disk.
    """
    from huggingface_hub.utils import httpx

    for pause_s in (*_PAUSES_S, None):
        try:
            return attempt()
        except (httpx.HTTPError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            said, passing = _diagnosis(error)
            if pause_s is None or not passing:
                raise HubError(said) from None
            time.sleep(pause_s)
    raise AssertionError("the last pause is None")


def _diagnosis(error: Exception) -> tuple[str, bool]:
    """What went wrong, in one line without addresses, and whether it may pass."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return _diagnosis(error.__cause__)[0], False  # it has tried for twenty seconds
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set", False
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, HfHubHTTPError) and status is not None:
        return f"the hub answers {status}, {type(error).__name__}", status in _PASSING
    if isinstance(error, httpx.HTTPError):
        return f"no connection ({' '.join(str(error).split()) or type(error).__name__})", False
    return "too few bytes, or too many", True
