"""What a page needs beside the logs: the target of a track, the ghost, and the peak rates of devices."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from speedrun.board import ghost as ghosts
from speedrun.ground import devices
from speedrun.ground import track as tracks
from speedrun.ground.errors import UsageError

RECORDS = Path("records")


def rules(choice: str | None) -> Callable[[str], dict[str, Any]]:
    """Return a function from a track's name and version to its target and ghost, read once for each.

    What cannot be read is null, with the reason in `problems`. A peak is bf16 with sums in float32, per second.

    Args:
        choice: the folder of a record, or 'best': the fastest qualified record of the track in `records/`.
    """
    peaks = [[device.name, device.bf16_flops] for device in devices.DEVICES.values()]

    @cache
    def of_known(track: str) -> dict[str, Any]:
        ghost, problems = None, []
        try:
            ghost = _ghost(choice, track)
            if choice == "best" and ghost is None:
                problems.append(f"no ghost: {RECORDS}/ has no qualified record of {track}")
        except UsageError as error:
            problems.append(f"no ghost: {error}")
        return {"ghost": ghost, "problems": problems}

    def found(track: str) -> dict[str, Any]:
        try:
            known = tracks.load(track.partition("@")[0])
            if known.id != track:
                raise UsageError(
                    f"the run is on {track}; this version has {known.id}, whose target may differ"
                )
        except UsageError as error:  # nothing is kept of a track that nobody has
            rest = {"ghost": None, "problems": [f"no target: {error}"]}
            return {"target": None, "peaks": peaks, **rest}
        return {"target": known.target.loss, "peaks": peaks, **of_known(known.id)}

    return found


def _ghost(choice: str | None, track: str) -> dict[str, Any] | None:
    folder = ghosts.best(RECORDS, track) if choice == "best" else choice and Path(choice)
    if not folder:
        return None
    return {"record": folder.name, **ghosts.read(folder, track).points()}
