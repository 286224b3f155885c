"""Makes meshes and places arrays on them; no other module does. Changes settings of JAX."""

import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speedrun.base import processes
from speedrun.base.errors import UsageError

#: Axes. Parameters and optimiser state are sharded within a node and replicated across nodes; batches are sharded over
#: both.
DATA, REPLICA = "data", "replica"

CPU_DEVICES = 8  #: simulated; as many as a node has
_AT_IMPORT = dict(jax.config.values)  #: before any recipe
#: Settings of JAX that change no program: what the harness sets, and caches.
_HARMLESS = re.compile(r"jax_(platforms|num_cpu_devices|traceback_\w+|(compilation|persistent)_cache_\w+)")


def prepare(platform: str) -> None:
    """Choose the devices of this process. Call it before JAX is used.

    "cpu" simulates a node; "gpu" uses the GPUs; "any" uses GPUs if there are some, or if $JAX_PLATFORMS names CUDA.
    """
    # Without JAX's frames, a recipe would be blamed for its errors.
    jax.config.update("jax_traceback_filtering", "off")
    for name, need in {"jax_enable_x64": False, "jax_default_prng_impl": "threefry2x32"}.items():
        if (got := jax.config.values[name]) != need:
            said = f"{name} is {got}"
            raise UsageError(f"{said}; need {need}: other numbers make other programs; unset {name.upper()}")
    # Without a GPU, CUDA would print a page before JAX takes the CPU.
    if platform in ("gpu", "any") and has_gpu():
        return
    num_local, rest = divmod(CPU_DEVICES, processes.count())
    if rest:
        found = f"{processes.count()} processes cannot share {CPU_DEVICES} simulated devices"
        raise UsageError(f"{found}; need 1, 2, 4 or 8 of them")
    for name, value in {"jax_platforms": "cpu", "jax_num_cpu_devices": num_local}.items():
        if getattr(jax.config, name) != value:  # JAX refuses a change once it has started
            jax.config.update(name, value)


def changed_settings() -> dict[str, str]:
    """Return JAX's settings that differ from those at its import, which variables give, and may change a program."""
    now = jax.config.values
    changed = (name for name in sorted(now) if now[name] != _AT_IMPORT.get(name))
    return {name: str(now[name]) for name in changed if not _HARMLESS.fullmatch(name)}


def has_gpu() -> bool:
    """Say whether this machine has a GPU, or $JAX_PLATFORMS names CUDA."""
    found = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("dxg")]  # the second: under Windows
    return bool(found) or "cuda" in (getattr(jax.config, "jax_platforms", None) or "")


@contextmanager
def setting(name: str, value: float) -> Iterator[None]:
    """Change a setting of JAX inside the block."""
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def make_mesh(num_devices: int, replicas: int = 1) -> Mesh:
    """Return a mesh over the first `num_devices` devices of all nodes, in the order of processes."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if len(devices) < num_devices:
        hint = f"pass --devices {len(devices)} or run where {num_devices} are visible"
        raise UsageError(f"found {len(devices)} {devices[0].platform} devices, need {num_devices}; {hint}")
    if processes.count() > 1 and len(devices) > num_devices:
        found = f"{processes.count()} processes have {len(devices)} devices, need all of them to be used"
        raise UsageError(f"{found}; pass --devices {len(devices)} or start fewer processes")
    shares = Counter(device.process_index for device in devices)
    if len(set(shares.values())) > 1:
        numbers = ", ".join(str(shares[i]) for i in sorted(shares))
        found = f"the {len(shares)} processes have {numbers} devices"
        hint = "check CUDA_VISIBLE_DEVICES and the node that has fewer"
        raise UsageError(f"{found}; need equal numbers; {hint}")
    if num_devices % replicas:
        found = f"{num_devices} devices cannot be shared by {replicas} replicas"
        raise UsageError(f"{found}; need a multiple; pass another number of --devices or --replicas")
    return arranged(devices[:num_devices], replicas)


def arranged(devices: Sequence[Any], replicas: int) -> Mesh:
    """Return a mesh of these devices, without an axis for a single replica."""
    if replicas == 1:
        return Mesh(np.array(devices), (DATA,))
    return Mesh(np.array(devices).reshape(replicas, -1), (REPLICA, DATA))


def accelerator(mesh: Mesh) -> tuple[str, str]:
    """Return the platform, "cpu" or "gpu", and the compute capability of a GPU; refuse other platforms."""
    device = mesh.devices.flat[0]
    if device.platform not in ("cpu", "gpu", "cuda"):
        raise UsageError(f"JAX found a {device.platform}, need a CPU or GPU; set JAX_PLATFORMS=cpu or cuda")
    if len(kinds := sorted({one.device_kind for one in mesh.devices.flat})) > 1:
        found = f"JAX found {' and '.join(kinds)}, need one kind"
        raise UsageError(f"{found}; name its GPUs in CUDA_VISIBLE_DEVICES")
    return ("cpu", "") if device.platform == "cpu" else ("gpu", str(device.compute_capability))


def shard(x_BT: np.ndarray, mesh: Mesh) -> jax.Array:
    """Return a global array, sharded by rows, by an explicit transfer.

    With several processes, each passes its own rows, in the order of processes.
    """
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    if processes.count() == 1:
        return jax.device_put(x_BT, sharding)
    with jax.transfer_guard_host_to_device("allow"):  # JAX counts this transfer as implicit
        return jax.make_array_from_process_local_data(sharding, x_BT)


def shard_own(x_BT: np.ndarray, mesh: Mesh) -> jax.Array:
    """`shard` for an array that every process has in full."""
    own = len(x_BT) // processes.count()
    return shard(x_BT[own * processes.index() :][:own], mesh)


def replicated(x: jax.Array) -> jax.Array:
    """Replicate an array whose shards are in several processes; return others unchanged."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return x
    assert isinstance(x.sharding, NamedSharding)
    return _gathered_over(x.sharding.mesh)(x)


@lru_cache
def _gathered_over(mesh: Mesh) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))


def fetch(tree: Any) -> Any:
    """Return the arrays of a tree on the host. With several processes, all must call it."""
    return jax.device_get(jax.tree.map(replicated, tree))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Copy the arrays of a tree to every device."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def memory_bytes(mesh: Mesh) -> int:
    """Return the memory that JAX may use on one device. Simulated devices share the machine's."""
    if mesh.devices.flat[0].platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(mesh.local_devices)
    return min((device.memory_stats() or {})["bytes_limit"] for device in mesh.local_devices)


def peak_bytes(mesh: Mesh) -> int:
    """Return the peak memory of one device so far; of the whole process if devices are simulated."""
    if mesh.devices.flat[0].platform == "cpu":
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return kib if sys.platform == "darwin" else kib * 1024
    return max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in mesh.local_devices)
