"""Check the devices that JAX sees: a collective, their rates against the vendor's, and their clocks under load."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from speedrun.base import accelerators
from speedrun.base.console import quantity
from speedrun.machine import check_cuda, check_gpus
from speedrun.machine.finding import Check
from speedrun.record.checks.v4_environment import SLOWEST_OF_VENDOR

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from speedrun.machine.rates import Rates


class Machine(NamedTuple):
    """Devices as JAX names them."""

    platform: str
    kind: str
    num_devices: int


def checks(found: list[check_gpus.Gpu], *, usable: bool, timed: bool = True) -> Iterator[Check]:
    """Check the devices; if `timed`, also a collective over all of them, and their rates.

    Raises:
        RuntimeError: from JAX, where a driver or a plugin is broken.
    """
    import jax

    from speedrun.base import mesh
    from speedrun.train import health

    mesh.prepare("any" if usable else "cpu")
    over = mesh.make_mesh(len(jax.devices()))
    platform, _ = mesh.accelerator(over)
    machine = Machine(platform, jax.devices()[0].device_kind, over.size)
    simulated = health.is_simulated(over)
    said = f"{machine.num_devices} x {machine.kind}{' (simulated)' if simulated else ''}"
    yield Check("devices", said, ok=True, facts=machine._asdict())
    seen = 0 if simulated else over.size
    if usable and seen < len(found):
        yield check_cuda.unseen(len(found), seen)
    if found and simulated:
        said = f"not measured: {len(found)} GPUs are here, and JAX uses none of them; see above"
        yield Check("rates", said, ok=False, needed=False)
    elif timed:
        yield _collective(over)
        yield from _measured(over, machine)


def _collective(mesh: "Mesh") -> Check:
    """Check a compiled sum over the devices."""
    import jax
    from jax.sharding import PartitionSpec as P

    axes = mesh.axis_names
    program = jax.shard_map(lambda x: jax.lax.psum(x, axes), mesh=mesh, in_specs=P(axes), out_specs=P())
    total = jax.jit(program)(jax.numpy.arange(mesh.size, dtype="float32"))
    agree = float(total[0]) == mesh.size * (mesh.size - 1) / 2
    return Check("collective", f"a sum over the devices {'is right' if agree else 'is wrong'}", ok=agree)


def _measured(over: "Mesh", machine: Machine) -> Iterator[Check]:
    from speedrun.machine import rates as bench
    from speedrun.train import health

    before_s = health.throttled_s(over)
    reached = bench.measure(over)
    yield from rates(reached, machine, accelerators.named(machine.kind))
    if health.is_simulated(over):
        return
    try:
        loads = bench.during_products(over, reached.matmul_gflops, check_gpus.loads)
    except check_gpus.NoAnswerError as error:
        yield Check("clocks", f"not known: {error}", ok=False, needed=False)
    else:
        yield check_gpus.clocks(loads, health.throttled_s(over, before_s))


def rates(reached: "Rates", machine: Machine, device: accelerators.Device | None) -> Iterator[Check]:
    """Compare each rate with the vendor's, times the number of devices; `device` is None if those are unknown."""
    bounds = (None,) * 3 if device is None else (device.bf16_flops, device.memory_rate, device.link_rate)
    flops, memory, links = (bound and bound * machine.num_devices for bound in bounds)
    table = {
        "matmul": (reached.matmul_gflops, "flop/s", flops),
        "memory": (reached.memory_gb_per_s, "B/s", memory),
        "all-gather": (reached.all_gather_gb_per_s, "B/s", links),
        "reduce-scatter": (reached.reduce_scatter_gb_per_s, "B/s", links),
        "all-reduce": (reached.all_reduce_gb_per_s, "B/s", links),
        # No bound: it depends on the host's memory and slots more than on the device.
        "host to device": (reached.host_to_device_gb_per_s, "B/s", None),
    }
    together = ", all devices together" if machine.num_devices > 1 else ""
    for name, (giga, unit, bound) in table.items():
        if not giga:  # a collective of one device
            continue
        rate, slow = 1e9 * giga, False
        found = quantity(rate, unit + together)
        facts: dict[str, float] = {name.replace("-", "_").replace(" ", "_") + "_per_s": rate}
        if bound is not None:
            facts["share_of_vendor"] = rate / bound
            found += f" | {rate / bound:.0%} of the vendor's"
            slow = rate < SLOWEST_OF_VENDOR * bound
        found += " | slow: end what else runs here, or take another node" if slow else ""
        yield Check(name, found, ok=not slow, needed=False, facts=facts)
