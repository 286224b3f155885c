"""Check the GPUs of this machine: what they are, how they are connected, what throttles them."""

from collections import Counter
from collections.abc import Iterator

from speedrun.doctor.check import Check
from speedrun.doctor.nvidia import Gpu, Load
from speedrun.ground import devices

#: Share of the highest clock, under load. The power cap alone keeps large products well above it.
_LOW_CLOCK = 0.6
_HOT_C = 85  #: where clocks begin to fall


def identity(gpus: list[Gpu]) -> Iterator[Check]:
    """Check for several kinds of GPU, MIG instances, and missing PCIe lanes."""
    kinds = Counter(gpu.name for gpu in gpus)
    said = " and ".join(f"{count} x {name}" for name, count in kinds.items())
    facts = {"num_gpus": len(gpus), "gpu": gpus[0].name}
    worries = [
        *(["of several kinds: records want one"] if len(kinds) > 1 else []),
        *(
            ["cut into instances (MIG); nvidia-smi -mig 0 makes them whole"]
            if any(g.mig for g in gpus)
            else []
        ),
        *(
            f"GPU {i} has {gpu.pcie_width} of {gpu.most_pcie_width} PCIe lanes; reseat it, or rent another node"
            for i, gpu in enumerate(gpus)
            if gpu.pcie_width and gpu.most_pcie_width and gpu.pcie_width < gpu.most_pcie_width
        ),
    ]
    yield Check("gpus", "; ".join([said, *worries]), ok=not worries, needed=False, facts=facts)


def topology(gpus: list[Gpu], links: dict[tuple[int, int], str]) -> Check:
    """Check that every pair of GPUs is connected by all of its NVLinks."""
    pairs = [(i, j) for i in range(len(gpus)) for j in range(i + 1, len(gpus))]
    kinds = Counter(links.get(pair, "unknown") for pair in pairs)
    facts = {
        "num_pairs": len(pairs),
        "links": ", ".join(f"{kind} x {count}" for kind, count in kinds.items()),
    }
    usual, count = kinds.most_common(1)[0]
    if count < len(pairs):
        i, j = next(pair for pair in pairs if links.get(pair, "unknown") != usual)
        odd = f"GPU{i} and GPU{j} by {links.get((i, j), 'unknown')}"
        found = (
            f"uneven: {facts['links']}; {odd}: collectives go at the slowest pair's rate; rent another node"
        )
        return Check("topology", found, ok=False, needed=False, facts=facts)
    if not usual.startswith("NV"):
        found = f"all {count} pairs over PCIe ({usual}), none over NVLink: fit for one GPU, slow for several"
        return Check("topology", found, ok=False, needed=False, facts=facts)
    device, num = devices.named(gpus[0].name), int(usual[2:] or 0)
    found = f"all {count} pairs over {num} NVLinks"
    if device is not None and num < device.num_links:
        found += f"; a {device.name} has {device.num_links}: some are down, see nvidia-smi nvlink -s"
    whole = device is None or num >= device.num_links
    return Check("topology", found, ok=whole, needed=False, facts=facts)


def clocks(loads: list[Load], throttled_s: float | None) -> Check:
    """Check the clocks under load.

    `loads` has every GPU, while all of them multiply. `throttled_s` is meanwhile; None if the driver does not count it.
    """
    shares = [one.clock_mhz / one.most_clock_mhz for one in loads if one.clock_mhz and one.most_clock_mhz]
    heats = [one.temperature_c for one in loads if one.temperature_c is not None]
    facts = {
        "least_clock_share": min(shares, default=None),
        "most_temperature_c": max(heats, default=None),
        "throttled_s": throttled_s,
    }
    clock = f"{min(shares):.0%} of the highest under load" if shares else "unknown"
    heat = f", {max(heats)} C" if heats else ""
    worries = [
        *(f"GPU {i}: {', '.join(one.reasons)}" for i, one in enumerate(loads) if one.reasons),
        *(["low for large products"] if shares and min(shares) < _LOW_CLOCK else []),
        *([f"hotter than {_HOT_C} C"] if heats and max(heats) > _HOT_C else []),
        *([f"held back for {throttled_s:.1f} s"] if throttled_s else []),
    ]
    if not worries:
        return Check("clocks", f"{clock}{heat}, nothing holds them back", ok=True, needed=False, facts=facts)
    found = f"{clock}{heat}; {'; '.join(worries)}; let it cool (or nvidia-smi -rgc), or rent another node"
    return Check("clocks", found, ok=False, needed=False, facts=facts)
