"""What a run depends on: its source closure and its environment.

The closure is every project file that the given modules reach by import statements, wherever in a file
those stand, so that no loaded-by-accident module comes along and no lazy import is missed.
"""

import ast
import os
import platform
import re
from importlib import metadata
from pathlib import Path

from speedrun.sourcefile import join_source

_ROOT = Path(__file__).parent.parent

#: Packages whose versions decide what a run computes: these are always there,
_PACKAGES = ("jax", "jaxlib", "optax", "numpy")
#: and of these the ones that are installed, on a machine with a GPU.
_FOR_GPUS = re.compile(
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


def closure(modules: list[str], extra: list[Path]) -> str:
    """One readable text of all project files that `modules` reach, in reading order, then `extra` files.

    Args:
        modules: dotted names; they come first and in this order.
        extra: data files inside the project.
    """
    found: dict[str, Path] = {}
    queue = [ancestor for module in modules for ancestor in [module, *_ancestors(module)]]
    while queue:
        module = queue.pop(0)
        path = _file_of(module)
        if path is not None and module not in found:
            found[module] = path
            queue += _imports(path)
    paths = [*found.values(), *extra]
    return join_source({path.relative_to(_ROOT).as_posix(): path.read_text() for path in paths})


def _imports(path: Path) -> list[str]:
    """Project modules named by the import statements of a file, their packages included."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    ours = [name for name in names if name.split(".")[0] == "speedrun"]
    return [module for name in ours for module in [name, *_ancestors(name)]]


def _ancestors(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]


def _file_of(module: str) -> Path | None:
    base = _ROOT / module.replace(".", "/")
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def software() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes."""
    installed = {one.name: one.version for one in metadata.distributions()}
    for_gpus = {name: installed[name] for name in sorted(installed) if _FOR_GPUS.fullmatch(name)}
    return {"python": platform.python_version(), **{name: installed[name] for name in _PACKAGES}, **for_gpus}


def environment() -> dict[str, str]:
    """The allow-listed environment variables that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}
