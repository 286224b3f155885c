"""Check the devices: what the driver says of GPUs, a collective, rates against the vendor's, and clocks under load.

`nvidia-smi` answers for NVIDIA's driver; JAX sees the rest.
"""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from speedrun.base import accelerators
from speedrun.base.console import quantity
from speedrun.record.checks.v4_environment import SLOWEST_OF_VENDOR

if TYPE_CHECKING:
    from jax.sharding import Mesh

_ANSWER_S = 20.0  #: an nvidia-smi that hangs is a broken driver
#: Share of the highest clock, under load. The power cap alone keeps large products well above it.
_LOW_CLOCK = 0.6
_HOT_C = 85  #: where clocks begin to fall
#: An unset or unknown field.
_NOTHING = re.compile(r"\[?(N/A|Not Supported|Not Active|Unknown Error|Requested functionality.*)\]?")
#: Bits of `clocks_event_reasons.active` that slow a run down. Large products always run at the power cap (4). Idle (1)
#: and the display's clock (256) are harmless.
_REASONS = {
    0x02: "clocks set by hand",
    0x08: "hardware slowdown",
    0x10: "bound to another GPU's clocks",
    0x20: "heat, by software",
    0x40: "heat, by hardware",
    0x80: "power brake",
}


Fact = float | int | str | bool | None


class Check(msgspec.Struct, frozen=True):
    """What was checked, what was found, and whether that is fine."""

    name: str
    found: str  #: one line; if not ok, it ends with what to do
    ok: bool
    needed: bool = True  #: for the chosen track
    facts: Mapping[str, Fact] = {}  #: the finding as numbers; names have units

    @property
    def mark(self) -> Literal["ok", "note", "bad"]:
        """`ok`; `bad` if it is needed; else `note`."""
        return "ok" if self.ok else "bad" if self.needed else "note"


class NoAnswerError(Exception):
    """Why `nvidia-smi` gave no answer."""


class Gpu(NamedTuple):
    """One GPU."""

    name: str
    driver: str
    memory_bytes: int
    pcie_width: int | None  #: lanes in use
    most_pcie_width: int | None  #: lanes there are
    mig: bool  #: divided into instances


class Load(NamedTuple):
    """State of one GPU under load."""

    clock_mhz: int | None
    most_clock_mhz: int | None
    temperature_c: int | None
    reasons: tuple[str, ...]  #: the active ones of `_REASONS`


# --- what the driver answers -----------------------------------------------------------------------------------


def _query(*fields: str) -> Iterator[list[str | None]]:
    """Yield one row per GPU, with None for unknown fields."""
    argv = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            argv, capture_output=True, encoding="utf-8", errors="replace", timeout=_ANSWER_S
        )
    except OSError:
        raise NoAnswerError("there is no nvidia-smi") from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"nvidia-smi gave no answer in {_ANSWER_S:.0f} s") from None
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        raise NoAnswerError(f"nvidia-smi fails: {said[:160]}")
    for line in filter(None, done.stdout.splitlines()):
        words = [word.strip() for word in line.split(",")]
        if len(words) != len(fields):
            raise NoAnswerError(f"nvidia-smi answers {line[:80]!r}")
        yield [None if _NOTHING.fullmatch(word) else word for word in words]


def _int(word: str | None) -> int | None:
    if word is None:
        return None
    try:
        return int(word, 0)  # reasons are hexadecimal
    except ValueError:
        raise NoAnswerError(f"nvidia-smi answers {word[:80]!r} for a number") from None


def found() -> list[Gpu]:
    """Return all GPUs; raise NoAnswerError if `nvidia-smi` is not installed, fails or hangs."""
    fields = ("name", "driver_version", "memory.total", "pcie.link.width.current", "pcie.link.width.max")
    return [
        Gpu(name or "", driver or "", (_int(mib) or 0) * 2**20, _int(width), _int(most), mig == "Enabled")
        for name, driver, mib, width, most, mig in _query(*fields, "mig.mode.current")
    ]


def loads() -> list[Load]:
    """Return the current state of all GPUs; raise NoAnswerError as `found`, or if a field is unknown."""
    fields = ("clocks.sm", "clocks.max.sm", "temperature.gpu", "clocks_event_reasons.active")
    return [
        Load(_int(clock), _int(top), _int(hot), tuple(_REASONS[b] for b in _REASONS if b & (_int(bits) or 0)))
        for clock, top, hot, bits in _query(*fields)
    ]


# --- whether that is sound -------------------------------------------------------------------------------------


def identity(gpus: list[Gpu]) -> Check:
    """Check for several kinds of GPU, MIG instances, and missing PCIe lanes."""
    kinds = Counter(gpu.name for gpu in gpus)
    said = [" and ".join(f"{count} x {name}" for name, count in kinds.items())]
    if len(kinds) > 1:
        said.append("of several kinds: records want one")
    if any(gpu.mig for gpu in gpus):
        said.append("cut into instances (MIG); nvidia-smi -mig 0 makes them whole")
    for i, gpu in enumerate(gpus):
        if gpu.pcie_width and gpu.most_pcie_width and gpu.pcie_width < gpu.most_pcie_width:
            lanes = f"{gpu.pcie_width} of {gpu.most_pcie_width} PCIe lanes"
            said.append(f"GPU {i} has {lanes}; reseat it, or rent another node")
    facts = {"num_gpus": len(gpus), "gpu": gpus[0].name}
    return Check("gpus", "; ".join(said), ok=len(said) == 1, needed=False, facts=facts)


def clocks(loads: list[Load], throttled_s: float | None) -> Check:
    """Check the clocks under load.

    `loads` has every GPU, while all of them multiply. `throttled_s` is meanwhile; None if the driver does not count it.
    """
    shares = [one.clock_mhz / one.most_clock_mhz for one in loads if one.clock_mhz and one.most_clock_mhz]
    heats = [one.temperature_c for one in loads if one.temperature_c is not None]
    low, hot = min(shares, default=None), max(heats, default=None)
    found = "unknown" if low is None else f"{low:.0%} of the highest under load"
    found += "" if hot is None else f", {hot} C"
    worries = [f"GPU {i}: {', '.join(one.reasons)}" for i, one in enumerate(loads) if one.reasons]
    if low is not None and low < _LOW_CLOCK:
        worries.append("low for large products")
    if hot is not None and hot > _HOT_C:
        worries.append(f"hotter than {_HOT_C} C")
    if throttled_s:
        worries.append(f"held back for {throttled_s:.1f} s")
    advice = "let it cool (or nvidia-smi -rgc), or rent another node"
    found += f"; {'; '.join([*worries, advice])}" if worries else ", nothing holds them back"
    facts = {"least_clock_share": low, "most_temperature_c": hot, "throttled_s": throttled_s}
    return Check("clocks", found, ok=not worries, needed=False, facts=facts)


class Machine(NamedTuple):
    """Devices as JAX names them."""

    platform: str
    kind: str
    num_devices: int


def checks(found: list[Gpu], *, usable: bool, timed: bool = True) -> Iterator[Check]:
    """Check the devices; if `timed`, also a collective over all of them, and their rates.

    Raises:
        RuntimeError: from JAX, where a driver or a plugin is broken.
    """
    import jax
    from jax.sharding import PartitionSpec as P

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
        yield _unseen(len(found), seen)
    if found and simulated:
        said = f"not measured: {len(found)} GPUs are here, and JAX uses none of them; see above"
        yield Check("rates", said, ok=False, needed=False)
    elif timed:
        axes = over.axis_names
        program = jax.shard_map(lambda x: jax.lax.psum(x, axes), mesh=over, in_specs=P(axes), out_specs=P())
        total = jax.jit(program)(jax.numpy.arange(over.size, dtype="float32"))
        agree = float(total[0]) == over.size * (over.size - 1) / 2
        yield Check("collective", f"a sum over the devices {'is right' if agree else 'is wrong'}", ok=agree)
        yield from _measured(over, machine)


def _unseen(num_gpus: int, num_devices: int) -> Check:
    """Say why JAX sees fewer GPUs than the driver."""
    hidden = [
        f"{name}={os.environ[name]}"
        for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")
        if os.environ.get(name) is not None and "cuda" not in os.environ[name]
    ]
    why = f"unset {', '.join(hidden)}"
    if not hidden:
        why = "look at what JAX says: python -c 'import jax; jax.devices()'"
    return Check("visible", f"JAX sees {num_devices} of {num_gpus} GPUs; {why}", ok=False, needed=False)


def _measured(over: "Mesh", machine: Machine) -> Iterator[Check]:
    from speedrun.machine import rates as bench
    from speedrun.train import health

    before_s = health.throttled_s(over)
    reached = bench.measure(over)
    yield from rates(reached, machine, accelerators.named(machine.kind))
    if health.is_simulated(over):
        return
    try:
        loaded = bench.during_products(over, reached["matmul"], loads)
    except NoAnswerError as error:
        yield Check("clocks", f"not known: {error}", ok=False, needed=False)
    else:
        yield clocks(loaded, health.throttled_s(over, before_s))


def rates(
    reached: Mapping[str, float], machine: Machine, device: accelerators.Device | None
) -> Iterator[Check]:
    """Compare each rate with the vendor's, times the number of devices; `device` is None if those are unknown."""
    of_vendor: dict[str, float] = {}
    if device is not None:  # not from host to device: that depends on the host's memory and slots more
        of_vendor = {"matmul": device.bf16_flops, "memory": device.memory_rate}
        of_vendor |= dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), device.link_rate)
    together = ", all devices together" if machine.num_devices > 1 else ""
    for name, rate in reached.items():
        found = quantity(rate, ("flop/s" if name == "matmul" else "B/s") + together)
        facts, slow = {name.replace("-", "_").replace(" ", "_") + "_per_s": rate}, False
        if name in of_vendor:
            share = facts["share_of_vendor"] = rate / (of_vendor[name] * machine.num_devices)
            found += f" | {share:.0%} of the vendor's"
            slow = share < SLOWEST_OF_VENDOR
        found += " | slow: end what else runs here, or take another node" if slow else ""
        yield Check(name, found, ok=not slow, needed=False, facts=facts)
