"""The program that eight H100 would run for record 21, compiled here without one: a change in it has to be meant."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import anatomy
import compiled_cost
import deviceless
import hlo
import jax
import pytest

from speedrun import recipes
from speedrun.base import accelerators
from speedrun.base.mesh import make_mesh
from speedrun.plan import estimate as planning
from speedrun.plan import traced
from speedrun.train.program import Program

RECORD = recipes.load("record21")
DEVICES = 8
LAYERS_WITH_ATTENTION = 11
TOKENS = 49_152  #: of a device and step
LOGITS = TOKENS * RECORD.config.padded_vocab_size

#: Bytes of the gathers that no kernel overlaps: the first layer's bank. Since JAX 0.11 XLA schedules the kernels that
#: need no parameter after it; JAX 0.10 runs those meanwhile. JAX 0.12 waits for the table of tokens as well, 0.07 ms
#: (docs/LOG.md, 2026-11-22 and 2026-11-23).
FIRST_BANK, TOKEN_TABLE = 2 * 8 * 768 * 768, 2 * 50_264 * 768
WAITS_FOR = [[]] if jax.__version_info__ < (0, 11) else [[FIRST_BANK], [FIRST_BANK, TOKEN_TABLE]]

#: What FSDP cannot do without: every parameter but the scalars, once, in the compute dtype.
LEAST_BYTES = 2 * sum(spec.size for spec in RECORD.table(RECORD.config).values() if spec.group != "scalar")


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> Iterator[None]:
    """Seconds for each of these texts, which plan and anatomy both read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hlo, "parse", cache(hlo.parse))
        yield


@pytest.fixture(scope="module")
def program(h100) -> Program:
    return Program(RECORD, h100(DEVICES))


@pytest.fixture(scope="module")
def compiled(program) -> Any:
    return deviceless.compiled_step(program, 0)


@pytest.fixture(scope="module")
def step(compiled) -> anatomy.Anatomy:
    return anatomy.dissect(compiled)


@pytest.fixture(scope="module")
def evaluation(program) -> anatomy.Anatomy:
    return anatomy.dissect(anatomy.compiled_evaluation(program))


def names(program: anatomy.Anatomy) -> str:
    return "\n".join(map(str, program.collectives))


def check_traffic(
    found: anatomy.Anatomy, program: Program, least_bytes: int, most_summed_bytes: int
) -> Counter[str]:
    """Every parameter is gathered and scattered once, in 16 bits, and the state is donated; how often what is sent.

    Of a table that is read, ids, rows and their gradients are exchanged instead.
    """
    arrays, read = len(program.layout.banks) + len(program.layout.tables), len(program.layout.reads)
    kinds = Counter(one.kind for one in found.collectives)
    assert (kinds["all-gather"], kinds["reduce-scatter"]) == (arrays - read, arrays - read), names(found)
    assert kinds["all-to-all"] == 3 * read, names(found)
    assert {*+kinds} == {"all-gather", "reduce-scatter", "all-reduce"} | ({"all-to-all"} if read else set())
    for kind in ("all-gather", "reduce-scatter"):
        assert least_bytes <= found.sent_bytes(kind) <= 1.02 * least_bytes, names(found)
    in_16 = {one.dtype for one in found.collectives if one.kind != "all-reduce"} - (
        {"s32"} if read else set()
    )
    assert in_16 == {"bf16"}, names(found)
    assert found.sent_bytes("all-reduce") < most_summed_bytes, names(found)
    state = jax.tree.leaves(program.state)
    whole = sum(math.prod(x.shape) * x.dtype.itemsize for x in state)
    assert found.memory.alias_size_in_bytes == pytest.approx(whole / DEVICES, rel=0.01)
    return kinds


def flops(compiled: Any) -> dict[str, float]:
    found = {"f8e4m3fn": 0.0, "f8e5m2": 0.0, "bf16": 0.0, "f32": 0.0}
    for step in hlo.parse(compiled.as_text()):
        if "muon" not in step.instruction.source:
            for product in compiled_cost.products(step):
                found[product.dtype] += step.times * product.flops
    return found


def test_a_step_moves_every_parameter_once_and_waits_only_at_the_start(step, program):
    assert check_traffic(step, program, LEAST_BYTES, 1024)["all-reduce"] == 1, names(step)
    waiting = [one for one in step.collectives if one.is_synchronous]
    assert {one.kind for one in waiting} <= {"all-gather"}, waiting
    assert [one.num_bytes for one in waiting] in WAITS_FOR, waiting


def test_a_step_fits_as_the_plan_knew_and_moves_no_more_than_it_did(step, evaluation, program):
    """Evaluation fits beside the state: 262,144 tokens a device, whose logits exist a chunk at a time, in 16 bits."""
    assert step.memory.peak_memory_in_bytes == pytest.approx(22.9e9, rel=0.03)
    planned_bytes = planning.validation_bytes(Program(RECORD, make_mesh(DEVICES)), accelerators.load("h100"))
    assert planned_bytes == pytest.approx(evaluation.memory.peak_memory_in_bytes, rel=0.1)
    assert step.traffic_bytes == pytest.approx(125.6e9, rel=0.01)
    assert step.unknown_loops == 0
    assert evaluation.memory.peak_memory_in_bytes < 40e9
    assert {one.kind for one in evaluation.collectives} == {"all-gather"}, names(evaluation)
    assert evaluation.sent_bytes("all-gather") <= 1.02 * LEAST_BYTES, names(evaluation)
    assert "__cublas$lt$matmul$f8" not in evaluation.custom_calls


def test_norms_are_single_kernels_and_no_gradient_of_a_table_is_scattered(compiled):
    """Norms before attention and MLPs, of the embedding and of the last state: all of XLA's Triton fusions."""
    text = compiled.as_text()
    num_norms = LAYERS_WITH_ATTENTION + RECORD.config.num_layers + 2
    assert text.count('"kind":"__triton"') == 2 * num_norms, "with their gradients"
    assert not re.findall(rf"= bf16\[[^ ]*{TOKENS},{RECORD.config.model_dim}\]\S* copy\(", text)
    scatters = re.findall(r" scatter\((.*)", text)
    assert all("loss_head" in rest for rest in scatters)


def test_every_product_of_the_mathematics_is_counted(compiled, program):
    """Six for each weight and token; fused GEMMs, too. Attention is counted apart."""
    table, found = program.layout.table.values(), flops(compiled)
    of = {group: sum(spec.size for spec in table if spec.group == group) for group in ("matrix", "head")}
    assert found["f8e4m3fn"] + found["f8e5m2"] == 6 * of["head"] * TOKENS
    assert found["bf16"] == pytest.approx(6 * of["matrix"] * TOKENS, rel=0.01)


@pytest.mark.compile
def test_the_plan_counts_what_is_compiled(compiled, program):
    """And it is not far below what eight H100 are published to take for the same mathematics in PyTorch: 101.6 ms."""
    lines, time, memory = anatomy.prices(compiled, program, 0)
    assert time == pytest.approx(1, abs=0.06)
    assert memory == pytest.approx(1, abs=0.1)
    assert 0.65 * 0.1016 < sum(line.seconds for line in lines) < 0.1016
    kinds = {line.kind: line for line in lines}
    bounds = dict.fromkeys(("GEMM bf16", "GEMM FP8", "Mosaic bf16"), "tensor cores")
    in_memory = ("attention", "head passes", "elementwise")  # attention, while its window is short
    bounds |= dict.fromkeys(in_memory, "memory")
    assert {kind: line.bound for kind, line in kinds.items()} == bounds
    assert kinds["head passes"].instructions == pytest.approx(2 * traced.HEAD_SLOTS * LOGITS, rel=0.05)


@pytest.mark.compile
@pytest.mark.parametrize(("devices", "peak_bytes"), [(1, 26.0e9), (2, 24.9e9), (4, 24.4e9)])
def test_fewer_devices_run_the_same_program_in_parts(h100, devices, peak_bytes):
    program = Program(RECORD, h100(devices))
    compiled = deviceless.compiled_step(program, 0)
    found = anatomy.dissect(compiled)
    assert found.memory.peak_memory_in_bytes == pytest.approx(peak_bytes, rel=0.03)
    assert anatomy.prices(compiled, program, 0).memory == pytest.approx(1, abs=0.1)
    assert found.custom_calls["__cublas$lt$matmul$f8"] == 3 * program.microbatches // devices
    sent = {kind: found.sent_bytes(kind) for kind in ("all-gather", "reduce-scatter", "all-to-all")}
    assert sent["all-to-all"] == 0
    if devices == 1:
        assert not found.collectives, names(found)
    else:  # gradients of several micro-batches are summed in float32, and travel in it
        assert LEAST_BYTES <= sent["all-gather"] <= 1.02 * LEAST_BYTES, names(found)
        assert 2 * LEAST_BYTES <= sent["reduce-scatter"] <= 1.02 * 2 * LEAST_BYTES, names(found)


@pytest.mark.compile
def test_two_nodes_run_the_same_program_and_exchange_an_eighth_of_each_gradient(h100, step):
    """In the dtype of the gradients: of what a device owns, and of nothing else but scalars."""
    twice = RECORD.override({"stages.0.num_sequences": "16", "eval_sequences": "16"})
    program = Program(twice, h100(DEVICES, 2), 2 * DEVICES)
    found = anatomy.dissect(deviceless.compiled_step(program, 0))
    inside = tuple(tuple(range(node, node + DEVICES)) for node in (0, DEVICES))
    between = tuple((i, i + DEVICES) for i in range(DEVICES))
    for kind in ("all-gather", "reduce-scatter"):
        assert {one.groups for one in found.collectives if one.kind == kind} == {inside}, names(found)
        assert found.sent_bytes(kind) == step.sent_bytes(kind)
    sums = [one for one in found.collectives if one.kind == "all-reduce"]
    exchanged = [one for one in sums if one.groups == between]
    assert {one.dtype for one in exchanged} == {"bf16"}
    assert sum(one.num_bytes for one in exchanged) * DEVICES == step.sent_bytes("reduce-scatter")
    assert sum(one.num_bytes for one in sums if one.groups != between) < 1024
    assert found.memory.peak_memory_in_bytes == pytest.approx(step.memory.peak_memory_in_bytes, rel=0.02)
    assert found.memory.alias_size_in_bytes == pytest.approx(step.memory.alias_size_in_bytes, rel=0.01)


def test_the_head_runs_in_8_bits_and_attention_in_its_kernels(step, compiled, program):
    """Three of them are attention's own; one normalises and turns keys. One more sums the gradient of a table."""
    # Some in fusions, which slice for them.
    of_mosaic = compiled.as_text().count('custom_call_target="mosaic_gpu')
    assert of_mosaic == 2 + 2 * RECORD.config.num_layers, "of the head, and of each MLP"
    assert step.custom_calls["__cublas$lt$matmul$f8"] == 3
    num_tables = 1 + len(RECORD.config.used_tables)
    assert step.custom_calls["__gpu$xla.gpu.triton"] == (3 + 1) * LAYERS_WITH_ATTENTION + num_tables
    assert {one.name for one in program.kernels.choices.values()} >= {"triton", "fp8", "mosaic"}
    arrays = [parsed(name) for name in step.arrays]
    assert not [sizes for _, sizes in arrays if sizes.count(TOKENS) > 1], "scores, of any type"
    wide = [sizes for kind, sizes in arrays if kind == "f32" and math.prod(sizes) >= LOGITS]
    assert not wide, "in float32, as large as the logits"


def parsed(array: str) -> tuple[str, list[int]]:
    """Of a type as XLA writes it, "bf16[49152,768]": that of the elements, and its size."""
    kind, _, sizes = array.rstrip("]").partition("[")
    return kind, [int(size) for size in sizes.split(",") if size]
