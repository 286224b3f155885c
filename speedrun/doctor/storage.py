"""Check the disk for data and records: free space, speed, and the data of each track."""

import os
import shutil
import tempfile
from pathlib import Path

from speedrun.data import inventory, overview
from speedrun.data.overview import verify
from speedrun.doctor.check import Check
from speedrun.ground.clock import Stopwatch
from speedrun.ground.console import quantity
from speedrun.ground.errors import SpeedrunError
from speedrun.ground.track import Track

_SLOW_RATE = 50e6  #: bytes per second: a shard of 200 MB takes 4 s, as long as forty steps of eight GPUs
_PIECE_BYTES = 16 * 2**20
_MOST_BYTES = 256 * 2**20
_MOST_S = 1.5  #: for writing, and again for reading


def checks(track: Track, *, timed: bool = True) -> list[Check]:
    """Check space of the disk for a track's data, and its speed if `timed`; the folder may not exist yet."""
    root = inventory.data_folder(track, None).parent.absolute()
    there = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free_bytes = shutil.disk_usage(there).free
    need_bytes = overview.disk_bytes(track)
    room = f"{free_bytes / 1e9:,.1f} GB free in {there}; {track.name} needs {need_bytes / 1e9:.1f} GB"
    enough = free_bytes >= need_bytes
    advice = "" if enough else "; free some, or name another disk with SPEEDRUN_DATA"
    facts = {"free_bytes": free_bytes, "need_bytes": need_bytes}
    space = Check("disk", room + advice, ok=enough, facts=facts)
    return [space, _speed(there)] if timed else [space]


def _speed(folder: Path) -> Check:
    """Check with an unnamed file, so that nothing is left behind."""
    try:
        write_rate, read_rate = rates(folder)
    except OSError as error:
        found = f"{folder} cannot be written ({error.strerror}); name another folder with SPEEDRUN_DATA"
        return Check("disk speed", found, ok=False)
    facts = {"write_bytes_per_s": write_rate, "read_bytes_per_s": read_rate}
    fast = min(write_rate, read_rate) >= _SLOW_RATE
    found = f"writes {quantity(write_rate, 'B/s')}, reads {quantity(read_rate, 'B/s')}"
    advice = "" if fast else "; slow: a local disk is faster; name one with SPEEDRUN_DATA"
    return Check("disk speed", found + advice, ok=fast, needed=False, facts=facts)


def rates(folder: Path) -> tuple[float, float]:
    """Return bytes per second of synced writes, and of reads without the page cache.

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


def data(track: Track) -> Check:
    """Check the shards of a track. Never needed, as one command brings them."""
    folder = inventory.data_folder(track, None)
    name = f"data {track.name}"
    try:
        verified = verify(folder, track.data, full=False)
    except SpeedrunError as error:
        return Check(name, str(error), ok=False, needed=False, facts={"num_shards": 0, "num_tokens": 0})
    tokens = sum(shard.tokens for shard in verified)
    found = f"{len(verified)} shards, {tokens:,} tokens in {folder}"
    facts = {"num_shards": len(verified), "num_tokens": tokens}
    return Check(name, found, ok=True, needed=False, facts=facts)
