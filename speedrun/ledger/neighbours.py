"""The other records of a repository, read just far enough to recognise a run that appears twice."""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from msgspec import DecodeError

from speedrun.ground import runlog

#: Holds the committed records: `records/<track>/<record>/`.
_FOLDER = "records"
_LOSS = re.compile(rb'"event":\{"ev":"step",[^{}]*?"loss":([^,]+),')
_FINAL = re.compile(rb'"final_hash":"([0-9a-f]{16})"')
#: Fewer losses than this can be equal by chance.
_FEWEST = 4


class Fingerprint(NamedTuple):
    """What no two finished runs share."""

    name: str
    seed: tuple[int, str, str]  #: with the digests of source and config
    losses: tuple[bytes, ...] | None  #: of all steps, as written in the log; None if there are few
    state: bytes | None  #: hash of the final one
    begun_utc: str


def fingerprint(lines: tuple[bytes, ...]) -> Fingerprint | None:
    """Return the fingerprint of a log; None if it is no log, or its run did not finish."""
    if not lines or b'"status":"finished"' not in lines[-1]:
        return None
    try:
        first = runlog.decode(lines[0])
    except DecodeError:
        return None
    start = first.event
    if not isinstance(start, runlog.RunStart):
        return None
    losses = tuple(loss for line in lines for loss in _LOSS.findall(line))
    seed, state = (start.seed, start.source_sha256, start.config_sha256), _FINAL.search(lines[-1])
    many = losses if len(losses) >= _FEWEST else None
    return Fingerprint(start.run_id, seed, many, state and state[1], first.t_utc)


@lru_cache(maxsize=1024)
def _read(path: Path, _size_bytes: int, _changed_ns: int) -> Fingerprint | None:
    return fingerprint(tuple(path.read_bytes().splitlines()))


def runs_of_other_records(root: Path) -> Iterator[tuple[str, Fingerprint]]:
    """Yield place and fingerprint of every run of the other committed records, if this record is a committed one."""
    root = root.resolve()
    if root.parent.parent.name != _FOLDER:
        return
    for path in sorted(root.parent.parent.glob("*/*/runs/*/metrics.jsonl")):
        folder = path.parent.parent.parent
        if folder != root and path.is_file() and not path.is_symlink():
            stat = path.stat()
            if (found := _read(path, stat.st_size, stat.st_mtime_ns)) is not None:
                yield f"{folder.parent.name}/{folder.name}", found
