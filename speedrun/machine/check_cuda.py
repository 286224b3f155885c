"""Check that driver, CUDA wheels and JAX fit together, on a machine with GPUs."""

import os
import re
from collections.abc import Iterator
from importlib import metadata

from speedrun.machine import check_gpus
from speedrun.machine.finding import Check, numbers

#: Oldest driver for a major release of CUDA, by NVIDIA's minor version compatibility. scripts/install.sh uses the same
#: numbers.
DRIVERS = {12: "525.60.13", 13: "580"}

#: Wheels with compilers only. The toolkit of the system may have the same programs, and XLA says so if it has not.
_COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm")
_ANEW = "make it anew: rm -r .venv; scripts/install.sh"


def checks(found: list[check_gpus.Gpu], installed: dict[str, str], *, needed: bool) -> Iterator[Check]:
    """Check the wheels, then the driver for them.

    `needed`: whether the chosen track trains on GPUs.
    """
    problem = wheels_problem(installed)
    releases = _releases(installed)
    if problem:
        yield Check("cuda", f"{len(found)} NVIDIA GPUs are here, but {problem}", ok=False, needed=needed)
    else:
        (release,) = releases
        plugin = f"jax-cuda{release}-plugin"
        said = f"wheels of CUDA {release}, {plugin} {installed[plugin]}"
        yield Check("cuda", said, ok=True, needed=needed, facts={"cuda_release": release})
    yield driver(found[0].driver, max(releases, default=min(DRIVERS)), needed=needed)


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
