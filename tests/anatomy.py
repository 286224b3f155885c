"""Count what a compiled program holds, moves and sends."""

from collections import Counter
from typing import Any

import jax
import msgspec

from speedrun.plan import hlo
from speedrun.plan.deviceless import CUBLAS_GEMMS, Collective, compile_for_target, ended, inputs_of
from speedrun.train.program import Program


def compiled_evaluation(program: Program) -> Any:
    """Compile a validation pass for the `target_mesh` of a program."""
    ids = inputs_of(program, program.recipe.eval_sequences, program.recipe.eval_seq_len)
    inputs = program.state.params, *ids, program.state.step
    eval_step = program.eval_step_for(program.static_at(program.recipe.num_steps))
    return compile_for_target(eval_step, *inputs, options=program.compiler_options | CUBLAS_GEMMS)


class Anatomy(msgspec.Struct, frozen=True):
    """One call of a compiled program on one device."""

    memory: Any  #: as XLA assigns it on one device, without scratch space that libraries allocate at run time
    collectives: tuple[Collective, ...]  #: in the order of the schedule
    custom_calls: dict[str, int]  #: number of runs, by target
    traffic: dict[str, int]  #: bytes to and from memory (`hlo.Executed.traffic_bytes`) by kind of kernel
    arrays: dict[str, int]  #: bytes of every array in memory, outside kernels, by its type: "bf16[49152,768]"
    unknown_loops: int  #: loops of unknown length, counted once

    @property
    def traffic_bytes(self) -> int:
        """Bytes to and from memory, summed over kernels."""
        return sum(self.traffic.values())

    def sent_bytes(self, kind: str) -> int:
        """Bytes of all collectives of a kind, summed over their runs."""
        return sum(one.num_bytes * one.times for one in self.collectives if one.kind == kind)


def dissect(compiled: jax.stages.Compiled) -> Anatomy:
    """Read a compiled program."""
    return read(compiled.as_text() or "", compiled.memory_analysis())


def read(text: str, memory: Any = None) -> Anatomy:
    """Read the text of a scheduled module, and how its memory is assigned; raise ValueError for any other text."""
    calls: Counter[str] = Counter()
    traffic: Counter[str] = Counter()
    arrays: dict[str, int] = {}
    collectives: list[Collective] = []
    unknown_loops = 0
    for step in hlo.parse(text):
        one = step.instruction
        if one.target and not one.opcode.endswith("-done"):
            calls[one.target] += step.times
        unknown_loops += one.opcode == "while" and not hlo.trip_count(one)
        if moved := step.times * step.traffic_bytes:
            traffic[one.target or one.kind] += moved
            arrays |= {str(array): array.num_bytes for array in one.results}
        collectives += [found for _, found in ended(step)]
    return Anatomy(memory, tuple(collectives), dict(calls), dict(traffic), arrays, unknown_loops)
