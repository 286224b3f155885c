"""Fetches shards from the hub into a folder: in order, each one whole or not there, the same ones for ever.

Several transfers run at once, into a hidden folder inside the folder. A shard gets its name only after its size,
header, ids and digest were found right, after the manifest names it, and after all shards before it: a folder
where fetching stopped holds the first shards of the track and no others. Whoever fetches holds a lock on the folder.
"""

import fnmatch
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

import msgspec

from speedrun.data import hub
from speedrun.data.inventory import (
    MANIFEST,
    Manifest,
    ShardEntry,
    open_track,
    read_manifest,
    write_manifest,
)
from speedrun.data.shards import open_shard, sha256
from speedrun.data.verify import count_documents
from speedrun.ground.clock import Stopwatch
from speedrun.ground.errors import DataError
from speedrun.ground.lock import alone_in
from speedrun.ground.track import Data, Hub
from speedrun.ground.wholefile import give_name

STAGING = ".partial"  #: the hidden folder; gone when all is there

_NUM_TRANSFERS = 4
_LOOK_S = 0.2  #: between two looks at the transfers
_ANSWER_S = 25.0  #: for the first answer, tries and name server included
_STALL_S = 60.0  #: no byte of any transfer for so long, and it is given up
_COMMIT = re.compile("[0-9a-f]{40}")

T = TypeVar("T")


class Watch(Protocol):
    """Who shows how it goes."""

    def update(self, done: int, total: int) -> None:
        """Bytes that are there, and bytes there will be; told a few times a second."""

    def say(self, line: str) -> None:
        """A line."""


def fetch(folder: Path, data: Data, source: Hub, watch: Watch) -> Manifest:
    """Brings the validation shard and the first `source.train_shards` training shards into a folder.

    What is there already stays, and is compared with the hub's digests if the manifest does not name it yet. A
    folder that has all of it is left as it is, without a network.

    Args:
        folder: is made.
        data: what the track says of its shards.
        source: where to get them, and how many.
        watch: is told how it goes.

    Returns:
        The manifest, with the commit the shards are from and their digests.

    Raises:
        DataError: if the hub cannot be reached, has other shards, or sends damaged ones twice; if the folder
            holds foreign shards, or the disk is too small.
    """
    with alone_in(folder, watch.say):
        manifest = read_manifest(folder)
        revision = _revision(folder, source, manifest)
        if manifest is None or not _holds_all(folder, data, source, manifest):
            manifest = _fetch_missing(folder, data, source, revision, manifest, watch)
        open_track(folder, data)
        shutil.rmtree(folder / STAGING, ignore_errors=True)
    return manifest


def _revision(folder: Path, source: Hub, manifest: Manifest | None) -> str:
    """The commit that the first download recorded, else what the track says."""
    if manifest is None:
        return source.revision
    if manifest.source != source.repo:
        raise DataError(
            f"{folder / MANIFEST}: shards of {manifest.source}; need those of {source.repo}; "
            "choose another folder with --out"
        )
    recorded = str(manifest.settings.get("revision"))
    if _COMMIT.fullmatch(source.revision) and recorded != source.revision:
        raise DataError(
            f"{folder / MANIFEST}: shards of commit {recorded}; the track wants {source.revision}; "
            "choose another folder with --out"
        )
    return recorded


def _holds_all(folder: Path, data: Data, source: Hub, manifest: Manifest) -> bool:
    """Whether nothing is missing; the manifest names the first shards of the track, and no gap between them."""
    train, val = _split(manifest.shards, data)
    wanted = {*val[:1], *train[: source.train_shards]}
    here = _here(folder, data)
    return bool(val) and len(train) >= source.train_shards and wanted <= here == set(manifest.shards)


def _here(folder: Path, data: Data) -> set[str]:
    """Shards that have their names, whoever gave them."""
    train, val = _split((path.name for path in folder.iterdir()), data)
    return {*train, *val}


def _split(names: Iterable[str], data: Data) -> tuple[list[str], list[str]]:
    """Training and validation shards among files, in order. A name is no path."""
    names = sorted(name for name in names if "/" not in name)
    return fnmatch.filter(names, data.train), fnmatch.filter(names, data.val)


def _fetch_missing(
    folder: Path, data: Data, source: Hub, revision: str, manifest: Manifest | None, watch: Watch
) -> Manifest:
    """Everything for which the network is needed."""
    with Crew() as crew:
        (asked,) = crew.start(lambda _: hub.listing(source.repo, revision), [source.repo])
        wait([asked], timeout=_ANSWER_S)
        try:
            found = _result(asked, f"no answer in {_ANSWER_S:.0f} s")
        except hub.HubError as error:
            raise _cannot(folder, source, error, "without a network:") from None
        manifest = manifest or Manifest(
            source.repo, {"revision": found.commit}, data.vocab_size, data.document_token, {}
        )
        todo = _missing(folder, data, source, found, manifest)
        places = (folder, folder / STAGING)
        coming = [name for name in todo if not any((place / name).exists() for place in places)]
        need_bytes = sum(found.files[name].size_bytes for name in coming)
        watch.say(f"{source.repo}@{found.commit}: {len(coming)} shards to come, {need_bytes / 1e9:.2f} GB")
        _require_space(folder, need_bytes)
        job = _Job(folder, data, found, manifest, crew.stopped)
        try:
            return job.finish(dict(zip(todo, crew.start(job.obtain, todo), strict=True)), watch)
        except hub.HubError as error:
            raise _cannot(
                folder, source, error, "what is there stays, and the same command goes on; or"
            ) from None


def _cannot(folder: Path, source: Hub, cause: object, then: str) -> DataError:
    wanted = f"{source.train_shards} training shards and the validation shard of {source.repo}"
    otherwise = f"copy shards into {folder}, or make them with data/fineweb_prep.py"
    return DataError(f"{wanted}: {cause}; {then} {otherwise}")


def _missing(folder: Path, data: Data, source: Hub, found: hub.Listing, manifest: Manifest) -> list[str]:
    """Shards to fetch, and those to check because they are there without the manifest's knowledge; in order.

    All before the last one that is there or was fetched once belong to them: a gap would be another order of tokens.
    """
    (train, val), here = _split(found.files, data), _here(folder, data)
    known = here | set(manifest.shards)
    if not val or len(train) < source.train_shards:
        there = f"at {found.commit} it has {len(train)} and {len(val)}"
        raise DataError(f"{source.repo}: {there}; need {source.train_shards} and 1; ask for fewer --shards")
    if foreign := here - set(found.files):
        raise DataError(f"{folder / min(foreign)}: not a shard of {source.repo}; need no others; remove it")
    num_train = max([source.train_shards, *(i + 1 for i, name in enumerate(train) if name in known)])
    wanted = (*(name for name in val if name in known or name == val[0]), *train[:num_train])
    return [name for name in wanted if name not in here or name not in manifest.shards]


def _require_space(folder: Path, need_bytes: int) -> None:
    """Before the first byte."""
    have_bytes = shutil.disk_usage(folder).free
    if have_bytes < need_bytes:
        raise DataError(
            f"{folder}: {have_bytes / 1e9:.2f} GB free on its disk; need {need_bytes / 1e9:.2f} GB; "
            "free some, ask for fewer --shards, or choose another folder with --out"
        )


class _Job:
    """The shards that are to come into one folder."""

    def __init__(
        self, folder: Path, data: Data, found: hub.Listing, manifest: Manifest, stopped: threading.Event
    ) -> None:
        self._folder, self._staging = folder, folder / STAGING
        self._data, self._found, self._manifest, self._stopped = data, found, manifest, stopped
        self._received = dict.fromkeys(
            found.files, 0
        )  # bytes, each written by the one thread that has the shard
        for torn in self._staging.rglob("*.incomplete"):  # of a process that was killed; nobody continues it
            torn.unlink()

    def obtain(self, name: str, tries: int = 2) -> ShardEntry:
        """On a thread: the shard lies in the folder or in the hidden one, and was read through.

        Raises:
            HubError: if it cannot be had.
            DataError: if its bytes are wrong, twice if they were sent.
        """
        if (self._folder / name).exists():
            return self._checked(self._folder / name, "delete it and get it again")
        self._received[name] = 0
        hub.download(self._found, name, self._staging, lambda num_bytes: self._count(name, num_bytes))
        try:
            return self._checked(self._staging / name, "deleted; it was fetched twice: try again later")
        except DataError:
            (self._staging / name).unlink()
            if tries == 1:
                raise
        return self.obtain(name, tries - 1)

    def finish(self, coming: dict[str, Future[ShardEntry]], watch: Watch) -> Manifest:
        """Names the shards in order, as they come. Broken off anywhere, the folder stays sound."""
        total = sum(self._found.files[name].size_bytes for name in coming)
        for name, future in coming.items():
            entry = self._await(future, total, watch)
            self._received[name] = self._found.files[name].size_bytes
            shards = dict(sorted({**self._manifest.shards, name: entry}.items()))
            self._manifest = msgspec.structs.replace(self._manifest, shards=shards)
            write_manifest(self._folder, self._manifest)
            if not (self._folder / name).exists():
                give_name(self._staging / name, self._folder / name)
            watch.say(f"{self._folder / name}  {entry.tokens:,} tokens  {entry.documents:,} documents")
        watch.update(total, total)
        return self._manifest

    def _await(self, future: Future[ShardEntry], total: int, watch: Watch) -> ShardEntry:
        """Shows progress until one shard is there, or nothing has moved for too long."""
        still, moved = Stopwatch(), -1
        while not wait([future], timeout=_LOOK_S).done and still.seconds < _STALL_S:
            if (now := sum(self._received.values())) != moved:
                still, moved = Stopwatch(), now
            watch.update(now, total)
        return _result(future, f"no byte came for {_STALL_S:.0f} s")

    def _count(self, name: str, num_bytes: int) -> None:
        if self._stopped.is_set():
            raise hub.HubError("stopped")
        self._received[name] += num_bytes

    def _checked(self, path: Path, remedy: str) -> ShardEntry:
        """Reads every byte. Hub, manifest and track each may know its digest; the ids are looked at all the same."""
        name, shard, got = path.name, open_shard(path, vocab_size=self._data.vocab_size), sha256(path)
        known = self._manifest.shards.get(name)
        claims = {
            "the hub": self._found.files[name].sha256,
            MANIFEST: known and known.sha256,
            "the track": self._data.sha256.get(name),
        }
        for who, need in claims.items():
            if need not in (got, None):
                raise DataError(f"{path}: sha256 is {got}; {who} says {need}; {remedy}")
        return ShardEntry(shard.num_tokens, count_documents(shard, self._data.document_token), got)


class Crew:
    """Threads that end with the program, wherever they stand.

    Those of `ThreadPoolExecutor` are waited for: a transfer that hangs would hold up Ctrl-C for a minute.
    """

    def __init__(self) -> None:
        self.stopped = threading.Event()  #: jobs not begun are dropped; others may look at it

    def start(self, work: Callable[[str], T], names: list[str]) -> list[Future[T]]:
        """Begins the work on all names, a few at once and in order; what it raises, `Future.result` raises."""
        jobs: SimpleQueue[tuple[str, Future[T]]] = SimpleQueue()
        futures: list[Future[T]] = [Future() for _ in names]
        for job in zip(names, futures, strict=True):
            jobs.put(job)

        def run() -> None:
            while not self.stopped.is_set():
                try:
                    name, future = jobs.get_nowait()
                except Empty:
                    return
                try:
                    future.set_result(work(name))
                except BaseException as error:  # noqa: BLE001 - not handled here: whoever asks for the result gets it
                    future.set_exception(error)

        for _ in range(min(_NUM_TRANSFERS, len(names))):
            threading.Thread(target=run, name="transfer", daemon=True).start()
        return futures

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stopped.set()


def _result(future: Future[T], late: str) -> T:
    """What a thread found out; it has had its time."""
    if not future.done():
        raise hub.HubError(late)
    return future.result()
