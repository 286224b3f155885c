"""Accelerators: properties, and the vendor's peak rates for dense arithmetic."""

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
    num_cores: int  #: streaming multiprocessors
    clock_ghz: float


_H100 = Device(
    name="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    bf16_flops=989.4e12,
    fp8_flops=1978.9e12,
    memory_bytes=84_942_979_072,
    memory_rate=3.352e12,
    link_rate=450e9,
    num_cores=132,
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
    num_cores=108,
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
    num_cores=128,
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
    ),
    "4090": _4090,
}


def load(kind: str) -> Device:
    """Return the device of a name in `DEVICES`, or raise UsageError."""
    if kind not in DEVICES:
        raise unknown("device kind", kind, DEVICES, least=0.8)  # v100 is no misspelled h100
    return DEVICES[kind]


def named(name: str) -> Device | None:
    """Return the device with this driver name, or None."""
    return next((device for device in DEVICES.values() if device.name == name), None)
