"""Replay the schedule of a compiled program on one device, with its waits for the links to its peers.

There are two clocks: the device runs one kernel after another, the links carry one collective after another. Where the
schedule ends a collective that is still in flight, the device waits. `docs/plan.md` has the model.
"""

from speedrun.base.accelerators import Device
from speedrun.plan import cost, hlo
from speedrun.plan.cost import Attention, Line, Work
from speedrun.plan.deviceless import Collective, ended
from speedrun.plan.shares import REACHES, errors

#: Seconds to start a collective, and per step of a ring. From NCCL's tuning (`src/graph/tuning.cc`: baseLat and hwLat,
#: with the protocol Simple), fitted to machines of NVIDIA.
_START_S, _STEP_S = 8.4e-6, 3.4e-6


def replayed(
    schedule: list[hlo.Executed], attention: Attention, device: Device, num_devices: int
) -> tuple[Line, ...]:
    """Replay a schedule of `num_devices` on the two clocks; return its kernels by kind.

    `attention` has the FLOPs of attention in the step. "communication" is the time that the device waits for links.
    """
    now_s = links_s = 0.0
    began_s: dict[str, float] = {}
    works: list[Work] = []
    sent: list[Collective] = []
    waits_s: list[float] = []
    for step, work in cost.priced(schedule, attention):
        began_s[step.instruction.name] = now_s
        for start, one in ended(step):
            links_s = max(links_s, began_s[start]) + one.times * seconds(one, num_devices, device)
            sent.append(one)
            waits_s.append(max(0.0, links_s - now_s))
            now_s = max(now_s, links_s)
        if work is not None:
            works += [work] * step.times
            now_s += step.times * cost.seconds(work, device)[0]
    lines = cost.table(works, device)
    if sent:
        num_bytes = sum(ring_bytes(one, num_devices) for one in sent)
        starts = sum(one.times for one in sent)
        error = errors(device)["communication"]
        lines += (Line("communication", sum(waits_s), "links", 0.0, 0.0, num_bytes, starts, error),)
    return lines


def seconds(one: Collective, num_devices: int, device: Device) -> float:
    """Predict one collective over all devices: start, latency of the steps of a ring, bytes over links."""
    ring_s = _rounds(one) * (num_devices - 1) * _STEP_S
    ring_s += ring_bytes(one, num_devices) / one.times / (REACHES["links"] * device.link_rate)
    return _START_S + ring_s


def ring_bytes(one: Collective, num_devices: int) -> int:
    """Bytes that each of n devices sends: (n - 1) / n of the whole array, twice that for an all-reduce."""
    return one.times * one.num_bytes * _rounds(one) * (num_devices - 1) // num_devices


def _rounds(one: Collective) -> int:
    """How often a collective goes around the ring."""
    return 2 if one.kind == "all-reduce" else 1
