"""Compiles for accelerators that are not there: the CUDA compiler of JAX's plugin needs no GPU and no driver.

What comes out is the program a GPU would run, scheduled, with its buffers assigned. Nothing can be executed, and
nothing is tuned by trying: which GEMM kernel is fastest is found out on a GPU only.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
from jax.sharding import Mesh

from speedrun import devices
from speedrun.errors import UsageError
from speedrun.mesh import make_target_mesh

#: What compiles: the plugin is the compiler, `nvcc` brings `ptxas`. The first is this project's extra `aot`.
COMPILERS = (
    ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"),
    ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm"),
)

#: With it, all GEMMs are those of cuBLAS, FP8 ones included, as they often are once a GPU has tried both.
#: Without it and without a GPU to try, all are Triton's.
CUBLAS_GEMMS = {"xla_gpu_enable_triton_gemm": False}


def missing_wheels() -> list[str]:
    """What the first compiler lacks; nothing, if any is complete."""
    lacking = [[name for name in wheels if not _installed(name)] for wheels in COMPILERS]
    return lacking[0] if all(lacking) else []


def target_mesh(kind: str, num_devices: int) -> Mesh:
    """A mesh to compile for: `num_devices` of one kind in one machine.

    Raises:
        UsageError: an unknown kind; a compiler that is not installed.
    """
    device = devices.load(kind)
    if missing := missing_wheels():
        # The plugin must be of JAX's own version.
        exact = " ".join(f"{name}=={jax.__version__}" if "jax" in name else name for name in COMPILERS[0])
        raise UsageError(
            f"found no {', '.join(missing)}; to compile for {device.name} without one, "
            f"pip install --no-deps {exact}"
        )
    return make_target_mesh(devices.target(device), num_devices)


def compile_for_target(
    function: Any, *args: Any, options: Mapping[str, bool | int | str] = CUBLAS_GEMMS
) -> Any:
    """`function`, a result of `jax.jit`, compiled for the mesh its arguments lie on.

    Args:
        function: anything with `lower`.
        *args: trees of `jax.ShapeDtypeStruct` whose shardings are of a `target_mesh`.
        options: of XLA; booleans are Python's.

    Returns:
        The `jax.stages.Compiled`, which `anatomy.dissect` reads.
    """
    return function.lower(*args).compile(compiler_options=dict(options))


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
