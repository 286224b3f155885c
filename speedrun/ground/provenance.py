"""What a run depends on: its source closure, its commit, its packages and its environment.

The closure is every project file that the given modules reach by import statements, wherever in a file
those stand, so that no loaded-by-accident module comes along and no lazy import is missed.
"""

import ast
import hashlib
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from speedrun.ground import faults
from speedrun.ground.errors import UsageError
from speedrun.ground.sourcefile import IMPORTED, ROOT, find, join_source

#: Packages whose versions decide what a run computes: these are always there,
_PACKAGES = ("jax", "jaxlib", "optax", "numpy")
#: and of these the ones that are installed, on a machine with a GPU.
FOR_GPUS = re.compile(
    r"jax-cuda\d+-(plugin|pjrt)|nvidia-(cublas|cudnn|nccl|cuda-nvcc)(-cu\d+)?|dew-flash-attn-cu\d+"
)
#: Environment variables that may change a run; nothing else of the environment is recorded.
VARIABLES = (
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "JAX_PLATFORMS",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_NVLS_ENABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
)
_PIN = re.compile(r"^([a-z0-9-]+)==(\S+)( ;)?", re.MULTILINE)
#: Digest of a container image, behind its name if it has been published; `scripts/docker_run.sh` sets the variable.
_IMAGE = re.compile(r"([a-z0-9][a-z0-9._/:-]{0,127}@)?sha256:[0-9a-f]{64}")
IMAGE_VARIABLE = "SPEEDRUN_IMAGE"
_GIT_S = 10.0  #: a checkout on a slow network need not hold up a run


def closure(modules: list[str], extra: list[Path]) -> str:
    """One readable text of all project files that `modules` reach, in reading order, then `extra` files.

    Args:
        modules: dotted names; they come first and in this order.
        extra: data files inside the project.

    Raises:
        UsageError: for a relative import.
    """
    texts: dict[str, str] = {}
    queue = [ancestor for module in modules for ancestor in [module, *_ancestors(module)]]
    while queue:
        place, path = find(queue.pop(0)) or ("", ROOT)
        if place and place not in texts:
            text = IMPORTED.get(str(path)) or path.read_text(encoding="utf-8")
            texts[place] = text + "\n" * (text[-1:] not in ("\n", ""))
            queue += _imports(path, text)
    return join_source(texts | {path.relative_to(ROOT).as_posix(): path.read_text() for path in extra})


def _imports(path: Path, text: str) -> list[str]:
    """Project modules named by the import statements of a file, their packages included."""
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise UsageError(
                f"{path} line {node.lineno}: a relative import; write 'from speedrun....' in full"
            )
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    ours = [name for name in names if name.split(".")[0] == "speedrun"]
    return [module for name in ours for module in [name, *_ancestors(name)]]


def _ancestors(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]


def software() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes; the image, inside a container."""
    installed = {one.name: one.version for one in metadata.distributions()}
    for_gpus = {name: installed[name] for name in sorted(installed) if FOR_GPUS.fullmatch(name)}
    packages = {**{name: installed[name] for name in _PACKAGES}, **for_gpus}
    return {"python": platform.python_version(), **packages, **image()}


def image() -> dict[str, str]:
    """The container image around us, as `{"image": digest}`; empty outside of one, and where nobody gave its digest."""
    named = os.environ.get(IMAGE_VARIABLE, "")
    return {"image": named} if _IMAGE.fullmatch(named) else {}


def environment() -> dict[str, str]:
    """The allow-listed environment variables that are set; and the one of tests, which V402 refuses in a record."""
    return {name: os.environ[name] for name in (*VARIABLES, faults.VARIABLE) if name in os.environ}


class Checkout(NamedTuple):
    """Which code this is."""

    commit: str  #: empty where nobody knows
    dirty: bool | None  #: whether code or requirements differ from the commit; None where nobody knows


def checkout() -> Checkout:
    """What git says of the checkout that this code lies in; nothing is known without git or a checkout."""
    if not (ROOT / ".git").exists():
        return Checkout("", None)
    argv = ["git", "--no-optional-locks", "-C", str(ROOT), "status", "--porcelain=2", "--branch"]
    try:
        said = subprocess.run(
            [*argv, "--", "speedrun", "requirements", "pyproject.toml"],
            capture_output=True, encoding="utf-8", errors="replace", timeout=_GIT_S, check=True,
        ).stdout.splitlines()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return Checkout("", None)
    head = next((line.split()[-1] for line in said if line.startswith("# branch.oid ")), "")
    return Checkout(head, any(not line.startswith("# ") for line in said))


class Lock(NamedTuple):
    """A file of pinned packages."""

    name: str
    sha256: str


def lock() -> Lock:
    """The file of requirements/ whose packages are installed here, all in the pinned version; else empty.

    Of several, the one that names the most of what is installed, and the least of what is not.
    """
    there = installed()
    fits: dict[tuple[int, int], Lock] = {}
    for path in sorted((ROOT / "requirements").glob("*.lock")):
        raw = path.read_bytes()
        if pins := pinned(raw.decode()):
            whole = set(_PACKAGES) <= pins.keys()  # not one that is laid over others
            if whole and all(there.get(name) in versions for name, versions in pins.items()):
                here = len(pins.keys() & there.keys())
                fits[here, here - len(pins)] = Lock(path.name, hashlib.sha256(raw).hexdigest())
    return fits[max(fits)] if fits else Lock("", "")


def installed() -> dict[str, str]:
    """Versions of all packages here, by their names as lock files spell them."""
    return {re.sub(r"[-_.]+", "-", one.name).lower(): one.version for one in metadata.distributions()}


def pinned(text: str) -> dict[str, set[str | None]]:
    """The versions in which a lock file allows each package; None among them: it may be missing on some platforms."""
    pins: dict[str, set[str | None]] = {}
    for name, version, marker in _PIN.findall(text):
        pins.setdefault(name, set()).update({version, None} if marker else {version})
    return pins


def code() -> dict[str, Any]:
    """Both, as the fields of `runlog.Preflight`."""
    here, packages = checkout(), lock()
    return {"commit": here.commit, "dirty": here.dirty, "lock": packages.name, "lock_sha256": packages.sha256}
