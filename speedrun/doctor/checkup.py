"""All checks in order. JAX is imported only if its version is right."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from speedrun.doctor import cuda, gpus, network, nvidia, qualify, rates, software, storage
from speedrun.doctor.check import Check
from speedrun.doctor.rates import Machine
from speedrun.ground import devices, provenance
from speedrun.ground import track as tracks
from speedrun.ground.track import Track

if TYPE_CHECKING:
    from jax.sharding import Mesh


def checks(track: Track, records: Path, *, alone: bool = False) -> Iterator[Check]:
    """Yield every check as soon as it is done.

    The track decides what is needed. `records`, `<track>/<record>/`, have the rates to compare with. With `alone` other
    tracks are left out; so are rates and network, if the track needs neither GPUs nor the hub.
    """
    on_gpus = track.rules.platform == "gpu"
    frugal = alone and not on_gpus and track.data.hub is None
    hub = None if frugal else network.Probe()
    basis = list(software.checks())
    yield from basis
    found: list[nvidia.Gpu] = []
    soundness = list(_driver(found, needed=on_gpus))
    yield from soundness
    machine = None
    if all(check.ok for check in basis if check.needed):
        usable = all(check.ok for check in soundness if check.name in ("cuda", "driver"))
        try:
            for check in _devices(found, records, usable=usable, timed=not frugal):
                yield check
                if check.name == "devices":
                    machine = Machine(**check.facts)  # pyright: ignore[reportArgumentType]
        except RuntimeError as error:  # what JAX raises when a driver or a plugin is broken
            reason = str(error).strip().partition("\n")[0]
            yield Check("devices", f"{reason}; end what else uses them, or repair the driver", ok=False)
    yield from storage.checks(track, timed=not frugal)
    if hub is not None:
        yield hub.check()
    for one in [track] if alone else map(tracks.load, tracks.names()):
        fits = True
        if machine is not None:
            fit = qualify.check(one, machine, needed=one.name == track.name)
            fits = fit.ok
            yield fit
        if fits or one.name == track.name:
            yield storage.data(one)


def _driver(found: list[nvidia.Gpu], *, needed: bool) -> Iterator[Check]:
    """Check GPUs and driver, and whether JAX can use them; yields nothing without GPUs. Fills `found`."""
    try:
        found += nvidia.gpus()
    except nvidia.NoAnswerError as error:
        if (num := nvidia.present()) or nvidia.is_installed():
            here = f"{num} NVIDIA GPUs are here, but" if num else "the kernel knows no NVIDIA GPU, and"
            advice = "repair the driver, or rent another image"
            yield Check("driver", f"{here} {error}; {advice}", ok=False, needed=needed)
        return
    if not found:
        return
    yield from gpus.identity(found)
    yield from cuda.checks(found, provenance.installed(), needed=needed)
    if len(found) > 1:
        try:
            yield gpus.topology(found, nvidia.links())
        except nvidia.NoAnswerError as error:  # some virtual machines hide it, with a sound driver
            yield Check("topology", f"not known: {error}", ok=False, needed=False)


def _devices(found: list[nvidia.Gpu], records: Path, *, usable: bool, timed: bool = True) -> Iterator[Check]:
    """Check the devices; if `timed`, also a collective over all of them, and their rates."""
    import jax

    from speedrun.ground import mesh
    from speedrun.training import health

    mesh.prepare("any" if usable else "cpu")
    over = mesh.make_mesh(len(jax.devices()))
    platform, _ = mesh.accelerator(over)
    machine = Machine(platform, jax.devices()[0].device_kind, over.size)
    simulated = " (simulated)" if health.is_simulated(over) else ""
    said = f"{machine.num_devices} x {machine.kind}{simulated}"
    yield Check("devices", said, ok=True, facts=machine._asdict())
    seen = 0 if simulated else over.size
    if usable and seen < len(found):
        yield cuda.unseen(len(found), seen)
    if found and simulated:
        said = f"not measured: {len(found)} GPUs are here, and JAX uses none of them; see above"
        yield Check("rates", said, ok=False, needed=False)
        return
    if not timed:
        return
    agree = _devices_agree(over)
    yield Check(
        "collective", f"a sum over the devices {'comes out right' if agree else 'is wrong'}", ok=agree
    )
    yield from _rates(over, machine, records)


def _devices_agree(mesh: "Mesh") -> bool:
    """Return whether a compiled sum over the devices is right."""
    import jax
    from jax.sharding import PartitionSpec as P

    axes = mesh.axis_names
    program = jax.shard_map(lambda x: jax.lax.psum(x, axes), mesh=mesh, in_specs=P(axes), out_specs=P())
    total = jax.jit(program)(jax.numpy.arange(mesh.size, dtype="float32"))
    return float(total[0]) == mesh.size * (mesh.size - 1) / 2


def _rates(over: "Mesh", machine: Machine, records: Path) -> Iterator[Check]:
    """Check the rates of the devices, and the clocks of GPUs under load."""
    from speedrun.bench import machine as bench
    from speedrun.training import health

    before_s = health.throttled_s(over)
    reached = bench.measure(over)
    yield from rates.checks(reached, machine, devices.named(machine.kind), rates.cohort(records, machine))
    if health.is_simulated(over):
        return
    try:
        loads = bench.during_products(over, reached.matmul_gflops, nvidia.loads)
    except nvidia.NoAnswerError as error:
        yield Check("clocks", f"not known: {error}", ok=False, needed=False)
    else:
        yield gpus.clocks(loads, health.throttled_s(over, before_s))
