"""The snapshot of a fleet: one file beside its record, written whole after each round, before the line of the log.

    RECORD.islands/snapshot      the sha256 of the rest; then `Snapshot` as MessagePack

So a driver that was killed at any moment has lost at most the round that it was waiting for.
"""

import hashlib
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - so that NumPy knows bfloat16
import msgspec
import numpy as np

from speedrun.base import runlog
from speedrun.base.atomic_files import write_whole
from speedrun.base.errors import CheckpointError, UsageError, translate_os_errors, translate_read_errors
from speedrun.data.stream import Cursor
from speedrun.islands.rounds import Lease
from speedrun.record.logged_run import rounds_of
from speedrun.record.reader import load as read
from speedrun.train.resume_settings import finished, repair
from speedrun.train.run_config import RunConfig


class Snapshot(msgspec.Struct, frozen=True):
    """A fleet between two rounds."""

    config: RunConfig
    settings: runlog.Islands
    run_id: str  #: of the run that wrote it
    version: int
    cursor: Cursor
    num_granted: int
    returned: list[Lease]
    tokens_seen: int
    train_time_s: float
    last: runlog.Round  #: whose line the log may lack
    weights: dict[str, np.ndarray]
    velocity: dict[str, np.ndarray]


def _path_of(record: Path) -> Path:
    return record.with_name(f"{record.name}.islands") / "snapshot"


def save(snapshot: Snapshot) -> None:
    """Write a snapshot in the place of the one before."""

    def plain(x: Any) -> Any:
        return (str(x.dtype), x.shape, x.tobytes()) if isinstance(x, np.ndarray) else str(x)

    body, path = msgspec.msgpack.encode(snapshot, enc_hook=plain), _path_of(snapshot.config.out)
    with translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, hashlib.sha256(body).digest(), body)


def load(record: Path) -> Snapshot:
    """Read the snapshot of a record; raise CheckpointError if it is damaged."""
    path, hint = _path_of(record), "start a new one with another --out"
    if not path.is_file():  # a pipe would never end
        raise UsageError(f"{record} cannot be resumed: {path} is missing; {hint}")

    def restored(kind: Any, x: Any) -> Any:
        return np.frombuffer(x[2], np.dtype(x[0])).reshape(x[1]) if kind is np.ndarray else kind(x)

    with translate_read_errors(path, f"restore the file, or {hint}", kind=CheckpointError):
        raw = path.read_bytes()
        if hashlib.sha256(body := raw[32:]).digest() != raw[:32]:
            raise ValueError("its digest does not match")
        return msgspec.msgpack.decode(body, type=Snapshot, dec_hook=restored)


def resumed(record: Path) -> RunConfig:
    """Return the settings of the run in a folder; `resume` is unset if it finished and only its record is missing."""
    if (done := finished(record)) is not None:
        return done
    repair(record)
    kept, runs = load(record), read(record).runs
    if kept.run_id not in (run.start.run_id for run in runs):
        found = f"{_path_of(record)} is of another run, {kept.run_id}"
        raise CheckpointError(f"{found}; start again with another --out")
    counted = [one.version for _, one in rounds_of(runs) if one.digest]
    if max(counted, default=-1) >= kept.version:
        got = f"of round {kept.version}, but the log has round {max(counted) + 1}"
        raise CheckpointError(f"{_path_of(record)}: {got}; restore it")
    return msgspec.structs.replace(kept.config, out=record, resume=True)
