"""Compare measured rates with the vendor's, and with those of records made on the same hardware."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from speedrun.doctor.check import Check, Fact
from speedrun.ground.console import quantity
from speedrun.ground.devices import Device
from speedrun.ledger.checks.environment import SLOW, SLOWEST_OF_VENDOR
from speedrun.ledger.record import load

if TYPE_CHECKING:
    from speedrun.bench.machine import Rates


class Machine(NamedTuple):
    """Devices as JAX names them."""

    platform: str
    kind: str
    num_devices: int


def cohort(records: Path, machine: Machine) -> list[float]:
    """Return the matmul Gflop/s of each record that was made on the same hardware. Records keep no other rate."""
    found = []
    for path in sorted(records.glob("*/*/source.txt")):
        for run in load(path.parent).finished[:1]:
            hw = run.preflight
            if (hw.platform, hw.device_kind, hw.num_devices) == machine:
                found.append(hw.matmul_gflops)
    return found


def checks(rates: "Rates", machine: Machine, device: Device | None, peers: list[float]) -> Iterator[Check]:
    """Yield one check per rate.

    `device` is None if the vendor's rates are unknown. `peers` are from `cohort`.
    """
    num, several = machine.num_devices, machine.num_devices > 1
    together = ", all devices together" if several else ""
    most = None if device is None else device.bf16_flops * num
    yield _check("matmul", rates.matmul_gflops * 1e9, "flop/s" + together, most, machine, peers)
    memory = None if device is None else device.memory_rate * num
    yield _check("memory", rates.memory_gb_per_s * 1e9, "B/s" + together, memory, machine)
    if several:
        links = None if device is None else device.link_rate * num
        for name, rate in (
            ("all-gather", rates.all_gather_gb_per_s),
            ("reduce-scatter", rates.reduce_scatter_gb_per_s),
            ("all-reduce", rates.all_reduce_gb_per_s),
        ):
            yield _check(name, rate * 1e9, "B/s" + together, links, machine)
    # No bound: it depends on the host's memory and slots more than on the device.
    yield _check("host to device", rates.host_to_device_gb_per_s * 1e9, "B/s" + together, None, machine)


def _check(
    name: str, rate: float, unit: str, most: float | None, machine: Machine, peers: list[float] | None = None
) -> Check:
    said, slow = [quantity(rate, unit)], False
    facts: dict[str, Fact] = {name.replace("-", "_").replace(" ", "_") + "_per_s": rate}
    if most is not None:
        facts["share_of_vendor"] = rate / most
        said.append(f"{rate / most:.0%} of the vendor's")
        slow = rate < SLOWEST_OF_VENDOR * most
    if peers:
        usual = median(peers) * 1e9
        facts["share_of_cohort"] = rate / usual
        said.append(f"{rate / usual:.0%} of the median of {len(peers)} records on {machine.kind}")
        slow = slow or rate < usual * SLOW.get(machine.platform, min(SLOW.values()))
    if slow:
        said.append("slow: end what else runs here, or take another node")
    return Check(name, " | ".join(said), ok=not slow, needed=False, facts=facts)
