"""All checks in order, and the next command: software, devices, disk, network, tracks.

Software is Python, its packages and the CUDA wheels, checked against declared minimum versions, the lock files and the
driver. JAX is imported only if its version is right.
"""

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from speedrun.base import provenance
from speedrun.base import track as tracks
from speedrun.base.track import Track
from speedrun.data import hub, overview
from speedrun.data.shards import data_folder
from speedrun.machine import check_devices
from speedrun.machine.check_devices import Check
from speedrun.record import git_history

SMOKE = "smoke-cpu"  #: runs anywhere
_DEVICES = Path("/dev")  #: where the kernel shows GPUs, working or not


def checks(track: Track, *, alone: bool = False) -> Iterator[Check]:
    """Yield every check as soon as it is done.

    The track decides what is needed. With `alone` other tracks are left out; so are rates and network, if the track
    needs neither GPUs nor the hub.
    """
    on_gpus = track.rules.platform == "gpu"
    frugal = alone and not on_gpus and track.data.hub is None
    basis = list(software())
    yield from basis
    found: list[check_devices.Gpu] = []
    soundness = list(_gpus(found, needed=on_gpus))
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


def _gpus(found: list[check_devices.Gpu], *, needed: bool) -> Iterator[Check]:
    """Check GPUs, CUDA wheels and driver; yields nothing without GPUs. Fills `found`.

    `needed`: whether the chosen track trains on GPUs.
    """
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
    installed = provenance.installed()
    releases, problem = _releases(installed), wheels_problem(installed)
    if problem:
        said, facts = f"{len(found)} NVIDIA GPUs are here, but {problem}", {}
    else:
        plugin = f"jax-cuda{releases[0]}-plugin"
        said = f"wheels of CUDA {releases[0]}, {plugin} {installed[plugin]}"
        facts = {"cuda_release": releases[0]}
    yield Check("cuda", said, ok=not problem, needed=needed, facts=facts)
    yield driver(found[0].driver, max(releases, default=min(DRIVERS)), needed=needed)


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


def numbers(version: str) -> list[int]:
    """Return the numbers of a version, which compare as versions do."""
    return [int(number) for number in re.findall(r"\d+", version)]


def software() -> Iterator[Check]:
    """Check minimum versions, which all else needs, then the lock."""
    version = ".".join(map(str, sys.version_info[:3]))
    try:
        python, requirements = declared()
    except metadata.PackageNotFoundError:
        yield Check("speedrun", "not installed; its floors are unknown; pip install -e .", ok=False)
        return
    yield floor("python", version, f"python{python}")
    packages = []
    for requirement in requirements:
        name = re.split(r"[<>=!~; ]", requirement)[0]
        try:
            packages.append(floor(name, metadata.version(name), requirement))
        except metadata.PackageNotFoundError:
            packages.append(Check(name, f"missing; need {requirement}; pip install -e .", ok=False))
    yield from (check for check in packages if not check.ok)
    if all(check.ok for check in packages):
        versions = {check.name: check.found for check in packages}
        yield Check("packages", ", ".join(map(" ".join, versions.items())), ok=True, facts={**versions})
    yield lock()


def declared() -> tuple[str, list[str]]:
    """Return the requirements on Python and packages: of pyproject.toml beside the code, else of the package.

    Raises:
        PackageNotFoundError: if there is neither.
    """
    if text := git_history.files_here(["pyproject.toml"]).get("pyproject.toml"):
        project = tomllib.loads(text.decode())["project"]
        return project["requires-python"], project["dependencies"]
    about, requirements = metadata.metadata("speedrun"), metadata.requires("speedrun") or []
    return about["Requires-Python"], [one for one in requirements if "extra ==" not in one]


def floor(name: str, version: str, requirement: str) -> Check:
    """Check a requirement with `>=`, the only form in use here."""
    ok = numbers(version) >= numbers(requirement.partition(">=")[2])
    return Check(name, version if ok else f"{version}; need {requirement}; pip install -e .", ok=ok)


def lock() -> Check:
    """Check that all pins of a lock file are installed, which a ranked record needs."""
    found, facts = "not every package is as a lock file pins it; for a ranked record: scripts/install.sh", {}
    if fits := provenance.lock().name:
        found, facts = f"every package as requirements/{fits} pins it", {"lock": fits}
    return Check("lock", found, ok=bool(fits), needed=False, facts=facts)


#: Oldest driver for a major release of CUDA, by NVIDIA's minor version compatibility. scripts/install.sh uses the same
#: numbers.
DRIVERS = {12: "525.60.13", 13: "580"}

#: Wheels with compilers only. The toolkit of the system may have the same programs, and XLA says so if it has not.
_COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm")
_ANEW = "make it anew: rm -r .venv; scripts/install.sh"


def driver(version: str, release: int, *, needed: bool) -> Check:
    """Check that a driver runs a release of CUDA."""
    least = DRIVERS.get(release, DRIVERS[max(DRIVERS)])
    runs = [one for one in DRIVERS if numbers(version) >= numbers(DRIVERS[one])]
    ok, found = numbers(version) >= numbers(least), f"{version}, enough for CUDA {release}"
    if not ok:
        what = f"install driver {least} or newer, or rent another image"
        if runs:
            what = f"SPEEDRUN_ACCELERATOR=cuda{max(runs)} scripts/install.sh"
        found = f"{version} is too old for CUDA {release}, which needs {least}; {what}"
    return Check("driver", found, ok=ok, needed=needed, facts={"driver": version})


def wheels_problem(installed: dict[str, str]) -> str:
    """Return what is wrong with the CUDA wheels and what to do, or an empty text."""
    releases = _releases(installed)
    if not releases:
        return "JAX has no CUDA wheels; scripts/install.sh adds them"
    if len(releases) > 1:
        return f"wheels of CUDA {' and '.join(map(str, releases))} lie side by side; {_ANEW}"
    plugin = f"jax-cuda{releases[0]}-plugin"
    versions = {name: installed.get(name, "missing") for name in (plugin, plugin[:-6] + "pjrt", "jaxlib")}
    if len(set(versions.values())) > 1:
        said = ", ".join(f"{name} {version}" for name, version in versions.items())
        return f"wheels of several versions are mixed ({said}); {_ANEW}"
    missing = sorted({*_libraries(plugin)} - installed.keys())
    return f"CUDA is half installed: {', '.join(missing)} missing; {_ANEW}" if missing else ""


def _releases(installed: dict[str, str]) -> list[int]:
    found = (re.fullmatch(r"jax-cuda(\d+)-plugin", name) for name in installed)
    return sorted(int(match[1]) for match in found if match)


def _libraries(plugin: str) -> list[str]:
    """Return the wheels that the plugin requires to run."""
    wanted = [line for line in metadata.requires(plugin) or [] if "with-cuda" in line]
    return [re.split(r"[<>=!~; ]", line)[0] for line in wanted if not line.startswith(_COMPILER)]


_ANSWER_S = 4.0  #: of the hub


def disk(track: Track) -> Check:
    """Check that a track's data has room and may be written; the folder may not exist yet."""
    root = data_folder(track, None).parent.absolute()
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
