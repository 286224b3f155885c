"""What the devices achieve before a run: the numbers that a claimed step time is held against."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from speedrun.clock import Stopwatch
from speedrun.mesh import place
from speedrun.params import AXIS

_MULTIPLICATIONS = 8
_TRIALS = 10


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


def all_devices_agree(mesh: Mesh) -> bool:
    """Whether a compiled sum over the devices gives what it must."""
    program = jax.shard_map(lambda x: jax.lax.psum(x, AXIS), mesh=mesh, in_specs=P(AXIS), out_specs=P())
    total = jax.jit(program)(jnp.arange(mesh.size, dtype=jnp.float32))
    return float(total[0]) == mesh.size * (mesh.size - 1) / 2


def matmul_gflops(mesh: Mesh) -> float:
    """A chain of square matrix products on every device: float32 on CPU, bfloat16 elsewhere, as recipes train."""
    size, dtype = (512, jnp.float32) if _is_cpu(mesh) else (8192, jnp.bfloat16)
    x_NMM = place(np.full((mesh.size, size, size), 1 / size, dtype), mesh)

    def chain(x_NMM: jax.Array) -> jax.Array:
        y_NMM = x_NMM
        for _ in range(_MULTIPLICATIONS):
            y_NMM = y_NMM @ x_NMM
        return y_NMM

    program = jax.jit(chain, out_shardings=x_NMM.sharding)
    flops = _MULTIPLICATIONS * mesh.size * 2 * size**3
    return flops / _best_s(lambda: program(x_NMM)) / 1e9


def memory_gb_per_s(mesh: Mesh) -> float:
    """One pass that reads an array and writes one: larger than any cache."""
    x_NM = _array(mesh)
    program = jax.jit(lambda x_NM: x_NM + 1, out_shardings=x_NM.sharding)
    return 2 * x_NM.nbytes / _best_s(lambda: program(x_NM)) / 1e9


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
    return sent_gb / _best_s(lambda: gathering(x_NM)), sent_gb / _best_s(lambda: scattering(whole_NNM))


def host_to_device_gb_per_s(mesh: Mesh) -> float:
    """One array from the host's memory, divided over the devices."""
    x_NM = np.ones(_array(mesh).shape, np.float32)
    return x_NM.nbytes / _best_s(lambda: place(x_NM, mesh)) / 1e9


def _array(mesh: Mesh) -> jax.Array:
    """16 MB on a simulated device, 256 MB on a real one."""
    columns = 2**22 if _is_cpu(mesh) else 2**26
    return place(np.ones((mesh.size, columns), np.float32), mesh)


def _is_cpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


def _best_s(function: Callable[[], jax.Array]) -> float:
    """Shortest of some calls, after one that compiles."""
    function().block_until_ready()
    seconds = []
    for _ in range(_TRIALS):
        watch = Stopwatch()
        function().block_until_ready()
        seconds.append(watch.seconds)
    return min(seconds)
