"""Downloads the shards of a track from the hub.

Transfers go to a hidden folder. A shard gets its name after it was checked, after the manifest names it, and after all
shards before it: an interrupted folder holds the first shards of the track.
"""

import fnmatch
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from speedrun.base.atomic_files import give_name, lock_folder
from speedrun.base.errors import DataError, UsageError
from speedrun.base.track import Data, Hub, Track
from speedrun.data import hub, shards
from speedrun.data.overview import read_whole
from speedrun.data.shards import MANIFEST, Manifest, ShardEntry

if TYPE_CHECKING:
    from huggingface_hub.hf_api import DatasetInfo

Report = Callable[[int, int], None]
STAGING = ".partial"  #: the hidden folder

_NUM_TRANSFERS = 4
_COMMIT = re.compile("[0-9a-f]{40}")


def source_of(track: Track, repo: str | None, num_train: int | None) -> Hub:
    """Return the hub's source of a track's shards.

    Tracks that take any shards need `repo`. `num_train` is None for the track's number, or 1.
    """
    own = track.data.hub
    if track.synthetic is not None:
        raise UsageError(f"track {track.name!r} is synthetic; its shards are made: {track.data.get}")
    if own is None and repo is None:
        raise UsageError(f"track {track.name!r} takes any shards; need --repo OWNER/NAME to fetch some")
    if own is not None and repo not in (own.repo, None):
        raise UsageError(f"--repo {repo}: {track.name!r} needs {own.repo}; choose a track of any shards")
    source = own or Hub(repo=repo or "", revision="main", train_shards=1)
    return source if num_train is None else msgspec.structs.replace(source, train_shards=num_train)


def fetch(folder: Path, data: Data, source: Hub, report: Report, say: Callable[[str], None]) -> Manifest:
    """Download the validation shard and the first `source.train_shards` training shards; return the manifest.

    Shards in the folder stay; those that the manifest does not name are compared with the hub's digests. A complete
    folder needs no network. `report` gets the bytes that are there, and their total.
    """
    with lock_folder(folder, say):
        manifest = shards.read_manifest(folder)
        revision = _revision(folder, source, manifest)
        if manifest is None or not _is_complete(folder, data, source, manifest):
            try:
                info = hub.dataset_info(source.repo, revision, files_metadata=True)
                settings: dict[str, str | int | float] = {"revision": info.sha or ""}
                fresh = Manifest(source.repo, settings, data.vocab_size, data.document_token, {})
                download = _Download(folder, data, info, manifest or fresh)
                manifest = download.run(download.missing(source.train_shards), report, say)
            except hub.HubError as error:
                raise DataError(
                    f"{source.train_shards} training shards and the validation shard of {source.repo}: {error}; "
                    f"run the same command again to continue, or copy shards into {folder}, or make them with "
                    "data/fineweb_prep.py"
                ) from None
        shards.open_track(folder, data)
        shutil.rmtree(folder / STAGING, ignore_errors=True)
    return manifest


def _revision(folder: Path, source: Hub, manifest: Manifest | None) -> str:
    """Return the commit of the first download; without one, the track's revision."""
    if manifest is None:
        return source.revision
    recorded = str(manifest.settings.get("revision"))
    is_pinned = _COMMIT.fullmatch(source.revision) is not None
    got, need = (manifest.source, recorded), (source.repo, source.revision if is_pinned else recorded)
    if got != need:
        found = f"{folder / MANIFEST}: shards of {'@'.join(got)}"
        raise DataError(f"{found}; need those of {'@'.join(need)}; choose another folder with --out")
    return recorded


def _is_complete(folder: Path, data: Data, source: Hub, manifest: Manifest) -> bool:
    """Return whether the folder holds enough shards, exactly those of its manifest."""
    train, val = _split(manifest.shards, data)
    return bool(val) and len(train) >= source.train_shards and _present(folder, data) == set(manifest.shards)


def _present(folder: Path, data: Data) -> set[str]:
    """Return the names of all shards in the folder."""
    return set().union(*_split((path.name for path in folder.iterdir()), data))


def _split(names: Iterable[str], data: Data) -> tuple[list[str], list[str]]:
    """Return the names of training and validation shards, sorted, without those in subfolders."""
    names = sorted(name for name in names if "/" not in name)
    return fnmatch.filter(names, data.train), fnmatch.filter(names, data.val)


class _Download:
    """A download from one commit of a repository into one folder."""

    def __init__(self, folder: Path, data: Data, info: "DatasetInfo", manifest: Manifest) -> None:
        self._folder, self._staging = folder, folder / STAGING
        self._data, self._manifest = data, manifest
        self._repo, self._commit = manifest.source, info.sha or ""
        self._remote = {file.rfilename: file for file in info.siblings or ()}
        self._received = dict.fromkeys(self._remote, 0)  # bytes; each entry belongs to one thread
        self._stopped = threading.Event()

    def missing(self, num_train: int) -> list[str]:
        """Return the shards to download and the present ones that the manifest does not name, in order."""
        (train, val), present = _split(self._remote, self._data), _present(self._folder, self._data)
        if not val or len(train) < num_train:
            has = f"at {self._commit} it has {len(train)} and {len(val)}"
            raise DataError(f"{self._repo}: {has}; need {num_train} and 1; ask for fewer --shards")
        if foreign := present - set(self._remote):
            path = self._folder / min(foreign)
            raise DataError(f"{path}: not a shard of {self._repo}; need no others; remove it")
        known = present | set(self._manifest.shards)
        last = max(known & set(train), default="")
        # All shards before the last one known: a gap would change the order of tokens.
        wanted = [name for name in val if name in known or name == val[0]]
        wanted += [name for name in train if name in train[:num_train] or name <= last]
        return [name for name in wanted if name not in present or name not in self._manifest.shards]

    def run(self, names: list[str], report: Report, say: Callable[[str], None]) -> Manifest:
        """Transfer shards in the background, and name them in order."""
        for part in self._staging.rglob("*.incomplete"):  # from a killed process; the client never resumes it
            part.unlink()
        total = self._size_bytes(names)
        say(f"{self._repo}@{self._commit}: {len(names)} shards, {total / 1e9:.2f} GB")
        with ThreadPool(_NUM_TRANSFERS) as pool:  # of daemon threads, which do not delay Ctrl-C
            obtain = partial(self._obtain, lambda: report(sum(self._received.values()), total))
            try:
                for name, entry in zip(names, pool.imap(obtain, names), strict=True):
                    self._finish(name, entry)
                    shown = f"{entry.tokens:,} tokens  {entry.documents:,} documents"
                    say(f"{self._folder / name}  {shown}")
            finally:
                self._stopped.set()
        report(total, total)
        return self._manifest

    def _size_bytes(self, names: Iterable[str]) -> int:
        return sum(self._remote[name].size or 0 for name in names)

    def _finish(self, name: str, entry: ShardEntry) -> None:
        """Name a shard in the manifest, then in the folder: a kill in between leaves no unknown file."""
        self._received[name] = self._size_bytes([name])
        named = dict(sorted({**self._manifest.shards, name: entry}.items()))
        self._manifest = msgspec.structs.replace(self._manifest, shards=named)
        shards.write_manifest(self._folder, self._manifest)
        if not (self._folder / name).exists():
            give_name(self._staging / name, self._folder / name)

    # --- on a thread of the pool --------------------------------------------------------------------------

    def _obtain(self, report: Callable[[], None], name: str) -> ShardEntry:
        """Check a present shard, or download it, with retries."""
        if (self._folder / name).exists():
            return self._checked(self._folder / name, "delete it and get it again")
        return hub.patiently(partial(self._transfer, name, report))

    def _transfer(self, name: str, report: Callable[[], None]) -> ShardEntry:
        self._received[name] = 0
        hub.download(self._repo, self._commit, name, self._staging, partial(self._count, name, report))
        try:
            return self._checked(self._staging / name, "deleted; try again later")
        except DataError:
            (self._staging / name).unlink()
            raise

    def _count(self, name: str, report: Callable[[], None], num_bytes: int) -> None:
        if self._stopped.is_set():
            raise hub.HubError("stopped")
        if num_bytes < 0:  # the client would start over without end
            raise hub.HubError("a broken transfer cannot be resumed", may_pass=True)
        self._received[name] += num_bytes
        report()

    def _checked(self, path: Path, advice: str) -> ShardEntry:
        """Compare a shard with all known digests, and check every id."""
        shard, lfs = shards.open_shard(path, vocab_size=self._data.vocab_size), self._remote[path.name].lfs
        known = self._manifest.shards.get(path.name)
        digests = {"the hub": lfs.sha256 if lfs else None, MANIFEST: known.sha256 if known else None}
        return read_whole(shard, self._data, digests, advice)
