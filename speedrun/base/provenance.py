"""What a run depends on: source closure, commit, packages and environment.

The closure has each project file that the given modules reach by import statements, lazy ones included.
"""

import ast
import hashlib
import os
import platform
import re
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from speedrun.base import faults
from speedrun.base.errors import UsageError
from speedrun.base.sourcefile import IMPORTED, ROOT, check_path, find, join_source

#: Packages on which the results of a run depend.
_PACKAGES = ("jax", "jaxlib", "optax", "numpy")
#: Further ones, on machines with a GPU.
FOR_GPUS = re.compile(r"jax-cuda\d+-(plugin|pjrt)|nvidia-(cublas|cudnn|nccl|cuda-nvcc)(-cu\d+)?")
#: Environment variables that may change a run, and that a record may have.
VARIABLES = (
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "JAX_PLATFORMS",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_ENABLE_X64",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_NVLS_ENABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
)
#: Variables that JAX, XLA, CUDA and NCCL read. Terraform has others that begin with TF_, and they may hold secrets.
_FAMILIES = re.compile(
    r"(JAX|XLA|CUDA|NCCL|NVIDIA)_\w+|TF_(XLA|GPU|CUDNN|CUDA|DETERMINISTIC|ENABLE|DISABLE|USE)_?\w*"
)
#: Of these, variables that change no program, and are not recorded, since they name places of a machine: labels of
#: images; caches; where memory comes from; logging; the network of NCCL; what the harness sets itself.
_HARMLESS = re.compile(
    r"CUDA_(VERSION|HOME|PATH|ROOT|PKG_VERSION|CACHE_\w+|MODULE_LOADING|DEVICE_ORDER)|NVIDIA_(VISIBLE_DEVICES|\w*VERSION|"
    r"DRIVER_CAPABILITIES|REQUIRE_\w+|PRODUCT_NAME|BUILD_\w+)|JAX_((PERSISTENT|COMPILATION)_CACHE_\w+|\w*LOG\w*|"
    r"TRACEBACK_\w+|NUM_CPU_DEVICES|COORDINATOR_ADDRESS)|XLA_PYTHON_CLIENT_(PREALLOCATE|ALLOCATOR)|"
    r"NCCL_(VERSION|DEBUG\w*|SOCKET_\w+|IB_\w+|NET(_PLUGIN)?)"
)
_PIN = re.compile(r"^([a-z0-9-]+)==(\S+)( ;)?", re.MULTILINE)
#: Digest of a container image, after its name if it was published. `scripts/docker_run.sh` sets the variable.
_IMAGE = re.compile(r"([a-z0-9][a-z0-9._/:-]{0,127}@)?sha256:[0-9a-f]{64}")
IMAGE_VARIABLE = "SPEEDRUN_IMAGE"
_GIT_S = 10.0  #: for git on a slow network disk


def closure(modules: list[str], extra: list[Path]) -> str:
    """Return one text of all project files that `modules` reach, in reading order, and of `extra` files."""
    texts: dict[str, str] = {}
    queue = _with_packages(modules)
    while queue:
        place, path = find(queue.pop(0)) or ("", ROOT)
        if place and place not in texts:
            try:
                text = IMPORTED.get(str(path)) or path.read_text(encoding="utf-8-sig")
                texts[check_path(place)] = text + "\n" * (text[-1:] not in ("\n", ""))
            except ValueError as error:
                raise UsageError(f"{path}: {error}; a record cannot carry this file") from None
            queue += _with_packages(_imports(path, text))
    return join_source(texts | {path.relative_to(ROOT).as_posix(): path.read_text() for path in extra})


@cache
def _imports(path: Path, text: str) -> list[str]:
    """Return the project modules that a file imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise UsageError(f"{path} line {node.lineno}: relative import; write 'from speedrun....' in full")
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.split(".")[0] == "speedrun"]


def _with_packages(modules: list[str]) -> list[str]:
    """Return each module, followed by its packages from the innermost to the outermost."""
    return [module.rsplit(".", up)[0] for module in modules for up in range(module.count(".") + 1)]


def software() -> dict[str, str]:
    """Return the versions of Python and of packages that affect results, and the digest of the container."""
    here = installed()
    packages = {name: here[name] for name in (*_PACKAGES, *filter(FOR_GPUS.fullmatch, sorted(here)))}
    named = os.environ.get(IMAGE_VARIABLE, "")
    image = {"image": named} if _IMAGE.fullmatch(named) else {}
    return {"python": platform.python_version(), **packages, **image}


def is_read(name: str) -> bool:
    """Say whether a variable is one that JAX, XLA, CUDA or NCCL may read, and may change a program."""
    return bool(_FAMILIES.fullmatch(name)) and not _HARMLESS.fullmatch(name)


def environment() -> dict[str, str]:
    """Return the variables that may change a program: V402 refuses those that are not in `VARIABLES`."""
    return {k: v for k, v in sorted(os.environ.items()) if is_read(k) or k == faults.VARIABLE}


def checkout() -> tuple[str, bool | None]:
    """Return the commit of this code and whether files differ from it; "" and None if unknown."""
    if not (ROOT / ".git").exists():
        return "", None
    argv = ["git", "--no-optional-locks", "-C", str(ROOT), "status", "--porcelain=2", "--branch"]
    try:
        lines = subprocess.run(
            [*argv, "--", "speedrun", "requirements", "pyproject.toml"],
            capture_output=True, encoding="utf-8", errors="replace", timeout=_GIT_S, check=True,
        ).stdout.splitlines()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "", None
    head = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    return head, any(not line.startswith("# ") for line in lines)


class Lock(NamedTuple):
    """A file of pinned packages."""

    name: str
    sha256: str


def lock() -> Lock:
    """Return the lock file whose pins are all installed: the one with most installed packages, then fewest others."""
    versions_here = installed()
    fits: dict[tuple[int, int], Lock] = {}
    for path in sorted((ROOT / "requirements").glob("*.lock")):
        raw = path.read_bytes()
        if pins := pinned(raw.decode()):
            whole = set(_PACKAGES) <= pins.keys()  # not one that is installed over another
            if whole and all(versions_here.get(name) in versions for name, versions in pins.items()):
                count = len(pins.keys() & versions_here.keys())
                fits[count, count - len(pins)] = Lock(path.name, hashlib.sha256(raw).hexdigest())
    return fits[max(fits)] if fits else Lock("", "")


@cache  # reading 230 files takes as long as tracing a small step
def installed() -> dict[str, str]:
    """Return the versions of all installed packages, by normalised name."""
    return {re.sub(r"[-_.]+", "-", one.name).lower(): one.version for one in metadata.distributions()}


def pinned(text: str) -> dict[str, set[str | None]]:
    """Return the versions that a lock file permits for each package; None if it may be missing."""
    pins: dict[str, set[str | None]] = {}
    for name, version, marker in _PIN.findall(text):
        pins.setdefault(name, set()).update({version, None} if marker else {version})
    return pins


def code() -> dict[str, Any]:
    """Return checkout and lock file as fields of `runlog.Preflight`."""
    (commit, dirty), packages = checkout(), lock()
    return {"commit": commit, "dirty": dirty, "lock": packages.name, "lock_sha256": packages.sha256}
