"""Data that the harness makes by itself: the synthetic stream and Python's own documentation."""

from collections.abc import Callable
from pathlib import Path

from speedrun.data import python_docs, synthetic
from speedrun.data.inventory import data_folder
from speedrun.ground.console import memory
from speedrun.ground.track import Track


def ensure(track: Track, data: Path | None, say: Callable[[str], None]) -> None:
    """Make the shards of a track that can be generated, unless they are complete or `data` names others.

    Raises:
        DataError: if the folder cannot be written, or the shards differ from the track's digests.
    """
    if data is not None:
        return
    folder = data_folder(track, None)
    if (made := synthetic.ensure(track, folder)) is not None:
        tokens = sum(shard.tokens for shard in made.shards.values())
        size = memory(sum((folder / name).stat().st_size for name in made.shards))
        say(f"made  {len(made.shards)} synthetic shards in {folder}: {tokens:,} tokens, {size}")
    python_docs.ensure(track, folder, say=say)
