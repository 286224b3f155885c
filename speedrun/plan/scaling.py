"""Predict how a step scales over nodes, from the program compiled for them. Nothing is measured.

The schedule is replayed with two clocks: the device runs one kernel after another, the wire carries one collective
after another. Where the schedule ends a collective that is still in flight, the device waits. `docs/scaling.md` has
the model and its limits.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np

from speedrun.base import accelerators as kinds
from speedrun.base import mesh
from speedrun.base.accelerators import Device
from speedrun.base.errors import UsageError
from speedrun.plan import cost, hlo
from speedrun.plan.cost import Attention, Line, Work, gb, ms
from speedrun.plan.deviceless import Collective, compiled_step, ended, target_mesh
from speedrun.plan.shares import REACHES, errors
from speedrun.science.recipe import Recipe, Stage
from speedrun.train.program import Program

#: What a collective connects: devices of one node; one device of each node; all devices.
Span = Literal["inside", "between", "all"]
SPANS: tuple[Span, ...] = get_args(Span)

#: Seconds to start a collective; per step of a ring inside a node and between nodes; per level of a tree between nodes.
#: From NCCL's tuning (`src/graph/tuning.cc`: baseLat and hwLat; rings with the protocol Simple, trees with LL128),
#: fitted to machines of NVIDIA.
_START_S, _INSIDE_S, _BETWEEN_S, _LEVEL_S = 8.4e-6, 3.4e-6, 9.6e-6, 8.5e-6
_TREES_REACH = 0.9  #: of the rate of a ring, by the same source
_MOST_NODES = 1024  #: the compiler gets a description of each device


class Trip(NamedTuple):
    """The transfer of one collective."""

    collective: Collective
    per_node: int  #: devices of a group on each of its nodes
    nodes: int  #: of a group
    takes_s: float
    waited_s: float  #: of these, the device is idle

    @property
    def span(self) -> Span:
        """What it connects."""
        return "inside" if self.nodes == 1 else "between" if self.per_node == 1 else "all"


class Sent(msgspec.Struct, frozen=True):
    """All collectives of a step that have one span."""

    kinds: dict[str, int]  #: number of each
    takes_s: float
    waited_s: float


class Scale(msgspec.Struct, frozen=True):
    """A step on some number of nodes. Bytes are those that one device sends; it receives as many."""

    num_nodes: int
    num_devices: int
    batch_tokens: int  #: of all devices
    compute_s: float  #: all kernels, one after the other
    link_bytes: int  #: inside the node
    network_bytes: int  #: to other nodes
    sent: dict[Span, Sent]

    @property
    def step_s(self) -> float:
        """Predicted step time, with the overlap of the schedule."""
        return self.compute_s + sum(sent.waited_s for sent in self.sent.values())

    @property
    def unhidden_s(self) -> float:
        """Predicted step time if no transfer between nodes overlapped with computation."""
        hidden_s = [sent.takes_s - sent.waited_s for span, sent in self.sent.items() if span != "inside"]
        return self.step_s + sum(hidden_s)


class Scaling(NamedTuple):
    """One recipe on several numbers of nodes; the first is one node, the base of the efficiencies."""

    recipe: str
    device: Device
    nodes: list[Scale]

    def facts(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
        rows = [
            msgspec.structs.asdict(scale)
            | {"step_s": scale.step_s, "unhidden_s": scale.unhidden_s}
            | {"efficiency": self.nodes[0].step_s / scale.step_s}
            for scale in self.nodes
        ]
        return {"recipe": self.recipe, "device": self.device._asdict(), "nodes": rows}

    def lines(self) -> list[str]:
        """Return a table, with the rates that it assumes."""
        one, device = self.nodes[0], self.device
        return [
            f"scale  {self.recipe} on nodes of {one.num_devices} x {device.name} | "
            f"{one.batch_tokens // one.num_devices:,} tokens a device and step | by the compiled programs; nothing was "
            "run",
            f"rates  inside a node {device.link_rate / 1e9:g} GB/s, between nodes {device.network_rate / 1e9:g} GB/s, "
            "each way and device | docs/scaling.md has the model",
            f"{'nodes':>5} {'devices':>7} {'tokens/step':>11}  {'inside':>6} {'between':>7} {'all':>3}  {'link':>8} "
            f"{'network':>8}  {'sending':>8} {'waiting':>8} {'step':>9}  {'efficiency':>10} {'unhidden':>8}",
            *(_row(scale, one) for scale in self.nodes),
        ]


def _row(scale: Scale, one: Scale) -> str:
    counts = {span: sum(sent.kinds.values()) for span, sent in scale.sent.items()}
    sending_s = sum(sent.takes_s for sent in scale.sent.values())
    waiting_s = sum(sent.waited_s for sent in scale.sent.values())
    return (
        f"{scale.num_nodes:>5} {scale.num_devices:>7} {scale.batch_tokens:>11,}  "
        f"{counts['inside']:>6} {counts['between']:>7} {counts['all']:>3}  "
        f"{gb(scale.link_bytes):>8} {gb(scale.network_bytes):>8}  {ms(sending_s):>8} {ms(waiting_s):>8} "
        f"{ms(scale.step_s):>9}  {one.step_s / scale.step_s:>10.1%} {one.step_s / scale.unhidden_s:>8.1%}"
    )


def scaled(
    recipe: Recipe,
    kind: str,
    num_devices: int,
    nodes: str,
    microbatches: int,
    network_gbit: float | None,
    say: Callable[[str], object],
) -> Scaling:
    """Compile and replay a step on several numbers of nodes, given with commas between them; one node is added.

    Batch, devices and micro-batches are those of one node. `network_gbit` is the rate between nodes, per second, device
    and direction; None: the kind's own.

    Raises:
        UsageError: numbers that cannot be read; an unknown kind or rate; and as `scale`.
    """
    device, words = kinds.load(kind), nodes.split(",")
    if not all(word.isdecimal() and len(word) < 5 and 0 < int(word) <= _MOST_NODES for word in words):
        raise UsageError(
            f"--nodes {nodes!r}; need numbers up to {_MOST_NODES} with commas between them, as in --nodes 1,2,8,32"
        )
    numbers = sorted({1, *map(int, words)})
    if network_gbit is not None:
        device = device._replace(network_rate=network_gbit * 1e9 / 8)
    if not device.network_rate and len(numbers) > 1:
        raise UsageError(f"the network between machines of {device.name} is not known; pass --network GBIT")
    scales = []
    for number in numbers:
        say(f"compiling for {number} x {num_devices} {device.name}")
        scales.append(scale(recipe, device, kind, num_devices, number, microbatches))
    return Scaling(recipe.name, device, scales)


def scale(
    recipe: Recipe, device: Device, kind: str, num_devices: int, num_nodes: int, microbatches: int
) -> Scale:
    """Predict the first stage of a recipe on several nodes, with the same number of tokens per device.

    Batch, devices and micro-batches are those of one node, which has one replica of the state. `device` has the rates,
    `kind` is compiled for.

    Raises:
        UsageError: a batch that does not divide; a compiler that is not installed.
    """
    mesh.prepare("cpu")
    larger = recipe.override(
        {
            "stages.0.num_sequences": recipe.stages[0].num_sequences * num_nodes,
            "eval_sequences": recipe.eval_sequences * num_nodes,
        }
    )
    stage = larger.stages[0]
    program = Program(larger, target_mesh(kind, num_devices, num_nodes), microbatches * num_nodes)
    schedule = hlo.parse(compiled_step(program, 0).as_text())
    trips, lines = replayed(schedule, mean_attention(program, stage), device, num_devices, num_nodes)
    return Scale(
        num_nodes=num_nodes,
        num_devices=program.num_devices,
        batch_tokens=stage.batch_tokens,
        compute_s=sum(line.seconds for line in lines if line.kind != "communication"),
        link_bytes=sum(sent_bytes(*trip[:3]) for trip in trips if trip.per_node > 1),
        network_bytes=sum(sent_bytes(*trip[:3]) // trip.per_node for trip in trips if trip.nodes > 1),
        sent={span: _summed([trip for trip in trips if trip.span == span]) for span in SPANS},
    )


def mean_attention(program: Program, stage: Stage) -> Attention:
    """Mean FLOPs of attention in a step, over the windows of the schedule of a stage."""
    windows = cost.attention_by_window(program, stage)
    return np.sum([each * (steps / stage.num_steps) for steps, each in windows], axis=0)


def replayed(
    schedule: list[hlo.Executed], attention: Attention, device: Device, num_devices: int, num_nodes: int
) -> tuple[list[Trip], tuple[Line, ...]]:
    """Replay a schedule on the two clocks; return its transfers, and its kernels by kind.

    The devices of the program are numbered node by node. `attention` has the FLOPs of attention in the step.
    "communication" among the kernels is the time that the device waits.
    """
    now_s = wire_s = 0.0
    began_s: dict[str, float] = {}
    trips: list[Trip] = []
    works: list[Work] = []
    for step, work in cost.priced(schedule, attention):
        began_s[step.instruction.name] = now_s
        for start, one in ended(step):
            per_node, nodes = _reach(one, num_devices, num_nodes)
            takes_s = one.times * seconds(one, per_node, nodes, device)
            wire_s = max(wire_s, began_s[start]) + takes_s
            trips.append(Trip(one, per_node, nodes, takes_s, max(0.0, wire_s - now_s)))
            now_s = max(now_s, wire_s)
        if work is not None:
            works += [work] * step.times
            now_s += step.times * cost.seconds(work, device)[0]
    lines = cost.table(works, device)
    if trips:
        waited_s = sum(trip.waited_s for trip in trips)
        num_bytes = sum(sent_bytes(*trip[:3]) for trip in trips)
        starts = sum(trip.collective.times for trip in trips)
        error = errors(device)["communication"]
        lines += (Line("communication", waited_s, "links", 0.0, 0.0, num_bytes, starts, error),)
    return trips, lines


def seconds(one: Collective, per_node: int, nodes: int, device: Device) -> float:
    """Predict one collective: start, latency of its steps, bytes over the slowest link; the faster of ring and tree.

    A group has `per_node` devices on each of its `nodes`.
    """
    rate = device.link_rate if nodes == 1 else min(device.link_rate, per_node * device.network_rate)
    rounds = 2 if one.kind == "all-reduce" else 1
    ring_s = rounds * (nodes * (per_node - 1) * _INSIDE_S + (nodes - 1) * _BETWEEN_S)
    ring_s += sent_bytes(one, per_node, nodes) / one.times / (REACHES["links"] * rate)
    if one.kind != "all-reduce" or nodes == 1:
        return _START_S + ring_s
    tree_s = 2 * ((per_node - 1) * _INSIDE_S + math.ceil(math.log2(nodes)) * _LEVEL_S)
    return _START_S + min(ring_s, tree_s + 2 * one.num_bytes / (_TREES_REACH * REACHES["links"] * rate))


def sent_bytes(one: Collective, per_node: int, nodes: int) -> int:
    """Bytes that each device of a group of g sends: (g - 1) / g of the whole array, twice that for an all-reduce."""
    size, rounds = per_node * nodes, 2 if one.kind == "all-reduce" else 1
    return one.times * one.num_bytes * rounds * (size - 1) // size


def _reach(one: Collective, num_devices: int, num_nodes: int) -> tuple[int, int]:
    """Devices per node and number of nodes, of the group that reaches farthest."""
    groups = one.groups or (tuple(range(num_devices * num_nodes)),)
    nodes = [Counter(device // num_devices for device in group) for group in groups]
    return max((max(counts.values()), len(counts)) for counts in nodes)


def _summed(trips: list[Trip]) -> Sent:
    kinds: Counter[str] = Counter()
    for trip in trips:
        kinds[trip.collective.kind] += trip.collective.times
    return Sent(dict(kinds), sum(trip.takes_s for trip in trips), sum(trip.waited_s for trip in trips))
