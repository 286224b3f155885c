"""What a recipe needs on devices that need not be here: from its compiled program, or by arithmetic.

A floor is a number of FLOPs or bytes at the vendor's rate. A step's time is what `cost` makes of the step's kernels.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from speedrun.ground import devices, mesh
from speedrun.ground.devices import Device
from speedrun.predict import anatomy, cost, hlo, scaling
from speedrun.predict.cost import Attention, Line, Unit, Work
from speedrun.predict.deviceless import compiled_step, target_mesh
from speedrun.science.optim.groups import MuonAndAdam
from speedrun.science.params import ParamSpec, count
from speedrun.science.recipe import Recipe, Stage
from speedrun.training import footprint
from speedrun.training.footprint import flops_per_token
from speedrun.training.program import Program

#: Where a plan's numbers come from.
Basis = Literal["arithmetic", "compiled program"]

#: Relative, of the expected time of a step. No GPU has been timed yet; docs/LOG.md has the published times beside it.
ERROR = 0.15
#: Arithmetic for what only a compiler decides, as it came out for record 21 on an H100: traffic of the kernels between
#: products, by that of the products (65 GB by 47), and the kernels that this takes for each matrix.
_BETWEEN, _BETWEEN_STARTS = 1.37, 8
#: Instructions of a logit in the two passes over it.
_HEAD_INSTRUCTIONS = 38 + 65


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
    mfu: float  #: FLOPs of weights alone, all of them at the rate of bf16: what the field calls MFU
    step_s: float  #: expected, in the mean over the windows of the schedule
    narrow_s: float  #: with its smallest window
    wide_s: float  #: with its largest
    lines: tuple[Line, ...]  #: `step_s` by kind of kernel


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
    work = {
        shape: work_of(program, stage, device) for shape, stage in stage_of.items()
    }  # compiled once a shape
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


def _stage(program: Program, stage: Stage, device: Device, found: "_Found") -> StagePlan:
    windows = [each for _, each in cost.attention_by_window(program, stage).values()]
    mean, narrow, wide = (
        found.lines_with(each) for each in (scaling.mean_attention(program, stage), windows[0], windows[-1])
    )
    sent_bytes = (found.gathered_bytes + found.scattered_bytes) * (1 - 1 / program.num_shards)
    step_s = sum(line.seconds for line in mean)
    weight_flops = flops_per_token(program.layout.table) * stage.batch_tokens / program.num_devices
    return StagePlan(
        num_steps=stage.num_steps,
        batch_tokens=stage.batch_tokens,
        memory_bytes=found.memory_bytes,
        traffic_bytes=found.traffic_bytes,
        gathered_bytes=found.gathered_bytes,
        scattered_bytes=found.scattered_bytes,
        compute_floor_s=sum(cost.floor_s(line, device) for line in mean),
        traffic_floor_s=found.traffic_bytes / device.memory_rate,
        communication_floor_s=sent_bytes / device.link_rate,
        mfu=weight_flops / device.bf16_flops / step_s,
        step_s=step_s,
        narrow_s=sum(line.seconds for line in narrow),
        wide_s=sum(line.seconds for line in wide),
        lines=mean,
    )


class _Found(NamedTuple):
    """What one device does in a step."""

    memory_bytes: int
    traffic_bytes: int
    gathered_bytes: int
    scattered_bytes: int
    lines_with: Callable[[Attention], tuple[Line, ...]]  #: all its time, given the FLOPs of attention


def _by_arithmetic(program: Program, stage: Stage, device: Device) -> _Found:
    """From the table of parameters, where `footprint` has the memory from.

    A product [m, n] reads or writes m + n numbers a token, three times with its gradients, and keeps them once for
    the backward pass. The head's logits pass six times, three of them in products, and lie there twice. Communication
    is hidden as far as there is something to hide it behind.
    """
    table, size = program.layout.table.values(), footprint.itemsize(program)
    local = program.microbatches // program.num_devices
    tokens = stage.batch_tokens // program.microbatches
    matrices = [spec for spec in table if spec.group == "matrix"]
    weights, width = sum(spec.size for spec in matrices), footprint.matrix_width(program)
    heads = [spec for spec in table if spec.group == "head"]
    logits = tokens * sum(spec.shape[0] for spec in heads)
    num_matrices = sum(math.prod(spec.shape[:-2]) for spec in matrices)
    unit: Unit = "bf16" if size == 2 else "f32"
    head_unit: Unit = unit if program.recipe.head_fp8 is None else "fp8"
    moved = size * tokens * width
    works = [
        Work(
            cost.gemm(unit), 6 * tokens * weights, unit, 0, 3 * moved + 3 * size * weights, 3 * num_matrices
        ),
        Work(cost.gemm(head_unit), 6 * logits * heads[0].shape[1], head_unit, 0, 3 * size * logits, 3),
        Work("head passes", 0, unit, _HEAD_INSTRUCTIONS * logits, 3 * size * logits, 9),
        Work("elementwise", num_bytes=_BETWEEN * 3 * moved, starts=_BETWEEN_STARTS * num_matrices),
    ]
    once = [Work("elementwise", num_bytes=3 * footprint.state_bytes(program)), *_muon(program, matrices)]
    whole = footprint.whole_bytes(program) if program.num_devices > 1 else 0
    sent_s = 2 * whole * (1 - 1 / program.num_shards) / (scaling.LINKS_REACH * device.link_rate)

    def lines_with(attention: Attention) -> tuple[Line, ...]:
        both = [Work("attention", flops, "attention") for flops in attention]
        lines = cost.table([*works * local, *once, *both], device)
        waited_s = max(0.0, sent_s - sum(line.seconds for line in lines))
        sent = Line("communication", waited_s, "links", 0.0, 0.0, 2.0 * whole, 0.0)
        return (*lines, sent) if whole else lines

    return _Found(
        memory_bytes=footprint.step_bytes(program, stage),
        traffic_bytes=int(sum(work.num_bytes for work in (*works * local, *once))),
        gathered_bytes=whole,
        scattered_bytes=whole,
        lines_with=lines_with,
    )


def _muon(program: Program, matrices: list[ParamSpec]) -> list[Work]:
    """Newton-Schulz of the matrices that one device owns, three products a round: for [m, n], 4 m^2 n + 2 m^3 FLOPs."""
    optimizer = program.recipe.optimizer
    if not isinstance(optimizer, MuonAndAdam):
        return []
    flops = 0.0
    for spec in matrices:
        m, n = sorted(spec.shape[-2:])
        flops += math.prod(spec.shape[:-2]) * optimizer.muon_steps * (4 * m * m * n + 2 * m**3)
    unit: Unit = "bf16" if optimizer.muon_dtype == "bfloat16" else "f32"
    num_bytes = 3 * 4 * sum(spec.size for spec in matrices) / program.num_shards
    return [Work("Muon", flops / program.num_shards, unit, 0, num_bytes, 10 * optimizer.muon_steps)]


def _by_compiling(program: Program, stage: Stage, device: Device) -> _Found:
    """From the compiled step."""
    compiled = compiled_step(program, stage)
    found, module = anatomy.dissect(compiled), hlo.parse(compiled.as_text())

    def lines_with(attention: Attention) -> tuple[Line, ...]:
        return scaling.replayed(module, attention, device, program.num_devices, num_nodes=1).lines

    return _Found(
        memory_bytes=found.memory.peak_bytes,
        traffic_bytes=found.traffic_bytes,
        gathered_bytes=found.sent_bytes("all-gather"),
        scattered_bytes=found.sent_bytes("reduce-scatter"),
        lines_with=lines_with,
    )
