"""Predict memory, floors and step time of a recipe from its traced step.

A floor is a number of FLOPs or bytes at the vendor's rate. The step time is the cost model's (`cost`) for the kernels
that `fusion` counts. The interval is of the rates of kernels, and of their number and bytes.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import msgspec

from speedrun.base import accelerators, mesh
from speedrun.base.accelerators import Device
from speedrun.plan import cost, fusion
from speedrun.plan.cost import Collective, Line, Work, gb, ms
from speedrun.plan.traced import for_device, step_jaxpr
from speedrun.science.params import count
from speedrun.science.recipe import Recipe, Stage
from speedrun.train import memory
from speedrun.train.memory import flops_per_token
from speedrun.train.program import Program, StepShape

#: The share of its memory that `scripts/run_track.sh` lets JAX take; by itself, JAX takes three quarters.
_FOR_JAX = 0.9
#: Most steps that stand for those of one program.
_SAMPLES = 4
#: Of the time of a traced step, against the compiled ones of the ladder and of records 89 and 92 (docs/plan.md).
_TRACING_ERROR = 0.06


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
    remat: Literal["off", "on"]  #: on: activations are recomputed
    num_params: int
    num_programs: int | None  #: of steps and validations, some equal; None if no track says when to validate
    flops_per_token: float
    state_bytes: int  #: parameters and optimiser, on one device
    memory_limit_bytes: int
    validation_bytes: int  #: memory of one device while it scores a sequence; arithmetic
    stages: tuple[StagePlan, ...]
    memory_bytes: int  #: peak of training and validation, on one device
    total_s: float  #: predicted time of all steps
    relative_error: float  #: of `total_s`
    fits: bool  #: whether the peak is below nine tenths of the memory of a device
    error: str | None  #: if it does not fit: what it needs, what JAX gets and what to do

    def lines(self) -> list[str]:
        """Return the plan as text."""
        recomputed = " | remat: activations are recomputed" if self.remat == "on" else ""
        return [
            f"plan   {self.recipe} on {self.num_devices} x {self.device} | {self.microbatches} microbatches | "
            f"by its trace{recomputed}",
            f"size   {self.num_params:,} parameters | {self.flops_per_token / 1e6:,.1f} MFLOP per token | "
            f"state {gb(self.state_bytes)} per device",
            *(line for stage in self.stages for line in _stage_lines(stage, self.memory_limit_bytes)),
            f"val    memory about {gb(self.validation_bytes)}",
            f"total  {self.total_s:,.1f} s +-{self.relative_error:.0%} on the clock",
        ]


def plan(
    recipe: Recipe,
    kind: str,
    num_devices: int,
    microbatches: int,
    say: Callable[[str], None] = lambda _: None,
    *,
    attention: str = "auto",
    replicas: int = 1,
    validates_at: Callable[[int], bool] | None = None,
) -> Plan:
    """Predict what a recipe needs on 1, 2, 4 or 8 devices of one kind in one machine.

    `microbatches` are of a step, over all devices; `say` hears what is traced; `validates_at` is the track's.

    Raises:
        UsageError: an unknown kind; a batch that does not divide.
    """
    device = accelerators.load(kind)
    device = device._replace(memory_bytes=int(_FOR_JAX * device.memory_bytes))
    mesh.prepare("cpu")
    program = Program(recipe, mesh.make_mesh(num_devices, replicas), microbatches, attention)
    sampled = [_sampled(program, stage) for stage in range(len(recipe.stages))]

    def traced() -> dict[int, _Counted]:
        counted: dict[int, _Counted] = {}
        for step in (steps := [step for each in sampled for step in each]):
            if len(steps) > 1:
                say(f"plan: traces step {step}, {len(counted) + 1} of {len(steps)}")
            jaxpr = step_jaxpr(program, step, device)
            counted[step] = _Counted(*fusion.count(jaxpr), memory.needed_bytes(program, jaxpr))
        return counted

    counted, scored_bytes = traced(), validation_bytes(program, device)
    if max(scored_bytes, *(one.memory_bytes for one in counted.values())) > device.memory_bytes:
        program = replace(program, remat="on")
        counted = traced()
    stages = tuple(
        _stage(program, stage, device, [(share, counted[step]) for step, share in shares.items()])
        for stage, shares in zip(recipe.stages, sampled, strict=True)
    )
    return Plan(
        recipe=recipe.name,
        device=device.name,
        num_devices=num_devices,
        microbatches=microbatches,
        remat=program.remat,
        num_params=count(program.layout.table),
        num_programs=sum(map(len, program.shapes(validates_at))) if validates_at else None,
        flops_per_token=flops_per_token(program.layout.table),
        state_bytes=memory.state_bytes(program),
        memory_limit_bytes=device.memory_bytes,
        validation_bytes=scored_bytes,
        stages=stages,
        **_whole(recipe, stages, device, scored_bytes),
    )


def _whole(recipe: Recipe, stages: tuple[StagePlan, ...], device: Device, scored: int) -> dict[str, Any]:
    """Return the fields of a plan that follow from all its stages, and from the bytes `scored` needs."""
    needs, has = max(scored, *(stage.memory_bytes for stage in stages)), device.memory_bytes
    total_s = sum(stage.num_steps * stage.step_s for stage in stages)
    error = sum(one.num_steps * one.step_s * one.error for one in stages) / total_s
    said = f"{recipe.name} needs {gb(needs)}, {device.name} gives JAX {gb(has)}; {memory.TO_FIT}"
    same = {"memory_bytes": needs, "total_s": total_s, "relative_error": error, "fits": needs < has}
    return {**same, "error": None if needs < has else said}


def validation_bytes(program: Program, device: Device) -> int:
    """Return the memory of the last validation on a device that need not be here."""
    own = for_device(program, device)
    score = own.traced_score(own.eval_shape_at(own.recipe.num_steps))
    return memory.needed_bytes(own, score.jaxpr.jaxpr)


def _sampled(program: Program, stage: int) -> dict[int, float]:
    """Return steps that stand for a stage, with their shares of it.

    Steps of one program may differ in integers, such as windows that grow. Of many, the middles of equal parts stand
    for all.
    """
    steps, shares = program.recipe.steps_of(stage), dict[int, float]()
    of_program: dict[StepShape, list[int]] = {}
    for step in steps:
        of_program.setdefault(program.shape_at(step), []).append(step)
    for same in of_program.values():
        kinds = Counter(program.step.plan.static_at(step, integers=True) for step in same)
        if len(kinds) <= _SAMPLES:
            firsts = {program.step.plan.static_at(step, integers=True): step for step in reversed(same)}
            shares |= {firsts[kind]: number / len(steps) for kind, number in kinds.items()}
        else:
            parts = [
                same[len(same) * i // _SAMPLES : len(same) * (i + 1) // _SAMPLES] for i in range(_SAMPLES)
            ]
            shares |= {part[len(part) // 2]: len(part) / len(steps) for part in parts}
    return shares


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


class _Counted(NamedTuple):
    """One program on one device."""

    works: list[Work]
    sent: list[Collective]
    memory_bytes: int


def _stage(
    program: Program, stage: Stage, device: Device, counted: list[tuple[float, _Counted]]
) -> StagePlan:
    """Return the mean over the steps that stand for a stage, by their shares."""
    number, sent = program.num_devices, counted[0][1].sent
    lines = cost.mean([(share, _lines(one, number, device)) for share, one in counted])
    gathered, scattered = (cost.sent_bytes(sent, kind) for kind in ("all-gather", "reduce-scatter"))
    step_s = sum(line.seconds for line in lines)
    traffic = sum(line.num_bytes for line in lines if line.bound != "links")
    weight_flops = flops_per_token(program.layout.table) * stage.batch_tokens / number
    return StagePlan(
        num_steps=stage.num_steps,
        batch_tokens=stage.batch_tokens,
        memory_bytes=max(one.memory_bytes for _, one in counted),
        traffic_bytes=int(traffic),
        gathered_bytes=gathered,
        scattered_bytes=scattered,
        compute_floor_s=sum(cost.floor_s(line, device) for line in lines),
        traffic_floor_s=traffic / device.memory_rate,
        communication_floor_s=(gathered + scattered) * (1 - 1 / program.num_shards) / device.link_rate,
        mfu=weight_flops / device.bf16_flops / step_s,
        step_s=step_s,
        lines=lines,
        error=sum(line.error * line.seconds for line in lines) / step_s + _TRACING_ERROR,
    )


def _lines(found: _Counted, num_devices: int, device: Device) -> tuple[Line, ...]:
    """Return the kernels of a step by kind, and how long it waits for links.

    The first collective and the last have nothing to hide behind, the others all computation.
    """
    lines = cost.table(found.works, device)
    if num_devices == 1:
        return lines
    each_s = [one.times * cost.transfer_s(one, num_devices, device) for one in found.sent]
    hidden_s = sum(line.seconds for line in lines)
    waits_s = max(sum(each_s) - hidden_s, each_s[0] + each_s[-1])
    return (*lines, cost.waiting(waits_s, found.sent, num_devices, device))
