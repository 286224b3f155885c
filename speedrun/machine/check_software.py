"""Check Python, its packages and the CUDA wheels, against declared minimum versions, the lock files and the driver."""

import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Literal

import msgspec

from speedrun.base import provenance
from speedrun.record import git_history

Fact = float | int | str | bool | None

#: `ok`, a note, or an obstacle.
Mark = Literal["ok", "note", "bad"]


class Check(msgspec.Struct, frozen=True):
    """What was checked, what was found, and whether that is fine."""

    name: str
    found: str  #: one line; if not ok, it ends with what to do
    ok: bool
    needed: bool = True  #: for the chosen track
    facts: Mapping[str, Fact] = {}  #: the finding as numbers; names have units

    @property
    def mark(self) -> Mark:
        """`ok`; `bad` if it is needed; else `note`."""
        return "ok" if self.ok else "bad" if self.needed else "note"


def numbers(version: str) -> list[int]:
    """Return the numbers of a version, which compare as versions do."""
    return [int(number) for number in re.findall(r"\d+", version)]


_INSTALL = "scripts/install.sh"


def checks() -> Iterator[Check]:
    """Check minimum versions, which all else needs, then the lock."""
    version = ".".join(map(str, sys.version_info[:3]))
    try:
        python, requirements = declared()
    except metadata.PackageNotFoundError:
        yield Check("speedrun", "not installed; its floors are unknown; pip install -e .", ok=False)
        return
    yield floor("python", version, f"python{python}")
    packages = list(_packages(requirements))
    yield from (check for check in packages if not check.ok)
    if all(check.ok for check in packages):
        versions = {check.name: check.found for check in packages}
        said = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield Check("packages", said, ok=True, facts={**versions})
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


def _packages(requirements: list[str]) -> Iterator[Check]:
    for requirement in requirements:
        name = re.split(r"[<>=!~; ]", requirement)[0]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(name, f"missing; need {requirement}; pip install -e .", ok=False)
        else:
            yield floor(name, version, requirement)


def floor(name: str, version: str, requirement: str) -> Check:
    """Check a requirement with `>=`, the only form in use here."""
    if numbers(version) >= numbers(requirement.partition(">=")[2]):
        return Check(name, version, ok=True)
    return Check(name, f"{version}; need {requirement}; pip install -e .", ok=False)


def lock() -> Check:
    """Check that all pins of a lock file are installed, which a ranked record needs."""
    if fits := provenance.lock().name:
        found, facts = f"every package as requirements/{fits} pins it", {"lock": fits}
        return Check("lock", found, ok=True, needed=False, facts=facts)
    found = f"not every package is as a lock file pins it; for a ranked record: {_INSTALL}"
    return Check("lock", found, ok=False, needed=False)


#: Oldest driver for a major release of CUDA, by NVIDIA's minor version compatibility. scripts/install.sh uses the same
#: numbers.
DRIVERS = {12: "525.60.13", 13: "580"}

#: Wheels with compilers only. The toolkit of the system may have the same programs, and XLA says so if it has not.
_COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm")
_ANEW = "make it anew: rm -r .venv; scripts/install.sh"


def cuda_checks(num_gpus: int, version: str, installed: dict[str, str], *, needed: bool) -> Iterator[Check]:
    """Check the CUDA wheels, then that version of the driver for them.

    `needed`: whether the chosen track trains on GPUs.
    """
    problem = wheels_problem(installed)
    releases = _releases(installed)
    if problem:
        yield Check("cuda", f"{num_gpus} NVIDIA GPUs are here, but {problem}", ok=False, needed=needed)
    else:
        (release,) = releases
        plugin = f"jax-cuda{release}-plugin"
        said = f"wheels of CUDA {release}, {plugin} {installed[plugin]}"
        yield Check("cuda", said, ok=True, needed=needed, facts={"cuda_release": release})
    yield driver(version, max(releases, default=min(DRIVERS)), needed=needed)


def driver(version: str, release: int, *, needed: bool) -> Check:
    """Check that a driver runs a release of CUDA."""
    least, facts = DRIVERS.get(release, DRIVERS[max(DRIVERS)]), {"driver": version}
    if numbers(version) >= numbers(least):
        return Check("driver", f"{version}, enough for CUDA {release}", ok=True, needed=needed, facts=facts)
    older = [old for old in DRIVERS if old < release and numbers(version) >= numbers(DRIVERS[old])]
    what = (
        f"SPEEDRUN_ACCELERATOR=cuda{max(older)} scripts/install.sh"
        if older
        else f"install driver {least} or newer, or rent another image"
    )
    found = f"{version} is too old for CUDA {release}, which needs {least}; {what}"
    return Check("driver", found, ok=False, needed=needed, facts=facts)


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


def unseen(num_gpus: int, num_devices: int) -> Check:
    """Say why JAX sees fewer GPUs than the driver."""
    hidden = [
        f"{name}={os.environ[name]}"
        for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")
        if os.environ.get(name) is not None and "cuda" not in os.environ[name]
    ]
    why = (
        f"unset {', '.join(hidden)}"
        if hidden
        else "look at what JAX says: python -c 'import jax; jax.devices()'"
    )
    return Check("visible", f"JAX sees {num_devices} of {num_gpus} GPUs; {why}", ok=False, needed=False)


def _releases(installed: dict[str, str]) -> list[int]:
    found = (re.fullmatch(r"jax-cuda(\d+)-plugin", name) for name in installed)
    return sorted(int(match[1]) for match in found if match)


def _libraries(plugin: str) -> list[str]:
    """Return the wheels that the plugin requires to run."""
    wanted = [line for line in metadata.requires(plugin) or [] if "with-cuda" in line]
    return [re.split(r"[<>=!~; ]", line)[0] for line in wanted if not line.startswith(_COMPILER)]
