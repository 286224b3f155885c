"""Compile for absent GPUs.

The CUDA compiler in JAX's plugin needs no GPU and no driver. The result is the program that a GPU would run, scheduled,
with its buffers assigned. It cannot be executed, and nothing is autotuned. Tests pin its numbers (tests/anatomy.py),
so that a change which adds an all-gather shows.
"""

import math
import shutil
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.base import accelerators, provenance
from speedrun.base.errors import UsageError
from speedrun.base.mesh import arranged, setting
from speedrun.train.program import Program

Options = dict[str, bool | int | str]

#: Wheels of a compiler: the plugin compiles, `nvcc` brings `ptxas`. The first is this project's extra `aot`.
COMPILERS = (
    ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"),
    ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm"),
)

#: Makes all GEMMs cuBLAS calls, also in FP8, as autotuning often does. Without a GPU the default is Triton for all.
CUBLAS_GEMMS: Options = {"xla_gpu_enable_triton_gemm": False}

#: Versions of all targets. Without them, XLA silently builds no FP8 GEMM.
_CUDA = "12.9.0"
_CUDNN = (9, 10, 2)
#: Threads and bytes of shared memory of a multiprocessor, bytes of the L2 cache, NVLinks in use.
_CORES = {
    "h100": (2048, 233_472, 50 * 2**20, 18),
    "b200": (2048, 233_472, 132_644_864, 18),
    "a100": (2048, 167_936, 40 * 2**20, 12),
    "a100-40gb": (2048, 167_936, 40 * 2**20, 12),
    "l40s": (1536, 102_400, 96 * 2**20, 0),
    "4090": (1536, 102_400, 72 * 2**20, 0),
}


def missing_wheels() -> list[str]:
    """Return the missing wheels of the first compiler, or none if any is complete. A CUDA toolkit on PATH counts."""
    here, toolkit = provenance.installed(), shutil.which("ptxas") is not None
    lacking = [
        [name for name in wheels if name not in here and not (toolkit and name.startswith("nvidia-"))]
        for wheels in COMPILERS
    ]
    return lacking[0] if all(lacking) else []


def target_mesh(kind: str, num_devices: int, num_nodes: int = 1) -> Mesh:
    """Return a mesh to compile for, with `num_devices` of one kind in each machine.

    Raises:
        UsageError: an unknown kind; a compiler that is not installed.
    """
    device = accelerators.load(kind)
    if missing := missing_wheels():
        # The plugin must be of JAX's own version.
        exact = " ".join(f"{name}=={jax.__version__}" if "jax" in name else name for name in COMPILERS[0])
        raise UsageError(
            f"found no {', '.join(missing)}; to compile for {device.name} without one, "
            f"scripts/install.sh compile, or pip install --no-deps {exact}"
        )
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target(device), topology=f"1x{num_nodes}x{num_devices}"
    )
    return arranged(topology.devices, num_nodes)


def compile_for_target(function: Any, *args: Any, options: Options = CUBLAS_GEMMS) -> Any:
    """Compile a result of `jax.jit` for the `target_mesh` of its arguments; return a `jax.stages.Compiled`.

    `args` are trees of `jax.ShapeDtypeStruct` with shardings. `options` are XLA's, with booleans as Python's.
    """
    # JAX can write such a program to its disk cache, but not read it back. It stores what took at least this long.
    with setting("jax_persistent_cache_min_compile_time_secs", math.inf):
        target = jax.tree.leaves(args)[0].sharding.mesh.devices.flat[0]
        with jax.default_device(target):  # Pallas asks it for the capability of cards that it does not know
            lowered = function.lower(*args)
        return lowered.compile(compiler_options=options)


def compiled_step(program: Program, step: int) -> Any:
    """Compile the training step of this number for the `target_mesh` of a program."""
    shape = program.shape_at(step)
    inputs = program.state, *program.ids(shape), schedule_of(program)
    options = program.compiler_options | CUBLAS_GEMMS
    return compile_for_target(program.train_step_for(shape.static), *inputs, options=options)


def schedule_of(program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the types of `Program.schedule`, whose arrays absent devices cannot hold."""
    everywhere, arrays = NamedSharding(program.mesh, P()), program.step.plan.schedule
    return {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for k, x in arrays.items()}


def target(device: accelerators.Device) -> str:
    """Return a device as a `GpuTargetConfigProto` in text form, for XLA's compiler."""
    major, minor = device.compute_capability
    kind = next(kind for kind, one in accelerators.DEVICES.items() if one == device)
    threads_per_core, shared_bytes_per_core, l2_bytes, num_links = _CORES.get(kind, _CORES["h100"])
    # The tensor cores of Hopper and Blackwell are compiled for sm_90a and sm_100a only.
    features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    # CUDA reserves 1 KiB of the shared memory of a core.
    return f"""
platform_name: "CUDA"
device_description_str: "{device.name}"
dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: {_CUDNN[2]} }}
gpu_device_info {{
  name: "{device.name}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "{major}.{minor}"
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  core_count: {device.num_cores}
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {threads_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_bytes_per_core - 1024}
  shared_memory_per_core: {shared_bytes_per_core}
  l2_cache_size: {l2_bytes}
  memory_bandwidth: {device.memory_rate:.0f}
  device_memory_size: {device.memory_bytes}
  clock_rate_ghz: {device.clock_ghz}
  device_address_bits: 64
  pcie_bandwidth: {32 * 2**30}
  device_interconnect_info {{ active_links: {num_links} }}
  driver_version: "{_CUDA}"
  runtime_version: "{_CUDA}"
  compile_time_toolkit_version: "{_CUDA}"
  dnn_version: "{".".join(map(str, _CUDNN))}"
}}
"""
