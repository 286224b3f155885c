"""Check what data and records need: free space, a fast disk, the hub, and the shards of each track."""

import os
import shutil
import tempfile
from pathlib import Path

from speedrun.data import hub, inventory, overview
from speedrun.doctor.check import Check
from speedrun.ground.clock import Stopwatch
from speedrun.ground.console import quantity
from speedrun.ground.track import Track

_SLOW_RATE = 50e6  #: bytes per second: a shard of 200 MB takes 4 s, as long as forty steps of eight GPUs
_PIECE_BYTES = 16 * 2**20
_MOST_BYTES = 256 * 2**20
_MOST_S = 1.5  #: for writing, and again for reading
_ANSWER_S = 4.0  #: of the hub


def disk(track: Track, *, timed: bool = True) -> list[Check]:
    """Check space of the disk for a track's data, and its speed if `timed`; the folder may not exist yet."""
    root = inventory.data_folder(track, None).parent.absolute()
    there = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free_bytes, need_bytes = shutil.disk_usage(there).free, overview.disk_bytes(track)
    found = f"{free_bytes / 1e9:,.1f} GB free in {there}; {track.name} needs {need_bytes / 1e9:.1f} GB"
    facts = {"free_bytes": free_bytes, "need_bytes": need_bytes}
    if not (enough := free_bytes >= need_bytes):
        found += "; free some, or name another disk with SPEEDRUN_DATA"
    space = Check("disk", found, ok=enough, facts=facts)
    return [space, _speed(there)] if timed else [space]


def _speed(folder: Path) -> Check:
    try:
        write_rate, read_rate = rates(folder)
    except OSError as error:
        found = f"{folder} cannot be written ({error.strerror}); name another folder with SPEEDRUN_DATA"
        return Check("disk speed", found, ok=False)
    found = f"writes {quantity(write_rate, 'B/s')}, reads {quantity(read_rate, 'B/s')}"
    if not (fast := min(write_rate, read_rate) >= _SLOW_RATE):
        found += "; slow: a local disk is faster; name one with SPEEDRUN_DATA"
    facts = {"write_bytes_per_s": write_rate, "read_bytes_per_s": read_rate}
    return Check("disk speed", found, ok=fast, needed=False, facts=facts)


def rates(folder: Path) -> tuple[float, float]:
    """Return bytes per second of synced writes, and of reads without the page cache. The file has no name.

    Raises:
        OSError: from the disk.
    """
    piece = os.urandom(_PIECE_BYTES)  # some disks compress
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        watch, size = Stopwatch(), 0
        while size < _MOST_BYTES and watch.seconds < _MOST_S:
            size += os.write(file.fileno(), piece)
            os.fsync(file.fileno())
        write_rate = size / watch.seconds
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        watch, done = Stopwatch(), 0
        while done < size and watch.seconds < _MOST_S:
            done += len(os.pread(file.fileno(), _PIECE_BYTES, done))
        return write_rate, done / watch.seconds


def reachable() -> Check:
    """Check that the hub answers. No run needs it once the data is here, so this is a note."""
    try:
        hub.reach(_ANSWER_S)
    except hub.HubError as error:
        found = f"{error}; data that is not here cannot be fetched: HF_ENDPOINT names a mirror"
        return Check("hub", found, ok=False, needed=False)
    return Check("hub", "answers", ok=True, needed=False)


def shards(track: Track) -> Check:
    """Check the shards of a track. Never needed, as one command brings them."""
    here = overview.holding(track)
    found = here.problem or f"{here.shards} shards, {here.tokens:,} tokens in {here.folder}"
    facts = {"num_shards": here.shards, "num_tokens": here.tokens}
    return Check(f"data {track.name}", found, ok=here.complete, needed=False, facts=facts)
