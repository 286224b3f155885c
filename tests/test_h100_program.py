"""The program that eight H100 would run for record 21, compiled here without one: a change in it has to be meant.

Golden values with tolerances. Counts of GEMMs and calls, bytes and collectives; never times. All GEMMs are those of
cuBLAS here (`deviceless.CUBLAS_GEMMS`); on a GPU, XLA tries others, too.
"""

import math
import re
from collections import Counter
from typing import Any

import jax
import pytest

from speedrun import anatomy, deviceless, recipes
from speedrun.anatomy import Anatomy
from speedrun.step import Program

RECORD = recipes.load("record21")
DEVICES = 8
LAYERS_WITH_ATTENTION = 11
TOKENS = 49_152  #: of a device and step
LOGITS = TOKENS * RECORD.config.head_size

#: What FSDP cannot do without: every parameter but the scalars, once, in the compute dtype.
LEAST_BYTES = 2 * sum(spec.size for spec in RECORD.table(RECORD.config).values() if spec.group != "scalar")


@pytest.fixture(scope="module")
def program(h100) -> Program:
    return Program(RECORD, h100(DEVICES))


@pytest.fixture(scope="module")
def compiled(program) -> Any:
    (stage,) = RECORD.stages
    return deviceless.compiled_step(program, stage)


@pytest.fixture(scope="module")
def step(compiled) -> Anatomy:
    return anatomy.dissect(compiled)


@pytest.fixture(scope="module")
def evaluation(program) -> Anatomy:
    return anatomy.dissect(deviceless.compiled_evaluation(program))


def names(program: Anatomy) -> str:
    return "\n".join(map(str, program.collectives))


def test_a_step_gathers_and_scatters_every_parameter_once(step, program):
    arrays = len(program.layout.banks) + len(program.layout.tables)
    kinds = Counter(one.kind for one in step.collectives)
    assert kinds == {"all-gather": arrays, "reduce-scatter": arrays, "all-reduce": 1}, names(step)
    for kind in ("all-gather", "reduce-scatter"):
        assert LEAST_BYTES <= step.sent_bytes(kind) <= 1.02 * LEAST_BYTES, names(step)
    assert {one.dtype for one in step.collectives if one.kind != "all-reduce"} == {"bf16"}, names(step)
    assert step.sent_bytes("all-reduce") < 1024, names(step)


def test_nothing_waits_for_a_collective(step):
    waiting = [str(one) for one in step.collectives if one.is_synchronous]
    assert not waiting, waiting


def test_the_whole_state_is_donated(step, program):
    state = deviceless.state_shape(program)
    whole = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert step.memory.donated_bytes == pytest.approx(whole / DEVICES, rel=0.01)


def test_a_step_fits_and_moves_no_more_than_it_did(step):
    assert step.memory.peak_bytes == pytest.approx(27.4e9, rel=0.03)
    assert step.traffic_bytes == pytest.approx(166e9, rel=0.03)
    assert step.unknown_loops == 0


def test_the_head_runs_in_8_bits_and_attention_in_its_kernels(step, program):
    assert step.custom_calls["__cublas$lt$matmul$f8"] == 3
    assert step.custom_calls["__gpu$xla.gpu.triton"] == 3 * LAYERS_WITH_ATTENTION
    assert {one.name for one in program.kernels.choices.values()} >= {"triton", "fp8"}


def test_no_scores_and_no_float32_logits_lie_in_memory(step):
    """No [T, T] of any type, and nothing in float32 as large as the logits."""
    arrays = {name: (name.partition("[")[0], dims(name)) for name in step.arrays}
    assert not [name for name, (_, sizes) in arrays.items() if sizes.count(TOKENS) > 1]
    assert not [
        name for name, (kind, sizes) in arrays.items() if kind == "f32" and math.prod(sizes) >= LOGITS
    ]


def dims(array: str) -> list[int]:
    """Of a type as XLA writes it: "bf16[49152,768]"."""
    return [int(size) for size in array.partition("[")[2].rstrip("]").split(",") if size]


def test_gradients_of_tables_are_summed_in_float32(compiled):
    sums = re.findall(r"= (\w+)\[[^ ]* scatter\(", compiled.as_text())
    assert sums
    assert set(sums) == {"f32"}


def test_evaluation_fits_beside_the_state(evaluation):
    """262,144 tokens a device: their logits exist a chunk at a time, and in 16 bits."""
    assert evaluation.memory.peak_bytes < 40e9
    assert not [one for one in evaluation.collectives if one.kind != "all-gather"], names(evaluation)
    assert evaluation.sent_bytes("all-gather") <= 1.02 * LEAST_BYTES, names(evaluation)
    assert "__cublas$lt$matmul$f8" not in evaluation.custom_calls
