"""All checks in order. JAX is imported only if its version is right."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from speedrun.doctor import cuda, data, devices, fit, gpus, software
from speedrun.doctor.check import Check
from speedrun.ground import provenance
from speedrun.ground import track as tracks
from speedrun.ground.track import Track


def checks(track: Track, *, alone: bool = False) -> Iterator[Check]:
    """Yield every check as soon as it is done.

    The track decides what is needed. With `alone` other tracks are left out; so are rates and network, if the track
    needs neither GPUs nor the hub.
    """
    on_gpus = track.rules.platform == "gpu"
    frugal = alone and not on_gpus and track.data.hub is None
    basis = list(software.checks())
    yield from basis
    found: list[gpus.Gpu] = []
    soundness = list(_driver(found, needed=on_gpus))
    yield from soundness
    machine = None
    if all(check.ok for check in basis if check.needed):
        usable = all(check.ok for check in soundness if check.name in ("cuda", "driver"))
        try:
            for check in devices.checks(found, usable=usable, timed=not frugal):
                yield check
                if check.name == "devices":
                    machine = devices.Machine(**check.facts)  # pyright: ignore[reportArgumentType]
        except RuntimeError as error:  # what JAX raises when a driver or a plugin is broken
            reason = str(error).strip().partition("\n")[0]
            yield Check("devices", f"{reason}; end what else uses them, or repair the driver", ok=False)
    yield from data.disk(track, timed=not frugal)
    if not frugal:
        yield data.reachable()
    for one in [track] if alone else map(tracks.load, tracks.names()):
        fits = True
        if machine is not None:
            fitting = fit.check(one, machine, needed=one.name == track.name)
            fits = fitting.ok
            yield fitting
        if fits or one.name == track.name:
            yield data.shards(one)


def _driver(found: list[gpus.Gpu], *, needed: bool) -> Iterator[Check]:
    """Check GPUs and driver, and whether JAX can use them; yields nothing without GPUs. Fills `found`."""
    try:
        found += gpus.found()
    except gpus.NoAnswerError as error:
        if (num := _known_gpus()) or shutil.which("nvidia-smi"):
            here = f"{num} NVIDIA GPUs are here, but" if num else "the kernel knows no NVIDIA GPU, and"
            advice = "repair the driver, or rent another image"
            yield Check("driver", f"{here} {error}; {advice}", ok=False, needed=needed)
        return
    if not found:
        return
    yield gpus.identity(found)
    yield from cuda.checks(found, provenance.installed(), needed=needed)


def _known_gpus() -> int:
    """Count the GPUs that the kernel knows, working or not."""
    return sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
