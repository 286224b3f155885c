"""Data that the harness makes by itself: the synthetic stream and Python's own documentation."""

from collections.abc import Callable
from pathlib import Path

from speedrun.base.console import memory
from speedrun.base.errors import UsageError
from speedrun.base.track import Track
from speedrun.base.wholefile import lock_folder
from speedrun.data import python_docs, synthetic
from speedrun.data.shard_folder import Manifest, data_folder, read_manifest


def make(track: Track, folder: Path) -> Manifest:
    """Make the shards of a track anew. Callers lock the folder (`base.wholefile`).

    Raises:
        UsageError: if the track needs other data, or the folder holds other shards.
        DataError: if the folder cannot be written, or the shards differ from the track's digests.
    """
    if track.synthetic is not None:
        return synthetic.write(track, folder)
    if track.python_docs is not None:
        return python_docs.make(track, folder)
    raise UsageError(
        f"track {track.name!r} is not synthetic, nor Python's documentation; get its shards: {track.data.get}"
    )


def ensure(track: Track, data: Path | None, say: Callable[[str], None]) -> None:
    """Make the shards of a track that can be made, unless they are complete or `data` names others; raise as `make`."""
    folder = data_folder(track, None)
    if data is not None or (track.synthetic is None and track.python_docs is None) or _is_complete(folder):
        return
    with lock_folder(folder, say):
        if _is_complete(folder):  # by the program that held the lock
            return
        made = make(track, folder)
    kind = "shards of Python's documentation" if track.synthetic is None else "synthetic shards"
    tokens = sum(shard.tokens for shard in made.shards.values())
    size = memory(sum((folder / name).stat().st_size for name in made.shards))
    say(f"made  {len(made.shards)} {kind} in {folder}: {tokens:,} tokens, {size}")


def _is_complete(folder: Path) -> bool:
    found = read_manifest(folder)
    return found is not None and found.complete
