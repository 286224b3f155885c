"""Measure the rates of a machine: products, memory, collectives, transfers."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.base import mesh as meshes
from speedrun.base.errors import UsageError
from speedrun.base.mesh import DATA, place
from speedrun.train.health import best_s, is_simulated, matmul_gflops, random_matrices

_FACTOR = 0.999  #: keeps numbers finite, and no pass can be left out
_LOAD_S = 2.0  #: nvidia-smi needs up to a second for eight GPUs

Answer = TypeVar("Answer")


class Rates(NamedTuple):
    """Best rates of all devices at once, summed. GB are 10^9 bytes."""

    matmul_gflops: float
    memory_gb_per_s: float  #: read and written by a copy
    all_gather_gb_per_s: float  #: arriving from other devices; 0 with one device
    reduce_scatter_gb_per_s: float  #: leaving for other devices, likewise
    all_reduce_gb_per_s: float  #: leaving for other devices in a ring, likewise
    host_to_device_gb_per_s: float


def measure(mesh: Mesh) -> Rates:
    """Measure all rates; takes seconds."""
    memory, collectives = _memory_gb_per_s(mesh), _collectives_gb_per_s(mesh)
    return Rates(matmul_gflops(mesh), memory, *collectives, _host_to_device_gb_per_s(mesh))


def _memory_gb_per_s(mesh: Mesh) -> float:
    """Time passes that read and write an array larger than any cache, many in one dispatch."""
    x_NM, num_passes = _array(mesh), 8 if is_simulated(mesh) else 128

    def passes(x_NM: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, num_passes, lambda _, y_NM: y_NM * _FACTOR, x_NM)

    program = jax.jit(passes, out_shardings=x_NM.sharding)
    return num_passes * 2 * x_NM.nbytes / best_s(lambda: program(x_NM)) / 1e9


def _collectives_gb_per_s(mesh: Mesh) -> tuple[float, float, float]:
    """Time what an FSDP step sends, an all-gather and a reduce-scatter of one array, and an all-reduce.

    In a ring of n devices, each sends 2 (n - 1) / n of the array for an all-reduce.
    """
    if mesh.size == 1:
        return 0.0, 0.0, 0.0
    others_gb, x_NM = (mesh.size - 1) / 1e9, _array(mesh)

    def over_devices(
        collective: Callable[[jax.Array], jax.Array], out: P
    ) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(jax.shard_map(collective, mesh=mesh, in_specs=P(DATA), out_specs=out))

    gather = over_devices(lambda x_NM: jax.lax.all_gather(x_NM, DATA, tiled=True)[None], P(DATA))
    scatter = over_devices(lambda x_1NM: jax.lax.psum_scatter(x_1NM[0], DATA, tiled=True), P(DATA))
    reduce = over_devices(lambda x_1M: jax.lax.psum(x_1M, DATA), P())
    whole_NNM = gather(x_NM)
    return (
        others_gb * x_NM.nbytes / best_s(lambda: gather(x_NM)),
        others_gb * x_NM.nbytes / best_s(lambda: scatter(whole_NNM)),
        2 * others_gb * x_NM.nbytes / mesh.size / best_s(lambda: reduce(x_NM)),
    )


def during_products(mesh: Mesh, gflops: float, ask: Callable[[], Answer]) -> Answer:
    """Call `ask` while all devices multiply, and return its answer. Clocks of an idle GPU mean nothing.

    `gflops` is their rate, which sizes the load to `_LOAD_S`.
    """
    x_NMM = random_matrices(mesh)
    size = x_NMM.shape[-1]
    many = max(1, int(_LOAD_S * gflops * 1e9 / (2 * mesh.size * size**3)))
    load = jax.jit(lambda x_NMM, many: jax.lax.fori_loop(0, many, lambda _, y_NMM: y_NMM @ x_NMM, x_NMM))
    load(x_NMM, 1).block_until_ready()  # compiled, and warm
    busy = load(x_NMM, many)
    answer = ask()
    busy.block_until_ready()
    return answer


def _host_to_device_gb_per_s(mesh: Mesh) -> float:
    """Time the transfer of one array from host memory, divided over the devices."""
    x_NM = np.random.default_rng(0).random((mesh.size, _columns(mesh)), np.float32)
    return x_NM.nbytes / best_s(lambda: place(x_NM, mesh)) / 1e9


def described() -> str:
    """Return XLA's description of this GPU, which a compiler elsewhere needs; raise UsageError without a GPU."""
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    meshes.prepare("any")
    try:
        platform = jax.devices()[0].platform
    except (RuntimeError, AssertionError) as error:  # from JAX, where it may use CUDA only
        raise UsageError(
            f"JAX starts no device ({error or 'no CUDA backend'}); 'speedrun doctor' may know why"
        ) from None
    if platform == "cpu":
        raise UsageError("this is a cpu; only a GPU has such a description; run it where there is one")
    return str(xla_client.get_topology_for_devices(jax.devices()).target_config)


def _columns(mesh: Mesh) -> int:
    """Number of float32 columns: 16 MB per simulated device, 256 MB per real one."""
    return 2**22 if is_simulated(mesh) else 2**26


def _array(mesh: Mesh) -> jax.Array:
    """Return random numbers, made on the devices."""
    placing = NamedSharding(mesh, P(mesh.axis_names))
    make = jax.jit(
        lambda key: jax.random.uniform(key, (mesh.size, _columns(mesh)), jnp.float32), out_shardings=placing
    )
    return make(jax.random.key(0))
