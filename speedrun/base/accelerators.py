"""Accelerators: properties for compiling without the device, and the vendor's peak rates for dense arithmetic."""

from typing import NamedTuple

from speedrun.base.errors import unknown

_GiB = 2**30


class Device(NamedTuple):
    """An accelerator."""

    name: str  #: as its driver reports it
    compute_capability: tuple[int, int]
    bf16_flops: float  #: per second, sums in float32
    fp8_flops: float  #: per second; 0 without FP8
    memory_bytes: int  #: as the driver reports it
    memory_rate: float  #: bytes per second
    link_rate: float  #: bytes per second to its peers, each way
    num_links: int  #: NVLinks in use; 0: PCIe
    num_cores: int  #: streaming multiprocessors
    threads_per_core: int
    shared_bytes_per_core: int
    l2_bytes: int
    clock_ghz: float


_H100 = Device(
    name="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    bf16_flops=989.4e12,
    fp8_flops=1978.9e12,
    memory_bytes=84_942_979_072,
    memory_rate=3.352e12,
    link_rate=450e9,
    num_links=18,
    num_cores=132,
    threads_per_core=2048,
    shared_bytes_per_core=233_472,
    l2_bytes=50 * 2**20,
    clock_ghz=1.98,
)
_A100 = Device(
    name="NVIDIA A100-SXM4-80GB",
    compute_capability=(8, 0),
    bf16_flops=312e12,
    fp8_flops=0.0,
    memory_bytes=int(79.1 * _GiB),
    memory_rate=2.039e12,
    link_rate=300e9,
    num_links=12,
    num_cores=108,
    threads_per_core=2048,
    shared_bytes_per_core=167_936,
    l2_bytes=40 * 2**20,
    clock_ghz=1.41,
)

_4090 = Device(
    name="NVIDIA GeForce RTX 4090",
    compute_capability=(8, 9),
    bf16_flops=165.2e12,
    fp8_flops=330.3e12,
    memory_bytes=int(23.6 * _GiB),
    memory_rate=1.008e12,
    link_rate=32e9,
    num_links=0,
    num_cores=128,
    threads_per_core=1536,
    shared_bytes_per_core=102_400,
    l2_bytes=72 * 2**20,
    clock_ghz=2.52,
)

#: By the name that `--device-kind` takes.
DEVICES = {
    "h100": _H100,
    "h200": _H100._replace(name="NVIDIA H200", memory_bytes=int(139.8 * _GiB), memory_rate=4.8e12),
    "b200": _H100._replace(
        name="NVIDIA B200",
        compute_capability=(10, 0),
        bf16_flops=2250e12,
        fp8_flops=4500e12,
        memory_bytes=191_514_411_008,
        memory_rate=7.67e12,  # of the bus that its driver reports; 8 TB/s in the first data sheets
        link_rate=900e9,
        num_cores=148,
        l2_bytes=132_644_864,
        clock_ghz=1.965,
    ),
    "a100": _A100,
    "a100-40gb": _A100._replace(
        name="NVIDIA A100-SXM4-40GB", memory_bytes=int(39.4 * _GiB), memory_rate=1.555e12
    ),
    "l40s": _4090._replace(
        name="NVIDIA L40S",
        bf16_flops=362.05e12,  # sums in float32 at full rate; a GeForce has half
        fp8_flops=733e12,
        memory_bytes=int(44.4 * _GiB),
        memory_rate=0.864e12,
        num_cores=142,
        l2_bytes=96 * 2**20,
    ),
    "4090": _4090,
}

#: Versions of all targets. Without them, XLA silently builds no FP8 GEMM.
_CUDA = "12.9.0"
_CUDNN = (9, 10, 2)


def load(kind: str) -> Device:
    """Return the device of a name in `DEVICES`, or raise UsageError."""
    if kind not in DEVICES:
        raise unknown("device kind", kind, DEVICES, least=0.8)  # v100 is no misspelled h100
    return DEVICES[kind]


def named(name: str) -> Device | None:
    """Return the device with this driver name, or None."""
    return next((device for device in DEVICES.values() if device.name == name), None)


def target(device: Device) -> str:
    """Return a device as a `GpuTargetConfigProto` in text form, for XLA's compiler."""
    major, minor = device.compute_capability
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
  threads_per_core_limit: {device.threads_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {device.shared_bytes_per_core - 1024}
  shared_memory_per_core: {device.shared_bytes_per_core}
  l2_cache_size: {device.l2_bytes}
  memory_bandwidth: {device.memory_rate:.0f}
  device_memory_size: {device.memory_bytes}
  clock_rate_ghz: {device.clock_ghz}
  device_address_bits: 64
  pcie_bandwidth: {32 * _GiB}
  device_interconnect_info {{ active_links: {device.num_links} }}
  driver_version: "{_CUDA}"
  runtime_version: "{_CUDA}"
  compile_time_toolkit_version: "{_CUDA}"
  dnn_version: "{".".join(map(str, _CUDNN))}"
}}
"""
