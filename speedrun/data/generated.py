"""Data that the harness makes by itself: the synthetic stream and Python's own documentation."""

from collections.abc import Callable
from pathlib import Path

from speedrun.data import python_docs, synthetic
from speedrun.data.inventory import data_folder, read_manifest
from speedrun.ground.console import memory
from speedrun.ground.lock import lock_folder
from speedrun.ground.track import Track


def ensure(track: Track, data: Path | None, say: Callable[[str], None]) -> None:
    """Make the shards of a track that can be generated, unless they are complete or `data` names others.

    Raises:
        UsageError: if the folder holds other shards.
        DataError: if the folder cannot be written, or the shards differ from the track's digests.
    """
    folder = data_folder(track, None)
    if data is not None or (track.synthetic is None and track.python_docs is None) or _is_complete(folder):
        return
    with lock_folder(folder, say):
        if _is_complete(folder):  # by the program that held the lock
            return
        if track.synthetic is not None:
            made, kind = synthetic.write(track, folder), "synthetic shards"
        else:
            made, kind = python_docs.make(track, folder).manifest, "shards of Python's documentation"
    tokens = sum(shard.tokens for shard in made.shards.values())
    size = memory(sum((folder / name).stat().st_size for name in made.shards))
    say(f"made  {len(made.shards)} {kind} in {folder}: {tokens:,} tokens, {size}")


def _is_complete(folder: Path) -> bool:
    found = read_manifest(folder)
    return found is not None and found.complete
