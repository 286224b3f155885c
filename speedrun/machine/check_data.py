"""Check what data and records need: space on a disk, the hub, and the shards of each track."""

import os
import shutil

from speedrun.base.track import Track
from speedrun.data import hub, overview, shard_folder
from speedrun.machine.finding import Check

_ANSWER_S = 4.0  #: of the hub


def disk(track: Track) -> Check:
    """Check that a track's data has room and may be written; the folder may not exist yet."""
    root = shard_folder.data_folder(track, None).parent.absolute()
    there = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free_bytes, need_bytes = shutil.disk_usage(there).free, overview.disk_bytes(track)
    found = f"{free_bytes / 1e9:,.1f} GB free in {there}; {track.name} needs {need_bytes / 1e9:.1f} GB"
    enough, writable = free_bytes >= need_bytes, os.access(there, os.W_OK)
    if not (enough and writable):
        problem = "free some" if writable else "it cannot be written: change its permissions"
        found += f"; {problem}, or name another disk with SPEEDRUN_DATA"
    facts = {"free_bytes": free_bytes, "need_bytes": need_bytes}
    return Check("disk", found, ok=enough and writable, facts=facts)


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
