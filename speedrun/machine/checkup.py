"""All checks in order, and the next command. JAX is imported only if its version is right."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from speedrun.base import provenance
from speedrun.base import track as tracks
from speedrun.base.track import Track
from speedrun.data import hub, overview, shard_folder
from speedrun.machine import check_devices, check_software
from speedrun.machine.check_software import Check

SMOKE = "smoke-cpu"  #: runs anywhere
_DEVICES = Path("/dev")  #: where the kernel shows GPUs, working or not


def checks(track: Track, *, alone: bool = False) -> Iterator[Check]:
    """Yield every check as soon as it is done.

    The track decides what is needed. With `alone` other tracks are left out; so are rates and network, if the track
    needs neither GPUs nor the hub.
    """
    on_gpus = track.rules.platform == "gpu"
    frugal = alone and not on_gpus and track.data.hub is None
    basis = list(check_software.checks())
    yield from basis
    found: list[check_devices.Gpu] = []
    soundness = list(_driver(found, needed=on_gpus))
    yield from soundness
    machine = None
    if all(check.ok for check in basis if check.needed):
        usable = all(check.ok for check in soundness if check.name in ("cuda", "driver"))
        try:
            for check in check_devices.checks(found, usable=usable, timed=not frugal):
                yield check
                if check.name == "devices":
                    machine = check_devices.Machine(**check.facts)  # pyright: ignore[reportArgumentType]
        except RuntimeError as error:  # what JAX raises when a driver or a plugin is broken
            reason = str(error).strip().partition("\n")[0]
            yield Check("devices", f"{reason}; end what else uses them, or repair the driver", ok=False)
    yield disk(track)
    if not frugal:
        yield reachable()
    for one in [track] if alone else map(tracks.load, tracks.names()):
        is_asked = one.name == track.name
        fit = None if machine is None else fitting(one, machine, needed=is_asked)
        if fit is not None:
            yield fit
        if fit is None or fit.ok or is_asked:
            yield shards(one)


def _driver(found: list[check_devices.Gpu], *, needed: bool) -> Iterator[Check]:
    """Check GPUs and driver, and whether JAX can use them; yields nothing without GPUs. Fills `found`."""
    try:
        found += check_devices.found()
    except check_devices.NoAnswerError as error:
        if any(_DEVICES.glob("nvidia[0-9]*")) or shutil.which("nvidia-smi"):
            advice = "repair the driver, or rent another image"
            yield Check("driver", f"{error}; {advice}", ok=False, needed=needed)
        return
    if not found:
        return
    yield check_devices.identity(found)
    yield from check_software.cuda_checks(len(found), found[0].driver, provenance.installed(), needed=needed)


def fitting(track: Track, machine: check_devices.Machine, *, needed: bool) -> Check:
    """Check that the hardware of a track is here. CPU tracks simulate theirs."""
    rules, need = track.rules, max(track.rules.num_devices, 1)
    has_them = machine.platform == rules.platform and machine.num_devices >= need
    fits = has_them or rules.platform in ("any", "cpu")
    missing = f"needs {need} {rules.platform} devices, {machine.num_devices} x {machine.kind} are here"
    found = "fits this machine" if fits else missing
    return Check(f"track {track.name}", f"{found}: {track.summary}", ok=fits, needed=needed)


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
        return f"speedrun batch --track {track.name} --runs {track.rules.min_runs}"
    return f"speedrun run --track {track.name}"


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
