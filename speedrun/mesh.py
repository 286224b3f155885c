"""The only place that makes meshes and puts arrays on them."""

import resource
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.errors import UsageError
from speedrun.params import AXIS

#: Simulated CPU devices; eight stand for a node.
CPU_DEVICES = 8


def prepare(platform: str) -> None:
    """Chooses the devices of this process. Must come before the first use of JAX.

    Args:
        platform: "cpu" simulates a node; "gpu" takes what is there; "any" takes GPUs if there are some.
    """
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    if platform == "gpu" or (platform == "any" and has_gpu):
        return
    for name, value in {"jax_platforms": "cpu", "jax_num_cpu_devices": CPU_DEVICES}.items():
        if getattr(jax.config, name) != value:  # JAX refuses a change once it has started
            jax.config.update(name, value)


def make_mesh(num_devices: int) -> Mesh:
    """A mesh of one axis over the first `num_devices` devices.

    Raises:
        UsageError: if there are fewer.
    """
    devices = jax.devices()
    if len(devices) < num_devices:
        raise UsageError(
            f"found {len(devices)} {devices[0].platform} devices, need {num_devices}; "
            f"pass --devices {len(devices)} or run where {num_devices} are visible"
        )
    return Mesh(np.array(devices[:num_devices]), (AXIS,))


def make_target_mesh(target: str, num_devices: int) -> Mesh:
    """A mesh of devices that are described, not there: one can compile for it, and nothing more.

    Args:
        target: the device as XLA wants it described (`devices.target`).
        num_devices: in one machine.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"1x1x{num_devices}"
    )
    return Mesh(np.array(topology.devices), (AXIS,))


def accelerator(mesh: Mesh) -> tuple[str, str]:
    """Platform as JAX names it, and the compute capability of an NVIDIA GPU or nothing."""
    device = mesh.devices.flat[0]
    is_nvidia = device.platform in ("gpu", "cuda")
    return ("gpu", str(device.compute_capability)) if is_nvidia else (device.platform, "")


def place(x_BT: np.ndarray, mesh: Mesh) -> jax.Array:
    """One global array, divided by rows; an explicit transfer, so the transfer guard lets it pass."""
    return jax.device_put(x_BT, NamedSharding(mesh, P(AXIS)))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The same arrays on every device."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def memory_bytes(mesh: Mesh) -> int | None:
    """What JAX may take of one device's memory; None for simulated devices, which share that of the machine."""
    if mesh.devices.flat[0].platform == "cpu":
        return None
    return min((device.memory_stats() or {})["bytes_limit"] for device in mesh.devices.flat)


def peak_bytes(mesh: Mesh) -> int:
    """Largest memory in use so far on one device; on simulated devices, of the whole process."""
    if mesh.devices.flat[0].platform == "cpu":
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return kib if sys.platform == "darwin" else kib * 1024
    return max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in mesh.devices.flat)
