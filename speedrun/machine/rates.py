"""Measure the rates of a machine: products, memory, collectives, transfers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.base.mesh import DATA, place
from speedrun.train.health import best_s, is_simulated, matmul_gflops

_FACTOR = 0.999  #: keeps numbers finite, and no pass can be left out


def measure(mesh: Mesh) -> dict[str, float]:
    """Measure the best rates of all devices at once, summed: flop/s of `matmul`, bytes/s of the others; takes seconds.

    Memory is read and written by passes over an array larger than any cache, many in one dispatch. Collectives are left
    out with one device.
    """
    x_NM, num_passes = _random(mesh), 8 if is_simulated(mesh) else 128
    host_NM = jax.device_get(x_NM)

    def passes(x_NM: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, num_passes, lambda _, y_NM: y_NM * _FACTOR, x_NM)

    copy = jax.jit(passes, out_shardings=x_NM.sharding)
    return {
        "matmul": 1e9 * matmul_gflops(mesh),
        "memory": num_passes * 2 * x_NM.nbytes / best_s(lambda: copy(x_NM)),
        **(_collective_rates(mesh, x_NM) if mesh.size > 1 else {}),
        "host to device": host_NM.nbytes / best_s(lambda: place(host_NM, mesh)),
    }


def _random(mesh: Mesh) -> jax.Array:
    """Return random numbers, made on the devices: 16 MB per simulated device, 256 MB per real one."""
    shape = mesh.size, 2**22 if is_simulated(mesh) else 2**26
    placing = NamedSharding(mesh, P(mesh.axis_names))
    make = jax.jit(lambda key: jax.random.uniform(key, shape, jnp.float32), out_shardings=placing)
    return make(jax.random.key(0))


def _collective_rates(mesh: Mesh, x_NM: jax.Array) -> dict[str, float]:
    """Time what an FSDP step sends, an all-gather and a reduce-scatter of one array, and an all-reduce.

    Counted are bytes that arrive from other devices, or leave for them. In a ring of n devices, each sends
    2 (n - 1) / n of the array for an all-reduce.
    """
    others_bytes = (mesh.size - 1) * x_NM.nbytes

    def over_devices(
        collective: Callable[[jax.Array], jax.Array], out: P
    ) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(jax.shard_map(collective, mesh=mesh, in_specs=P(DATA), out_specs=out))

    gather = over_devices(lambda x_NM: jax.lax.all_gather(x_NM, DATA, tiled=True)[None], P(DATA))
    scatter = over_devices(lambda x_1NM: jax.lax.psum_scatter(x_1NM[0], DATA, tiled=True), P(DATA))
    reduce = over_devices(lambda x_1M: jax.lax.psum(x_1M, DATA), P())
    whole_NNM = gather(x_NM)
    return {
        "all-gather": others_bytes / best_s(lambda: gather(x_NM)),
        "reduce-scatter": others_bytes / best_s(lambda: scatter(whole_NNM)),
        "all-reduce": 2 * others_bytes / mesh.size / best_s(lambda: reduce(x_NM)),
    }
