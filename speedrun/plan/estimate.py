"""Predict memory, floors and step time of a recipe, from its compiled program or by arithmetic.

A floor is a number of FLOPs or bytes at the vendor's rate. The step time is the cost model's (`cost`) for its kernels.
The interval is of the rates of kernels: what it assumes of the program is not in it.
"""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from speedrun.base import accelerators, mesh
from speedrun.base.accelerators import Device
from speedrun.plan import cost, hlo
from speedrun.plan.cost import Line, Work, gb, ms
from speedrun.plan.deviceless import compiled_step, sent_bytes, target_mesh
from speedrun.plan.schedule import replayed
from speedrun.plan.shares import GEMMS, REACHES, Unit, errors
from speedrun.science.params import ParamSpec, count
from speedrun.science.recipe import Recipe, Stage, settings
from speedrun.train import footprint
from speedrun.train.checkpoint import named
from speedrun.train.footprint import flops_per_token
from speedrun.train.program import Program, StepShape

#: What a plan is computed from.
Basis = Literal["arithmetic", "compiled program"]

#: What only a compiler decides, fitted to record 21 compiled for an A100, and for an H100 with Mosaic's MLP: traffic of
#: elementwise kernels relative to that of the products, and the number of such kernels per matrix.
_BETWEEN, _BETWEEN_WITH_MOSAIC, _BETWEEN_STARTS = 1.15, 0.75, 8
#: Arithmetic gives 0.73 of the time of the compiled gpt2, 0.91 of record 89, and 0.98 to 1.01 of capped rungs.
_ARITHMETIC_ERROR = 0.38
#: Issue slots of a logit in XLA's two passes over the logits.
_XLA_HEAD_SLOTS = 38 + 53


class StagePlan(msgspec.Struct, frozen=True):
    """One stage on one device. Bytes, seconds and kernels are per step."""

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
    lines: tuple[Line, ...]  #: `step_s` by kind of kernel
    error: float  #: of `step_s`, relative, if all kinds of kernels are wrong in the same direction


class Plan(msgspec.Struct, frozen=True):
    """The prediction for a recipe on devices of one kind."""

    recipe: str
    device: str
    num_devices: int
    microbatches: int
    memory: Literal["ample", "scarce"]  #: scarce: activations are recomputed
    basis: Basis
    num_params: int
    flops_per_token: float
    state_bytes: int  #: parameters and optimiser, on one device
    memory_limit_bytes: int
    validation_bytes: int  #: memory of one device while it scores a sequence; arithmetic
    stages: tuple[StagePlan, ...]

    @property
    def memory_bytes(self) -> int:
        """Peak memory of training and validation, on one device."""
        return max(self.validation_bytes, *(stage.memory_bytes for stage in self.stages))

    @property
    def fits(self) -> bool:
        """Whether the peak is below the memory of a device."""
        return self.memory_bytes < self.memory_limit_bytes

    @property
    def total_s(self) -> float:
        """Predicted time of all steps."""
        return sum(stage.num_steps * stage.step_s for stage in self.stages)

    @property
    def error(self) -> float:
        """Relative error of `total_s`."""
        return sum(one.num_steps * one.step_s * one.error for one in self.stages) / self.total_s

    @property
    def device_hours(self) -> float:
        """Predicted time of all steps, summed over devices."""
        return self.total_s * self.num_devices / 3600

    def facts(self, dollars: float | None) -> dict[str, Any]:
        """Return all fields and derived figures, for JSON; `dollars` is the price of a device for an hour."""
        names = ("fits", "memory_bytes", "total_s", "device_hours")
        derived: dict[str, object] = {name: getattr(self, name) for name in names}
        derived["relative_error"] = self.error
        derived["dollars"] = None if dollars is None else self.device_hours * dollars
        return msgspec.structs.asdict(self) | derived

    def lines(self, dollars: float | None) -> list[str]:
        """Return the plan as text; `dollars` is the price of a device for an hour."""
        cost = "" if dollars is None else f" | ${self.device_hours * dollars:,.2f}"
        recomputed = " | memory is scarce: activations are recomputed" if self.memory == "scarce" else ""
        return [
            f"plan   {self.recipe} on {self.num_devices} x {self.device} | {self.microbatches} microbatches | "
            f"by {'the compiled program' if self.basis == 'compiled program' else 'arithmetic'}{recomputed}",
            f"size   {self.num_params:,} parameters | {self.flops_per_token / 1e6:,.1f} MFLOP per token | "
            f"state {gb(self.state_bytes)} per device",
            *(line for stage in self.stages for line in _stage_lines(stage, self.memory_limit_bytes)),
            f"val    memory about {gb(self.validation_bytes)}",
            f"total  {self.total_s:,.1f} s +-{self.error:.0%} | {self.device_hours:.3f} device-hours{cost}",
        ]


def plan(
    recipe: Recipe,
    kind: str,
    num_devices: int,
    microbatches: int,
    basis: Basis = "arithmetic",
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Predict what a recipe needs on 1, 2, 4 or 8 devices of one kind in one machine.

    `microbatches` are those of a step, over all devices; `basis` is the source of memory, traffic and communication;
    `say` hears which program compiles.

    Raises:
        UsageError: an unknown kind; a batch that does not divide; a compiler that is not installed.
    """
    device = accelerators.load(kind)
    mesh.prepare("cpu")
    by_arithmetic = basis == "arithmetic"
    devices = mesh.make_mesh(num_devices) if by_arithmetic else target_mesh(kind, num_devices)
    program = footprint.fitted(Program(recipe, devices, microbatches), device.memory_bytes)
    work_of = _by_arithmetic if by_arithmetic else partial(_by_compiling, say, {})
    return Plan(
        recipe=recipe.name,
        device=device.name,
        num_devices=num_devices,
        microbatches=microbatches,
        memory=program.memory,
        basis=basis,
        num_params=count(program.layout.table),
        flops_per_token=flops_per_token(program.layout.table),
        state_bytes=footprint.state_bytes(program),
        memory_limit_bytes=device.memory_bytes,
        validation_bytes=footprint.validation_bytes(program),
        stages=tuple(
            _stage(program, stage, device, work_of(program, stage, device)) for stage in recipe.stages
        ),
    )


def refusal(recipe: Recipe, plan: Plan) -> str | None:
    """Return what a plan needs, what its device has and what to do; None if it fits."""
    if plan.fits:
        return None
    return (
        f"{recipe.name} does not fit: needs {gb(plan.memory_bytes)}, {plan.device} has "
        f"{gb(plan.memory_limit_bytes)}; {footprint.TO_FIT}"
    )


def _stage_lines(stage: StagePlan, memory_limit_bytes: int) -> list[str]:
    sent = f"gathers {gb(stage.gathered_bytes)}, scatters {gb(stage.scattered_bytes)}"
    return [
        f"stage  {stage.num_steps:,} steps x {stage.batch_tokens:,} tokens | "
        f"memory {gb(stage.memory_bytes)} of {gb(memory_limit_bytes)}",
        f"floor  compute {ms(stage.compute_floor_s)} | traffic {ms(stage.traffic_floor_s)} "
        f"({gb(stage.traffic_bytes)}) | communication {ms(stage.communication_floor_s)} ({sent})",
        f"step   {ms(stage.step_s)} +-{stage.error:.0%} | MFU {stage.mfu:.0%}",
        f"       {'one device':<13} {'ms':>7}  {'bound':<12} {'TFLOP':>7} {'Ginstr':>7} {'GB':>7} {'kernels':>7} error",
        *(
            f"       {line.kind:<13} {line.seconds * 1e3:>7.2f}  {line.bound:<12} {line.flops / 1e12:>7.2f} "
            f"{line.instructions / 1e9:>7.1f} {line.num_bytes / 1e9:>7.2f} {line.starts:>7,.0f} "
            f"{line.error:>5.0%}"
            for line in stage.lines
        ),
    ]


def _stage(program: Program, stage: Stage, device: Device, found: "_Found") -> StagePlan:
    sent_bytes = (found.gathered_bytes + found.scattered_bytes) * (1 - 1 / program.num_shards)
    step_s = sum(line.seconds for line in found.lines)
    weight_flops = flops_per_token(program.layout.table) * stage.batch_tokens / program.num_devices
    return StagePlan(
        *(stage.num_steps, stage.batch_tokens),
        *found[:4],  # bytes
        compute_floor_s=sum(cost.floor_s(line, device) for line in found.lines),
        traffic_floor_s=found.traffic_bytes / device.memory_rate,
        communication_floor_s=sent_bytes / device.link_rate,
        mfu=weight_flops / device.bf16_flops / step_s,
        step_s=step_s,
        lines=found.lines,
        error=sum(line.error * line.seconds for line in found.lines) / step_s + found.error,
    )


class _Found(NamedTuple):
    """One step of one device."""

    memory_bytes: int
    traffic_bytes: int
    gathered_bytes: int
    scattered_bytes: int
    lines: tuple[Line, ...]  #: its time by kind
    error: float  #: of the work itself, relative


def _by_arithmetic(program: Program, stage: Stage, device: Device) -> _Found:
    """Estimate a step from the table of parameters; memory is `footprint`'s.

    A product [m, n] reads or writes m + n numbers per token, three times with its gradients. Logits pass through memory
    six times, three of them in products. Communication is taken to hide behind all computation.
    """
    table, size = program.layout.table.values(), footprint.itemsize(program)
    local = program.microbatches // program.num_devices
    tokens = stage.batch_tokens // program.microbatches
    matrices = [spec for spec in table if spec.packed == "bank"]
    weights, width = sum(spec.size for spec in matrices), footprint.matrix_width(program)
    heads = [spec for spec in table if spec.group == "head"]
    logits = tokens * sum(spec.shape[0] for spec in heads)
    num_matrices = sum(math.prod(spec.shape[:-2]) for spec in matrices)
    unit: Unit = "bf16" if size == 2 else "f32"
    head_unit: Unit = unit if getattr(program.recipe.config, "head_fp8", None) is None else "fp8"
    in_mosaic = cost.mosaic_calls(program, stage, device)
    head_slots = 2 * cost.HEAD_SLOTS if "head" in in_mosaic else _XLA_HEAD_SLOTS
    between = _BETWEEN_WITH_MOSAIC if "mlp" in in_mosaic else _BETWEEN
    moved = size * tokens * width
    flops, head_flops = 6 * tokens * weights, 6 * tokens * sum(spec.size for spec in heads)
    works = [
        Work(GEMMS[unit], flops, unit, 0, 3 * moved + 3 * size * weights, 3 * num_matrices),
        Work(GEMMS[head_unit], head_flops, head_unit, 0, 3 * size * logits, 3),
        Work("head passes", 0, unit, head_slots * logits, 3 * size * logits, 9),
        Work("elementwise", num_bytes=between * 3 * moved, starts=_BETWEEN_STARTS * num_matrices),
    ]
    once = [Work("elementwise", num_bytes=3 * _moved_state_bytes(program)), *_muon(program, matrices)]
    whole = footprint.whole_bytes(program) if program.num_devices > 1 else 0
    sent_s = 2 * whole * (1 - 1 / program.num_shards) / (REACHES["links"] * device.link_rate)

    calls = local * cost.num_attention_layers(program, stage)
    states = calls * size * tokens * program.recipe.config.model_dim

    # One kernel forward and two backward, one by queries and one by keys, on five and seven arrays each.
    ways = zip(cost.mean_attention(program, stage).tolist(), (1, 2), (5, 14), strict=True)
    kernels = [
        Work("attention", flops, "attention", num_bytes=arrays * states, starts=starts * calls)
        for flops, starts, arrays in ways
    ]
    lines = cost.table([*works * local, *once, *kernels], device)
    if whole:
        waited_s = max(0.0, sent_s - sum(line.seconds for line in lines))
        error = errors(device)["communication"]
        lines += (Line("communication", waited_s, "links", 0.0, 0.0, 2.0 * whole, 0.0, error),)

    return _Found(
        memory_bytes=footprint.step_bytes(program, stage),
        traffic_bytes=int(sum(work.num_bytes for work in (*works * local, *once))),
        gathered_bytes=whole,
        scattered_bytes=whole,
        lines=lines,
        error=_ARITHMETIC_ERROR,
    )


def _moved_state_bytes(program: Program) -> int:
    """Return `footprint.state_bytes` without tables of which the optimiser moves the rows that wait for it."""
    state = named(program.state)
    few = {name.rpartition(".")[2] for name in state if ".waits." in name}
    held = [x for name, x in state.items() if name.rpartition(".")[2] in few]
    sizes = [x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in held]
    return footprint.state_bytes(program) - sum(sizes)


def _muon(program: Program, matrices: list[ParamSpec]) -> list[Work]:
    """Newton-Schulz on stacks of the matrices of one device, once a step: 4 m^2 n + 2 m^3 FLOPs an iteration."""
    known = {key.rpartition(".")[2]: value for key, value in settings(program.recipe.optimizer).items()}
    if "muon_steps" not in known:
        return []
    steps, flops = known["muon_steps"], 0.0
    for spec in matrices:
        m, n = sorted(spec.shape[-2:])
        flops += math.prod(spec.shape[:-2]) * steps * (4 * m * m * n + 2 * m**3)
    unit: Unit = "stacks" if known["muon_dtype"] == "bfloat16" else "f32"
    num_bytes = 3 * 4 * sum(spec.size for spec in matrices) / program.num_shards
    return [Work("Muon", flops / program.num_shards, unit, 0, num_bytes, 10 * steps)]


def _by_compiling(
    say: Callable[[str], None],
    done: dict[StepShape, tuple[Any, list[hlo.Executed]]],
    program: Program,
    stage: Stage,
    device: Device,
) -> _Found:
    """Read a step from its compiled programs, as many as the stage has: the mean over its steps.

    `done` has the programs of earlier stages: how XLA assigns their memory, and their schedules.
    """
    steps, shape_at = cost.steps_of(program, stage), program.shape_at
    total = len({*map(shape_at, range(program.recipe.num_steps))})
    for step in steps:
        if (shape := shape_at(step)) not in done:
            if total > 1:
                say(f"plan: compiles program {len(done) + 1} of {total}, of step {step}")
            one = compiled_step(program, step)
            done[shape] = one.memory_analysis(), hlo.parse(one.as_text())
    counts = Counter(map(shape_at, steps))
    memories, schedules = zip(*(done[shape] for shape in counts), strict=True)
    shares = [number / len(steps) for number in counts.values()]
    traffics = [sum(kernel.times * kernel.traffic_bytes for kernel in one) for one in schedules]
    attention = cost.mean_attention(program, stage)
    each = (replayed(one, attention, device, program.num_devices) for one in schedules)
    return _Found(
        memory_bytes=max(one.peak_memory_in_bytes for one in memories),
        traffic_bytes=int(np.dot(shares, traffics)),
        gathered_bytes=sent_bytes(schedules[0], "all-gather"),
        scattered_bytes=sent_bytes(schedules[0], "reduce-scatter"),
        lines=cost.mean(list(zip(shares, each, strict=True))),
        error=0.0,
    )
