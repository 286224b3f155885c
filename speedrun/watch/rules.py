"""What a page needs beside the logs: the target of a track, the ghost, and the peak rates of devices."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from speedrun.board import ghost as ghosts
from speedrun.ground import devices
from speedrun.ground import track as tracks
from speedrun.ground.errors import UsageError

RECORDS = Path("records")


@lru_cache(maxsize=64)
def rules(choice: str | None, track: str) -> dict[str, Any]:
    """Return target and ghost of a track, and the peak rates of devices: bf16 with sums in float32, per second.

    What cannot be read is null, with the reason in `problems`.

    Args:
        choice: the folder of a record, or 'best': the fastest qualified record of the track in `records/`.
        track: name and version.
    """
    target, ghost, problems = None, None, []
    try:
        known = tracks.load(track.partition("@")[0])
        if known.id != track:
            raise UsageError(f"the run is on {track}; this version has {known.id}, whose target may differ")
        target = known.target.loss
    except UsageError as error:
        problems.append(f"no target: {error}")
    if target is not None and choice is not None:
        try:
            folder = ghosts.best(RECORDS, track) if choice == "best" else Path(choice)
            if folder is None:
                raise UsageError(f"{RECORDS}/ has no qualified record of {track}")
            ghost = {"record": folder.name, **ghosts.read(folder, track).points()}
        except UsageError as error:
            problems.append(f"no ghost: {error}")
    peaks = [[device.name, device.bf16_flops] for device in devices.DEVICES.values()]
    return {"target": target, "ghost": ghost, "peaks": peaks, "problems": problems}
