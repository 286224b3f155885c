"""Find the tracks that fit a machine, and the next command."""

import shlex

from speedrun.doctor.check import Check
from speedrun.doctor.devices import Machine
from speedrun.ground import track as tracks
from speedrun.ground.track import Track

SMOKE = "smoke-cpu"  #: runs anywhere


def check(track: Track, machine: Machine, *, needed: bool) -> Check:
    """Check that the hardware of a track is here. CPU tracks simulate theirs."""
    problem = _misfit(track, machine)
    found = f"{problem or 'fits this machine'}: {track.summary}"
    return Check(f"track {track.name}", found, ok=not problem, needed=needed)


def _misfit(track: Track, machine: Machine) -> str:
    rules = track.rules
    if rules.platform in ("any", "cpu"):
        return ""
    need = max(rules.num_devices, 1)
    if machine.platform == rules.platform and machine.num_devices >= need:
        return ""
    there = f"{machine.num_devices} x {machine.kind}"
    return f"needs {need} {rules.platform} devices, {there} are here"


def advice(checks: list[Check], *, asked: str | None) -> str:
    """Return the command for the chosen track, else for the ranked track with most devices that fits."""
    marks = {check.name: check.ok for check in checks}
    ranked = [
        track
        for track in map(tracks.load, tracks.names())
        if track.rules.ranked and marks.get(f"track {track.name}")
    ]
    hardest = max(ranked, key=lambda track: track.rules.num_devices, default=tracks.load(SMOKE))
    track = tracks.load(asked) if asked else hardest
    if not marks.get(f"data {track.name}"):
        return track.data.get
    if track.rules.ranked:
        argv = ["speedrun", "batch", "--track", track.name, "--runs", str(track.rules.min_runs)]
        return shlex.join(argv)
    return f"speedrun run --track {track.name}"
