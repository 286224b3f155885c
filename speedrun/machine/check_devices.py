"""Checks of the devices: the GPUs that the driver reports, a collective, and rates against the vendor's."""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from speedrun.base import accelerators
from speedrun.base.console import quantity
from speedrun.record.checks.v4_environment import SLOWEST_OF_VENDOR

#: An nvidia-smi that hangs is a broken driver; one without persistence mode takes 2 to 3 s a GPU.
_ANSWER_S = 90.0
_SHARED_BYTES = 10**9
_LIBRARIES = ("cudart", "cudnn", "cublas", "nccl")
_IDLE_MIB = 2048  #: driver and display take less memory of a GPU

Fact = float | int | str | bool | None


class Check(msgspec.Struct, frozen=True):
    """The result of one check."""

    name: str
    found: str  #: one line; if not ok, it ends with what to do
    ok: bool
    needed: bool = True  #: by the chosen track
    facts: Mapping[str, Fact] = {}
    mark: Literal["ok", "note", "bad"] = "ok"  #: follows from `ok` and `needed`

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "mark", "ok" if self.ok else "bad" if self.needed else "note")


class NoAnswerError(Exception):
    """`nvidia-smi` gave no answer; the message says why."""


class Gpu(NamedTuple):
    """One GPU."""

    name: str
    driver: str
    used_mib: int = 0  #: memory in use, by whatever program


def found() -> list[Gpu]:
    """Return all GPUs; raise NoAnswerError if `nvidia-smi` is not installed, fails or hangs."""
    argv = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            argv, capture_output=True, encoding="utf-8", errors="replace", timeout=_ANSWER_S
        )
    except OSError:
        raise NoAnswerError("there is no nvidia-smi") from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"nvidia-smi gave no answer in {_ANSWER_S:.0f} s") from None
    lines = [line for line in done.stdout.splitlines() if line]
    rows = [match.groups() for line in lines if (match := re.fullmatch(r"(.+), (\d[\d.]*), (.+)", line))]
    if done.returncode or len(rows) < len(lines):  # a lost GPU is a sentence between the others
        said = " ".join((done.stdout + done.stderr).split())
        raise NoAnswerError(f"nvidia-smi says: {said[-160:]}")
    return [Gpu(name, driver, int(used) if used.isdigit() else 0) for name, driver, used in rows]


def quiet(gpus: list[Gpu]) -> Iterator[Check]:
    """Check that no other program uses the GPUs, and that nothing stands in the way of CUDA's libraries."""
    busy = [
        f"GPU {i} has {gpu.used_mib:,} MiB in use" for i, gpu in enumerate(gpus) if gpu.used_mib > _IDLE_MIB
    ]
    if busy:
        yield Check(
            "busy", f"{', '.join(busy)}; stop the programs that nvidia-smi lists", ok=False, needed=False
        )
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        if any(any(Path(folder).glob(f"lib{name}.so*")) for name in _LIBRARIES):
            said = f"LD_LIBRARY_PATH names {folder}, whose libraries hide those of the wheels; unset it"
            yield Check("libraries", said, ok=False, needed=False)
    memory = Path("/dev/shm")
    if len(gpus) > 1 and memory.exists() and (size := shutil.disk_usage(memory).total) < _SHARED_BYTES:
        need = f"NCCL needs {quantity(_SHARED_BYTES, 'B')}: docker run --shm-size 16g"
        yield Check("shared memory", f"{memory} has {quantity(size, 'B')}; {need}", ok=False, needed=False)


def identity(gpus: list[Gpu]) -> Check:
    """Check that all GPUs are of one kind."""
    kinds = Counter(gpu.name for gpu in gpus)
    said = " and ".join(f"{count} x {name}" for name, count in kinds.items())
    said += "; a record needs one kind: rent another node" if len(kinds) > 1 else ""
    facts = {"num_gpus": len(gpus), "gpu": gpus[0].name}
    return Check("gpus", said, ok=len(kinds) == 1, needed=False, facts=facts)


class Machine(NamedTuple):
    """Devices as JAX names them."""

    platform: str
    kind: str
    num_devices: int


def checks(found: list[Gpu], *, usable: bool, timed: bool = True) -> Iterator[Check]:
    """Check the devices; if `timed`, also a collective and their rates.

    JAX raises RuntimeError if a driver or a plugin is broken.
    """
    import jax
    from jax.sharding import PartitionSpec as P

    from speedrun.base import mesh
    from speedrun.machine import bench_kernels
    from speedrun.train import device_benchmark

    mesh.prepare("any" if usable else "cpu")
    over = mesh.make_mesh(len(jax.devices()))
    platform, _ = mesh.accelerator(over)
    machine = Machine(platform, jax.devices()[0].device_kind, over.size)
    simulated = device_benchmark.is_simulated(over)
    said = f"{machine.num_devices} x {machine.kind}{' (simulated)' if simulated else ''}"
    yield Check("devices", said, ok=True, facts=machine._asdict())
    seen = 0 if simulated else over.size
    if usable and seen < len(found):
        advice = "unset JAX_PLATFORMS and CUDA_VISIBLE_DEVICES, or see: python -c 'import jax; jax.devices()'"
        yield Check("visible", f"JAX sees {seen} of {len(found)} GPUs; {advice}", ok=False, needed=False)
    if timed and not (found and simulated):  # the rates of CPUs say nothing about a GPU node
        axes = over.axis_names
        program = jax.shard_map(lambda x: jax.lax.psum(x, axes), mesh=over, in_specs=P(axes), out_specs=P())
        total = jax.jit(program)(jax.numpy.arange(over.size, dtype="float32"))
        agree = float(total[0]) == over.size * (over.size - 1) / 2
        yield Check("collective", f"a sum over the devices {'is right' if agree else 'is wrong'}", ok=agree)
        yield from rates(bench_kernels.measure(over), machine, accelerators.named(machine.kind))


def rates(
    reached: Mapping[str, float], machine: Machine, device: accelerators.Device | None
) -> Iterator[Check]:
    """Compare each rate with the vendor's times the number of devices; `device` is None for an unknown device."""
    of_vendor: dict[str, float] = {}
    if device is not None:  # "host to device" depends more on the host's memory and slots
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
        found += " | slow: stop other programs, or take another node" if slow else ""
        yield Check(name, found, ok=not slow, needed=False, facts=facts)
