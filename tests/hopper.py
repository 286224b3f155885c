"""Compiling for an H100 where there is none: XLA's own compiler, told what the device is like."""

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies

#: Why not, in plain words; None if it can be done. The plugin holds the compiler, the nvcc wheel its assembler.
MISSING = next(
    (
        f"no {module}: pip install --no-deps {wheel}"
        for module, wheel in {
            "jax_plugins.xla_cuda12": f"jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__}",
            "nvidia.cuda_nvcc": "nvidia-cuda-nvcc-cu12",
        }.items()
        if importlib.util.find_spec(module.partition(".")[0]) is None
        or importlib.util.find_spec(module) is None
    ),
    None,
)

needs_compiler = pytest.mark.skipif(MISSING is not None, reason=f"cannot compile for an H100: {MISSING}")

#: An H100 SXM. The feature extension makes it sm_90a, without which there is no wgmma.
TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"
  device_vendor: "NVIDIA Corporation"
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  device_address_bits: 64
  pcie_bandwidth: 34359738368
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_interconnect_info { active_links: 18 }
  driver_version: "12.9.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}
"""


def compiled(function: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
    """The function as one H100 would run it."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    mesh = jax.sharding.Mesh(np.array(topology.devices), ("data",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in args]
    return jax.jit(function).trace(*placed).lower().compile()


def load_cuda_runtime() -> None:
    """FFI wheels expect the CUDA runtime to be loaded, as it is wherever there is a GPU."""
    spec = importlib.util.find_spec("nvidia.cuda_runtime")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no CUDA runtime: pip install nvidia-cuda-runtime-cu12")
    for folder in spec.submodule_search_locations:
        for path in Path(folder, "lib").glob("libcudart.so.*"):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
