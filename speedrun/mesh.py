"""The only place that makes meshes and puts arrays on them."""

import os

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.errors import UsageError
from speedrun.params import AXIS


def prepare_cpu(num_devices: int) -> None:
    """Asks for simulated CPU devices. Has an effect only before the first use of JAX in this process.

    Args:
        num_devices: eight stand for a node.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


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


def place(x_BT: np.ndarray, mesh: Mesh) -> jax.Array:
    """One global array, divided by rows; an explicit transfer, so the transfer guard lets it pass."""
    return jax.device_put(x_BT, NamedSharding(mesh, P(AXIS)))


def peak_bytes(mesh: Mesh) -> int:
    """Largest memory in use so far on one device; 0 where the platform does not say."""
    stats = [device.memory_stats() or {} for device in mesh.devices.flat]
    return max(s.get("peak_bytes_in_use", 0) for s in stats)


def allowed_environment() -> dict[str, str]:
    """The environment variables that may change a run; nothing else of the environment is recorded."""
    keep = ("XLA_FLAGS", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS")
    return {name: os.environ[name] for name in keep if name in os.environ}
