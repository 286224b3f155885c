"""What a machine achieves: products, memory, collectives, transfers."""

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from speedrun.health import best_s, is_simulated, matmul_gflops
from speedrun.mesh import place
from speedrun.params import AXIS


class Health(NamedTuple):
    """Best rates, all devices at once, of all together. GB are 10^9 bytes."""

    matmul_gflops: float
    memory_gb_per_s: float  #: read and written by a copy
    all_gather_gb_per_s: float  #: arriving from other devices; 0 with one device
    reduce_scatter_gb_per_s: float  #: leaving for other devices, likewise
    host_to_device_gb_per_s: float


def measure(mesh: Mesh) -> Health:
    """All of them, in seconds."""
    return Health(
        matmul_gflops(mesh),
        memory_gb_per_s(mesh),
        *_collectives_gb_per_s(mesh),
        host_to_device_gb_per_s(mesh),
    )


def memory_gb_per_s(mesh: Mesh) -> float:
    """One pass that reads an array and writes one: larger than any cache."""
    x_NM = _array(mesh)
    program = jax.jit(lambda x_NM: x_NM + 1, out_shardings=x_NM.sharding)
    return 2 * x_NM.nbytes / best_s(lambda: program(x_NM)) / 1e9


def _collectives_gb_per_s(mesh: Mesh) -> tuple[float, float]:
    """What an FSDP step sends: an array gathered whole on every device, and as many scattered sums."""
    if mesh.size == 1:
        return 0.0, 0.0
    x_NM = _array(mesh)

    def gather(x_NM: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x_NM, AXIS, tiled=True)[None]

    def scatter(x_1NM: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(x_1NM[0], AXIS, tiled=True)

    gathering, scattering = (
        jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))
        for one in (gather, scatter)
    )
    whole_NNM = gathering(x_NM)
    sent_gb = (mesh.size - 1) * x_NM.nbytes / 1e9
    return sent_gb / best_s(lambda: gathering(x_NM)), sent_gb / best_s(lambda: scattering(whole_NNM))


def host_to_device_gb_per_s(mesh: Mesh) -> float:
    """One array from the host's memory, divided over the devices."""
    x_NM = np.ones(_array(mesh).shape, np.float32)
    return x_NM.nbytes / best_s(lambda: place(x_NM, mesh)) / 1e9


def _array(mesh: Mesh) -> jax.Array:
    """16 MB on a simulated device, 256 MB on a real one."""
    columns = 2**22 if is_simulated(mesh) else 2**26
    return place(np.ones((mesh.size, columns), np.float32), mesh)
