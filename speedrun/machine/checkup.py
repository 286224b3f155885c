"""All checks in order, and the next command: software, devices, disk, network, tracks.

JAX is imported only if its version is right.
"""

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from speedrun.base import provenance, runlog
from speedrun.base import track as tracks
from speedrun.base.errors import UsageError
from speedrun.base.track import Track
from speedrun.data import hub, overview
from speedrun.data.shards import data_folder
from speedrun.machine import check_devices
from speedrun.machine.check_devices import Check
from speedrun.record import git_history, prospect
from speedrun.record.validate import Result
from speedrun.train.run_config import source_roots

SMOKE = "smoke-cpu"  #: runs anywhere
_DEVICES = Path("/dev")  #: the kernel lists GPUs here, working or not


def checks(track: Track, *, alone: bool = False) -> Iterator[Check]:
    """Yield every check as soon as it is done; the track decides which ones are needed.

    With `alone`, skip other tracks, and skip rates and network if the track needs neither GPUs nor the hub.
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
        # Of JAX, if a driver or a plugin is broken; of GPUs of two kinds.
        except (RuntimeError, UsageError) as error:
            reason = str(error).strip().partition("\n")[0]
            cure = "stop what uses them, or repair the driver"
            if "nccl" in str(error).lower():
                cure = "try again with NCCL_NVLS_ENABLE=0; NCCL_DEBUG=WARN says more"
            yield Check("devices", f"{reason}; {cure}", ok=False)
    yield disk(track)
    if not frugal:
        yield reachable()
    for one in [track] if alone else map(tracks.load, tracks.files()):
        is_asked = one.name == track.name
        fit = None if machine is None else fitting(one, machine, needed=is_asked)
        if fit is not None:
            yield fit
        if fit is None or fit.ok or is_asked:
            yield shards(one)


def _gpus(found: list[check_devices.Gpu], *, needed: bool) -> Iterator[Check]:
    """Check GPUs, CUDA wheels and driver, and add the GPUs to `found`; yield nothing without GPUs."""
    try:
        found += check_devices.found()
    except check_devices.NoAnswerError as error:
        if any(_DEVICES.glob("nvidia[0-9]*")) or shutil.which("nvidia-smi"):
            said = f"{error}; restart the machine, repair the driver, or rent another"
            yield Check("driver", said, ok=False, needed=needed)
        return
    if not found:
        return
    yield check_devices.identity(found)
    yield from check_devices.quiet(found)
    plugins = (re.fullmatch(r"jax-cuda(\d+)-plugin", name) for name in provenance.installed())
    release = max((int(match[1]) for match in plugins if match), default=None)
    said, facts = f"wheels of CUDA {release}", {"cuda_release": release}
    if release is None:
        said = f"JAX has no CUDA wheels for {len(found)} NVIDIA GPUs; scripts/install.sh adds them"
    yield Check("cuda", said, ok=release is not None, needed=needed, facts=facts)
    yield driver(found[0].driver, release or min(DRIVERS), needed=needed)


def fitting(track: Track, machine: check_devices.Machine, *, needed: bool) -> Check:
    """Check that this machine has the hardware of a track; CPU tracks simulate theirs."""
    rules, need = track.rules, max(track.rules.num_devices, 1)
    has_them = machine.platform == rules.platform and machine.num_devices >= need
    fits, found = has_them or rules.platform in ("any", "cpu"), "fits this machine"
    if not fits:
        found = f"needs {need} {rules.platform} devices, {machine.num_devices} x {machine.kind} are here"
    elif wrong := refusals(track, machine if has_them else machine._replace(platform="cpu", kind="cpu")):
        fits, found = False, f"no record that is made here would be accepted: {prospect.told(wrong)}"
    return Check(f"track {track.name}", f"{found}: {track.summary}", ok=fits, needed=needed)


def refusals(track: Track, machine: check_devices.Machine) -> list[Result]:
    """Return the checks that a record of the track's own recipe would fail, whatever its losses."""
    source = provenance.closure(source_roots(track.recipe), [tracks.files()[track.name]])
    num_devices = track.rules.num_devices or machine.num_devices
    start = runlog.RunStart(
        2, "", track.id, tracks.sha256(track.name), track.recipe, recipe_revision=0, overrides={}, seed=0,
        num_steps=0, source_sha256="", config={"num_devices": num_devices}, config_sha256="",
    )  # fmt: skip
    here = provenance.software(), provenance.environment()
    seen = runlog.Preflight(machine.platform, machine.kind, num_devices, *here, 0.0, **provenance.code())
    return prospect.problems(track, source, (start, seen, prospect.end()))


def advice(checks: list[Check], *, asked: str | None) -> str:
    """Return the next command for the chosen track, or for the largest ranked track that fits."""
    marks = {check.name: check.ok for check in checks}
    fit = (track for track in map(tracks.load, tracks.files()) if marks.get(f"track {track.name}"))
    ranked = [track for track in fit if track.rules.ranked]

    def difficulty(track: tracks.Track) -> tuple[int, bool]:
        return track.rules.num_devices, track.rules.most_params is None

    track = tracks.load(asked) if asked else max(ranked, key=difficulty, default=tracks.load(SMOKE))
    if not marks.get(f"data {track.name}"):
        return track.data.get
    if track.rules.ranked:
        return f"speedrun batch --track {track.name}"
    return f"speedrun run --track {track.name}"


def numbers(version: str) -> list[int]:
    """Return the numbers of a version; they compare as versions do."""
    return [int(number) for number in re.findall(r"\d+", version)]


def software() -> Iterator[Check]:
    """Check the minimum versions, then the lock."""
    version = ".".join(map(str, sys.version_info[:3]))
    text = git_history.files_here(["pyproject.toml"]).get("pyproject.toml")
    # pip has checked the requirements of an installed wheel.
    project = tomllib.loads(text.decode())["project"] if text else {"requires-python": "", "dependencies": []}
    yield floor("python", version, f"python{project['requires-python']}")
    packages = []
    for requirement in project["dependencies"]:
        name = re.split(r"[<>=!~; ]", requirement)[0]
        try:
            packages.append(floor(name, metadata.version(name), requirement))
        except metadata.PackageNotFoundError:
            packages.append(Check(name, f"missing; need {requirement}; pip install -e .", ok=False))
    yield from (check for check in packages if not check.ok)
    if packages and all(check.ok for check in packages):
        versions = {check.name: check.found for check in packages}
        yield Check("packages", ", ".join(map(" ".join, versions.items())), ok=True, facts={**versions})
    yield lock()


def floor(name: str, version: str, requirement: str) -> Check:
    """Check a requirement of the form `name>=version`."""
    ok = numbers(version) >= numbers(requirement.partition(">=")[2])
    return Check(name, version if ok else f"{version}; need {requirement}; pip install -e .", ok=ok)


def lock() -> Check:
    """Check that the packages are those of a lock file, as a ranked record requires."""
    found, facts = "the packages are not those of a lock file; for a ranked record: scripts/install.sh", {}
    if fits := provenance.lock().name:
        found, facts = f"every package is as requirements/{fits} pins it", {"lock": fits}
    return Check("lock", found, ok=bool(fits), needed=False, facts=facts)


#: Oldest driver for each major release of CUDA, by NVIDIA's minor version compatibility; as in scripts/install.sh.
DRIVERS = {12: "525.60.13", 13: "580"}


def driver(version: str, release: int, *, needed: bool) -> Check:
    """Check that a driver supports a release of CUDA."""
    least = DRIVERS.get(release, DRIVERS[max(DRIVERS)])
    runs = [one for one in DRIVERS if numbers(version) >= numbers(DRIVERS[one])]
    ok, found = numbers(version) >= numbers(least), f"{version}, enough for CUDA {release}"
    if not ok:
        what = f"install driver {least} or newer, or rent another image"
        if runs:
            what = f"SPEEDRUN_ACCELERATOR=cuda{max(runs)} scripts/install.sh"
        found = f"{version} is too old for CUDA {release}, which needs {least}; {what}"
    return Check("driver", found, ok=ok, needed=needed, facts={"driver": version})


_ANSWER_S = 4.0  #: of the hub


def disk(track: Track) -> Check:
    """Check that each disk has room for what a batch writes there, and is writable; folders need not exist yet."""
    needs = {
        data_folder(track, None).parent: overview.to_fetch_bytes(track),
        Path("runs"): overview.WRITTEN_BYTES,
    }
    disks: dict[int, tuple[Path, int]] = {}
    for folder, need_bytes in needs.items():
        there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
        first, sum_bytes = disks.get(there.stat().st_dev, (there, 0))
        disks[there.stat().st_dev] = first, sum_bytes + need_bytes
    said, facts, ok = [], {}, True
    for there, need_bytes in disks.values():
        free_bytes, writable = shutil.disk_usage(there).free, os.access(there, os.W_OK)
        said.append(
            f"{free_bytes / 1e9:,.1f} GB free in {there}; {track.name} needs {need_bytes / 1e9:.1f} GB"
        )
        if free_bytes < need_bytes or not writable:
            problem = "free some" if writable else "it cannot be written: change its permissions"
            said.append(f"{problem}, or name another disk with SPEEDRUN_DATA or --out")
            ok = False
        facts = facts or {"free_bytes": free_bytes, "need_bytes": need_bytes}
    return Check("disk", "; ".join(said), ok=ok, facts=facts)


def reachable() -> Check:
    """Check that the hub answers; only a note, since no run needs it once the data is here."""
    try:
        hub.reach(_ANSWER_S)
    except hub.HubError as error:
        found = f"data cannot be fetched: {error}; HF_ENDPOINT may name a mirror"
        return Check("hub", found, ok=False, needed=False)
    return Check("hub", "answers", ok=True, needed=False)


def shards(track: Track) -> Check:
    """Check the shards of a track; only a note, since one command fetches them."""
    here = overview.holding(track)
    found = here.problem or f"{here.shards} shards, {here.tokens:,} tokens in {here.folder}"
    facts = {"num_shards": here.shards, "num_tokens": here.tokens}
    return Check(f"data {track.name}", found, ok=here.complete, needed=False, facts=facts)
