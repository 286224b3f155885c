"""How a step scales over nodes, predicted from the programs themselves: compiled here, measured nowhere.

The program for so many nodes is compiled, and its schedule is replayed with two clocks: one of the device, which does
kernel after kernel, and one of the wire, which does collective after collective. Where the schedule ends a collective
that is still on its way, the device waits: that is what communication costs. `docs/scaling.md` has the model and what
it leaves out.
"""

import math
from collections import Counter
from typing import Literal, NamedTuple, get_args

import msgspec

from speedrun.ground import mesh
from speedrun.ground.devices import Device
from speedrun.predict import anatomy, cost, hlo
from speedrun.predict.anatomy import Collective
from speedrun.predict.cost import Attention, Line, Work
from speedrun.predict.deviceless import compiled_step, target_mesh
from speedrun.science.recipe import Recipe, Stage
from speedrun.training.program import Program

#: What a collective sends between: devices of one node; one device of each node; all devices.
Span = Literal["inside", "between", "all"]
SPANS: tuple[Span, ...] = get_args(Span)

#: Of the vendor's rate, what large collectives are taken to reach on NVLink and on the network.
LINKS_REACH = 0.8
#: Seconds: to start a collective; for each step of its ring inside a node and between nodes; for each level of a tree
#: between nodes. From NCCL's own choice of algorithms (`src/graph/tuning.cc`: baseLat and hwLat; rings with the
#: protocol Simple, trees with LL128), which was fitted to machines of NVIDIA.
_START_S, _INSIDE_S, _BETWEEN_S, _LEVEL_S = 8.4e-6, 3.4e-6, 9.6e-6, 8.5e-6
_TREES_REACH = 0.9  #: of the rate of a ring; from there, too


class Trip(NamedTuple):
    """One collective on its way."""

    collective: Collective
    per_node: int  #: devices of a group on each of its nodes
    nodes: int  #: of a group
    takes_s: float
    waited_s: float  #: of these, what the device stands still

    @property
    def span(self) -> Span:
        """What it sends between."""
        return "inside" if self.nodes == 1 else "between" if self.per_node == 1 else "all"


class Sent(msgspec.Struct, frozen=True):
    """The collectives of a step that have one span."""

    kinds: dict[str, int]  #: how many of each
    takes_s: float
    waited_s: float


class Scale(msgspec.Struct, frozen=True):
    """A step on so many nodes. Bytes are those that one device sends; it receives as many."""

    num_nodes: int
    num_devices: int
    batch_tokens: int  #: of all devices
    compute_s: float  #: all kernels, one after the other
    link_bytes: int  #: inside the node
    network_bytes: int  #: to other nodes
    sent: dict[Span, Sent]

    @property
    def step_s(self) -> float:
        """Expected, where the schedule hides what it can."""
        return self.compute_s + sum(sent.waited_s for sent in self.sent.values())

    @property
    def unhidden_s(self) -> float:
        """Expected, if nothing of what goes between nodes were hidden."""
        hidden_s = [sent.takes_s - sent.waited_s for span, sent in self.sent.items() if span != "inside"]
        return self.step_s + sum(hidden_s)


def scale(
    recipe: Recipe, device: Device, kind: str, num_devices: int, num_nodes: int, microbatches: int
) -> Scale:
    """The first stage of `recipe` on so many nodes, with as many tokens for each device as on one.

    Args:
        recipe: its batch is that of one node.
        device: whose rates count.
        kind: a key of `devices.DEVICES`: what is compiled for.
        num_devices: of a node.
        num_nodes: one replica of the state on each.
        microbatches: of a step on one node.

    Raises:
        UsageError: a batch that does not divide; a compiler that is not installed.
    """
    mesh.prepare("cpu")
    of_node = {
        "stages.0.num_sequences": recipe.stages[0].num_sequences,
        "eval_sequences": recipe.eval_sequences,
    }
    larger = recipe.override({name: str(number * num_nodes) for name, number in of_node.items()})
    stage = larger.stages[0]
    program = Program(larger, target_mesh(kind, num_devices, num_nodes), microbatches * num_nodes)
    module = hlo.parse(compiled_step(program, stage).as_text())
    trips, lines = replayed(module, mean_attention(program, stage), device, num_devices, num_nodes)
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
    """Of a step of a stage, over the windows that its schedule has."""
    windows = cost.attention_by_window(program, stage).values()
    return sum((each * (steps / stage.num_steps) for steps, each in windows), Attention(0, 0))


class Replay(NamedTuple):
    """A step on the two clocks."""

    trips: list[Trip]
    lines: tuple[Line, ...]  #: all kernels by kind; under "communication" what the device waits for

    @property
    def step_s(self) -> float:
        """Expected."""
        return sum(line.seconds for line in self.lines)


def replayed(
    module: hlo.Module, attention: Attention, device: Device, num_devices: int, num_nodes: int
) -> Replay:
    """A schedule on the two clocks.

    Args:
        module: of devices that are numbered node by node.
        attention: of a step.
        device: whose rates count.
        num_devices: of a node.
        num_nodes: of them.
    """
    now_s = wire_s = 0.0
    began_s: dict[str, float] = {}
    trips: list[Trip] = []
    works: list[Work] = []
    for step, work in cost.Pricer(module, attention).kernels():
        began_s[step.instruction.name] = now_s
        for start, one in anatomy.ended(module, step):
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
        lines += (_waiting(trips),)
    return Replay(trips, lines)


def _waiting(trips: list[Trip]) -> Line:
    return Line(
        kind="communication",
        seconds=sum(trip.waited_s for trip in trips),
        bound="links",
        flops=0.0,
        instructions=0.0,
        num_bytes=sum(sent_bytes(*trip[:3]) for trip in trips),
        starts=sum(trip.collective.times for trip in trips),
    )


def seconds(one: Collective, per_node: int, nodes: int, device: Device) -> float:
    """Of one collective: a start, its steps, and its bytes over the slowest link; the faster of ring and tree.

    Args:
        one: what is sent.
        per_node: devices of a group on each of its nodes.
        nodes: of a group.
        device: whose links they are.
    """
    rate = device.link_rate if nodes == 1 else min(device.link_rate, per_node * device.network_rate)
    rounds = 2 if one.kind == "all-reduce" else 1
    ring_s = rounds * (nodes * (per_node - 1) * _INSIDE_S + (nodes - 1) * _BETWEEN_S)
    ring_s += sent_bytes(one, per_node, nodes) / one.times / (LINKS_REACH * rate)
    if one.kind != "all-reduce" or nodes == 1:
        return _START_S + ring_s
    tree_s = 2 * ((per_node - 1) * _INSIDE_S + math.ceil(math.log2(nodes)) * _LEVEL_S)
    return _START_S + min(ring_s, tree_s + 2 * one.num_bytes / (_TREES_REACH * LINKS_REACH * rate))


def sent_bytes(one: Collective, per_node: int, nodes: int) -> int:
    """By each device of a group of g: (g - 1) / g of the whole; for an all-reduce twice."""
    size, rounds = per_node * nodes, 2 if one.kind == "all-reduce" else 1
    return one.times * one.num_bytes * rounds * (size - 1) // size


def _reach(one: Collective, num_devices: int, num_nodes: int) -> tuple[int, int]:
    """Devices of a group on each of its nodes, and its nodes: of the group that reaches farthest."""
    groups = one.groups or (tuple(range(num_devices * num_nodes)),)
    nodes = [Counter(device // num_devices for device in group) for group in groups]
    return max((max(counts.values()), len(counts)) for counts in nodes)


def _summed(trips: list[Trip]) -> Sent:
    kinds: Counter[str] = Counter()
    for trip in trips:
        kinds[trip.collective.kind] += trip.collective.times
    return Sent(dict(kinds), sum(trip.takes_s for trip in trips), sum(trip.waited_s for trip in trips))
