"""What a recipe needs on devices that need not be here: arithmetic, or the program itself where it can be compiled.

A floor is a number of FLOPs or bytes at the vendor's rate. A step's time is an estimate, and says so.
"""

from typing import Literal, NamedTuple

import msgspec

from speedrun import anatomy, devices, footprint, mesh
from speedrun.deviceless import compiled_step, target_mesh
from speedrun.devices import Device
from speedrun.params import count, flops_per_token
from speedrun.recipe import Recipe, Stage
from speedrun.step import Program

#: Where a plan's numbers come from.
Basis = Literal["arithmetic", "compiled program"]

#: Of the vendor's rates: what large products reach on such devices, and what passes over memory do.
PRODUCTS_REACH, MEMORY_REACHES = 0.6, 0.9
#: Relative, of a step's expected time where a step takes milliseconds. No GPU has been timed against it yet, and
#: the time to start kernels, which rules the steps of small models, is not in it.
ERROR = 0.3
#: Traffic between the products of the body by that of the products: in record 21 compiled for an H100, 65 GB by 54.
_BETWEEN = 1.2


class StagePlan(msgspec.Struct, frozen=True):
    """One stage, on one device. Bytes and seconds are those of a step."""

    num_steps: int
    batch_tokens: int  #: of all devices
    memory_bytes: int  #: at the worst moment
    traffic_bytes: int  #: to and from memory
    gathered_bytes: int  #: whole parameters, as they arrive
    scattered_bytes: int  #: whole gradients, as they leave
    compute_floor_s: float  #: all products at the vendor's rate
    traffic_floor_s: float  #: all traffic at the vendor's rate
    communication_floor_s: float
    step_s: float  #: expected


class Plan(msgspec.Struct, frozen=True):
    """A recipe on devices of one kind."""

    recipe: str
    device: str
    num_devices: int
    microbatches: int
    basis: Basis
    num_params: int
    flops_per_token: float
    state_bytes: int  #: parameters and optimiser, on one device
    memory_limit_bytes: int
    validation_bytes: int  #: memory of one device while it scores a sequence; arithmetic
    stages: tuple[StagePlan, ...]

    @property
    def memory_bytes(self) -> int:
        """At the worst moment of training and validation."""
        return max(self.validation_bytes, *(stage.memory_bytes for stage in self.stages))

    @property
    def fits(self) -> bool:
        """Whether that is less than a device has."""
        return self.memory_bytes < self.memory_limit_bytes

    @property
    def total_s(self) -> float:
        """Expected time of all steps."""
        return sum(stage.num_steps * stage.step_s for stage in self.stages)

    @property
    def device_hours(self) -> float:
        """Of all devices together."""
        return self.total_s * self.num_devices / 3600


def plan(recipe: Recipe, kind: str, num_devices: int, microbatches: int, basis: Basis = "arithmetic") -> Plan:
    """What `recipe` needs on so many devices of a kind.

    Args:
        recipe: any.
        kind: a key of `devices.DEVICES`.
        num_devices: 1, 2, 4 or 8, in one machine.
        microbatches: of a step, over all devices.
        basis: where memory (`footprint`), traffic and communication come from.

    Raises:
        UsageError: an unknown kind; a batch that does not divide; a compiler that is not installed.
    """
    device = devices.load(kind)
    mesh.prepare("cpu")
    if basis == "arithmetic":
        program, work_of = Program(recipe, mesh.make_mesh(num_devices), microbatches), _by_arithmetic
    else:
        program, work_of = Program(recipe, target_mesh(kind, num_devices), microbatches), _by_compiling
    stage_of = {(stage.num_sequences, stage.seq_len): stage for stage in recipe.stages}
    work = {shape: work_of(program, stage) for shape, stage in stage_of.items()}  # compiled once a shape
    return Plan(
        recipe=recipe.name,
        device=device.name,
        num_devices=num_devices,
        microbatches=microbatches,
        basis=basis,
        num_params=count(program.layout.table),
        flops_per_token=flops_per_token(program.layout.table),
        state_bytes=footprint.state_bytes(program),
        memory_limit_bytes=device.memory_bytes,
        validation_bytes=footprint.validation_bytes(program),
        stages=tuple(
            _stage(program, stage, device, work[stage.num_sequences, stage.seq_len])
            for stage in recipe.stages
        ),
    )


def advice(recipe: Recipe, num_devices: int, microbatches: int, limit_bytes: int) -> str:
    """What to type for a plan that does not fit."""
    program = Program(recipe, mesh.make_mesh(num_devices), microbatches)
    return footprint.advice(program, limit_bytes) or "another --device-kind or more --devices"


def _stage(program: Program, stage: Stage, device: Device, work: "_Work") -> StagePlan:
    flops = flops_per_token(program.layout.table) * stage.batch_tokens / program.num_devices
    # float32 products run as TF32, at half the rate.
    rate = device.bf16_flops * 2 / footprint.itemsize(program)
    sent_bytes = (work.gathered_bytes + work.scattered_bytes) * (1 - 1 / program.num_shards)
    memory_rate = MEMORY_REACHES * device.memory_rate
    # A product moves its factors while it multiplies; what stands between products has only its traffic.
    products_s = max(flops / (PRODUCTS_REACH * rate), work.products_bytes / memory_rate)
    between_s = (work.traffic_bytes - work.products_bytes) / memory_rate
    return StagePlan(
        num_steps=stage.num_steps,
        batch_tokens=stage.batch_tokens,
        memory_bytes=work.memory_bytes,
        traffic_bytes=work.traffic_bytes,
        gathered_bytes=work.gathered_bytes,
        scattered_bytes=work.scattered_bytes,
        compute_floor_s=flops / rate,
        traffic_floor_s=work.traffic_bytes / device.memory_rate,
        communication_floor_s=sent_bytes / device.link_rate,
        step_s=max(products_s + between_s, sent_bytes / device.link_rate),  # one hides behind the other
    )


class _Work(NamedTuple):
    """What one device does in a step."""

    memory_bytes: int
    traffic_bytes: int
    products_bytes: int  #: of the traffic, what matrix products read and write
    gathered_bytes: int
    scattered_bytes: int


def _by_arithmetic(program: Program, stage: Stage) -> _Work:
    """From the table of parameters alone.

    A product [m, n] reads or writes m + n numbers a token, three times with its gradients, and keeps them once for
    the backward pass. The head's logits pass six times, three of them in products, and lie there twice.
    """
    table, size = program.layout.table.values(), footprint.itemsize(program)
    local = program.microbatches // program.num_devices
    tokens = stage.batch_tokens // program.microbatches
    width = footprint.matrix_width(program)
    weights = size * sum(spec.size for spec in table if spec.group in ("matrix", "head"))
    logits = size * tokens * sum(spec.shape[0] for spec in table if spec.group == "head")
    products = local * (3 * size * tokens * width + 3 * logits + 3 * weights)
    between = local * (_BETWEEN * 3 * size * tokens * width + 3 * logits) + 3 * footprint.state_bytes(program)
    whole = footprint.whole_bytes(program)
    return _Work(
        memory_bytes=footprint.step_bytes(program, stage),
        traffic_bytes=int(products + between),
        products_bytes=products,
        gathered_bytes=whole if program.num_devices > 1 else 0,
        scattered_bytes=whole if program.num_devices > 1 else 0,
    )


def _by_compiling(program: Program, stage: Stage) -> _Work:
    """From the compiled step."""
    found = anatomy.dissect(compiled_step(program, stage))
    return _Work(
        memory_bytes=found.memory.peak_bytes,
        traffic_bytes=found.traffic_bytes,
        products_bytes=sum(size for kind, size in found.traffic.items() if kind.startswith("__cublas")),
        gathered_bytes=found.sent_bytes("all-gather"),
        scattered_bytes=found.sent_bytes("reduce-scatter"),
    )
