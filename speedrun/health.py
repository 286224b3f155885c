"""What the devices achieve before a run: the number that a claimed step time is held against."""

from collections.abc import Callable

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


def all_devices_agree(mesh: Mesh) -> bool:
    """Whether a compiled sum over the devices gives what it must."""
    program = jax.shard_map(lambda x: jax.lax.psum(x, AXIS), mesh=mesh, in_specs=P(AXIS), out_specs=P())
    total = jax.jit(program)(jnp.arange(mesh.size, dtype=jnp.float32))
    return float(total[0]) == mesh.size * (mesh.size - 1) / 2


def matmul_gflops(mesh: Mesh) -> float:
    """Best rate of a chain of square matrix products on every device at once, all devices together.

    float32 on CPU, bfloat16 elsewhere: the dtypes the recipes train in.
    """
    size, dtype = (512, jnp.float32) if is_simulated(mesh) else (8192, jnp.bfloat16)
    x_NMM = place(np.full((mesh.size, size, size), 1 / size, dtype), mesh)

    def chain(x_NMM: jax.Array) -> jax.Array:
        y_NMM = x_NMM
        for _ in range(_MULTIPLICATIONS):
            y_NMM = y_NMM @ x_NMM
        return y_NMM

    program = jax.jit(chain, out_shardings=x_NMM.sharding)
    flops = _MULTIPLICATIONS * mesh.size * 2 * size**3
    return flops / best_s(lambda: program(x_NMM)) / 1e9


def is_simulated(mesh: Mesh) -> bool:
    """Whether its devices are parts of a CPU."""
    return mesh.devices.flat[0].platform == "cpu"


def best_s(function: Callable[[], jax.Array]) -> float:
    """Shortest of some calls, after one that compiles."""
    function().block_until_ready()
    seconds = []
    for _ in range(_TRIALS):
        watch = Stopwatch()
        function().block_until_ready()
        seconds.append(watch.seconds)
    return min(seconds)
