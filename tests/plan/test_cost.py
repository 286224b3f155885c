"""The model of cost: bounds by hand, and what attention visits against the mask itself."""

import hashlib
import json
from collections import defaultdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from speedrun import recipes
from speedrun.base import accelerators, mesh
from speedrun.data.synthetic import MEAN, MEDIAN, document_lengths
from speedrun.plan import cost, efficiencies, estimate, fusion, traced
from speedrun.plan.cost import Work
from speedrun.plan.efficiencies import REACHES
from speedrun.science.kernels import attention_triton
from speedrun.science.kernels.attention import first_key, visible
from speedrun.train.program import Program

H100 = accelerators.load("h100")


def test_rates_are_frozen():
    """They were fitted once. A faster plan needs less work, not better rates; docs/LOG.md says how."""
    rates = json.dumps(
        [efficiencies.REACHES, efficiencies.ERRORS, efficiencies.START_S], sort_keys=True
    ).encode()
    assert hashlib.sha256(rates).hexdigest()[:16] == "10eba980d4685be8"


@pytest.mark.parametrize(
    ("work", "bound", "seconds"),
    [
        (Work("GEMM bf16", REACHES["bf16"] * 989.4e12), "tensor cores", 1.0),
        (Work("GEMM FP8", REACHES["fp8"] * 1978.9e12), "tensor cores", 1.0),
        (Work("GEMM f32", REACHES["f32"] / 2 * 989.4e12), "tensor cores", 1.0),
        (Work("head passes", instructions=REACHES["instructions"] * 132 * 128 * 1.98e9), "instructions", 1.0),
        (Work("elementwise", num_bytes=REACHES["memory"] * 3.352e12), "memory", 1.0),
        (Work("GEMM bf16", 1e6, num_bytes=2 * REACHES["memory"] * 3.352e12), "memory", 2.0),
        (Work("elementwise", num_bytes=4, starts=1000), "starts", 1000 * efficiencies.START_S),
    ],
)
def test_a_kernel_takes_the_time_of_its_tightest_bound(work, bound, seconds):
    took_s, why = cost.seconds(work, H100)
    assert why == bound
    assert took_s == pytest.approx(seconds, abs=3e-6)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_can_be_traced_at_its_own_size_and_dtype(name):
    """The tests of a rung have float32 and small sizes; JAX's erf refuses 16 bits."""
    recipe = recipes.load(name)
    program = Program(recipe, mesh.make_mesh(8))
    works, _ = fusion.count(traced.step_jaxpr(program, 0, H100))
    least = 6 * sum(spec.size for spec in program.layout.table.values() if spec.packed == "bank")
    assert sum(work.flops for work in works) > least * recipe.stages[0].batch_tokens / 8


@pytest.mark.parametrize(
    ("recipe", "device", "kinds"),
    [
        ("record21", "h100", {"Mosaic bf16", "head passes", "GEMM FP8"}),
        ("record21", "a100", {"GEMM FP8"}),
        ("shortcuts", "h100", {"head passes"}),
        ("modern", "h100", set()),
    ],
)
def test_a_plan_knows_which_operations_get_kernels(recipe, device, kinds):
    """An A100 has none of ours, a head without a cap neither, and the MLPs of the ladder are their definition."""
    program = Program(recipes.load(recipe), mesh.make_mesh(8))
    works, _ = fusion.count(traced.step_jaxpr(program, 0, accelerators.load(device)))
    assert {work.kind for work in works} - {"GEMM bf16", "GEMM f32", "attention", "elementwise"} == kinds


def test_products_are_counted_once_for_each_weight_and_token_and_by_the_optimiser():
    """Six FLOPs forward and backward; five steps of Muon take 4 m m n + 2 m m m for each matrix of an eighth."""
    program = Program(record := recipes.load("record21"), mesh.make_mesh(8))
    works, sent = fusion.count(traced.step_jaxpr(program, 0, H100))
    flops = defaultdict[str, float](float)
    for work in works:
        flops[work.kind] += work.flops
    table, tokens = record.table(record.config), 49_152
    of = {group: [spec for spec in table.values() if spec.group == group] for group in ("matrix", "head")}
    assert flops["GEMM FP8"] == 6 * of["head"][0].size * tokens
    sides = [sorted((member.rows, member.cols)) for bank in program.layout.banks.values() for member in bank]
    padded = [
        sorted((bank[0].rows, bank[0].cols)) for bank in program.layout.banks.values() for _ in range(8)
    ]
    assert len(padded) >= len(sides)
    muon = 5 * sum(4 * m * m * n + 2 * m**3 for m, n in padded) / 8
    products = 6 * sum(spec.size for spec in of["matrix"]) * tokens
    assert flops["GEMM bf16"] + flops["Mosaic bf16"] == pytest.approx(products + muon, rel=1e-3)
    whole = 2 * sum(spec.size for spec in table.values() if spec.group != "scalar")
    assert whole <= cost.sent_bytes(sent, "all-gather") <= 1.02 * whole


def counted(function, *shapes: tuple[int, ...]) -> list[Work]:
    works, _ = fusion.count(
        jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(x, np.float32) for x in shapes)).jaxpr
    )
    return works


@pytest.mark.parametrize(
    ("function", "arrays"),
    [
        (lambda x, y: jnp.tanh(x * y) + 1, [3]),  # two read, one written
        (lambda x, y: x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True)), [2]),  # a norm is one pass
        (lambda x, y: (jnp.sum(x * y), x + y), [3]),  # they share what they read
        (lambda x, y: x / jnp.sum(x), [1, 2]),  # the sum of all comes first
        (lambda x, y: jnp.where(x[:512] > 0, y[512:], 0), [1.5]),  # half of each
        (lambda x, y: jax.lax.fori_loop(0, 5, lambda _, z: z * x, y), [3] * 5),
        (lambda x, y: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, y), [2, 2]),
        (lambda x, y: x.at[np.arange(512)].set(y[:512]), [1, 1]),  # a half is copied, and read and written
        (lambda x, y: x.at[np.arange(512)].set(0), [0.5]),  # a constant is written where it is made
    ],
)
def test_passes_read_and_write_what_xla_does(function, arrays):
    size = 4 * 1024 * 1024
    works = counted(function, (1024, 1024), (1024, 1024))
    found = [work.num_bytes / work.starts / size for work in works for _ in range(int(work.starts))]
    assert [number for number in found if number > 0.01] == pytest.approx(arrays, abs=0.01)


def test_a_sort_is_several_kernels():
    (work,) = counted(jnp.sort, (4096,))
    assert work.starts == 20


def test_rows_of_a_table_cost_as_much_however_long_the_table_is():
    ids = np.arange(1024)
    short, long = (counted(lambda x: x[ids] * 2, (rows, 1024)) for rows in (4096, 1_000_000))
    assert cost.table(long, H100) == cost.table(short, H100) != ()


def test_a_kernel_is_priced_by_what_its_call_states_not_by_its_name():
    def run(x: jax.Array, **stated: Any) -> jax.Array:
        cost = pl.CostEstimate(flops=7, transcendentals=0, bytes_accessed=0)
        return pl.pallas_call(lambda *_: None, x, name="attention", cost_estimate=cost, **stated)(x)

    (unknown,), (own,) = (
        counted(run, (2, 8)),
        counted(partial(run, metadata={efficiencies.KIND: "head passes"}), (2, 8)),
    )
    assert (unknown.kind, unknown.flops, unknown.num_bytes, own.kind) == (
        "GEMM f32",
        7,
        2 * 64,
        "head passes",
    )


@pytest.mark.parametrize(
    ("number", "side", "share"), [(1, 768, 36 / 132), (2, 768, 72 / 132), (24, 768, 1.0), (6, 256, 24 / 132)]
)
def test_a_stack_of_products_fills_as_many_multiprocessors_as_it_has_tiles(number, side, share):
    (work,) = counted(jnp.matmul, (number, side, side), (number, side, side))
    flops = 2.0 * number * side**3
    assert (work.kind, work.flops) == ("GEMM f32", flops)
    rate = share * REACHES["f32"] * cost.flops_rate(H100, "f32")
    assert cost.seconds(work, H100)[0] == pytest.approx(efficiencies.START_S + flops / rate)


def test_the_table_adds_up_by_kind_and_names_the_bound_that_costs_most():
    long, short = Work("elementwise", num_bytes=3e12), Work("elementwise", instructions=1e12)
    product, long_line = Work("GEMM bf16", 1e12), cost.seconds(long, H100)[0]
    other, elementwise = cost.table([short, long, product, short], H100)
    assert (elementwise.kind, elementwise.bound, elementwise.starts) == ("elementwise", "memory", 3)
    assert elementwise.seconds == pytest.approx(long_line + 2 * cost.seconds(short, H100)[0])
    assert (other.kind, other.flops) == ("GEMM bf16", 1e12)


def test_the_mean_of_steps_has_each_kernel_by_the_share_of_the_steps_that_run_it():
    product, rest = Work("GEMM bf16", 1e12), Work("elementwise", num_bytes=1e9)
    plain, adam = (cost.table(works, H100) for works in ([product], [product, product, rest]))
    products, others = cost.mean([(0.75, plain), (0.25, adam)])
    assert products.seconds == pytest.approx(1.25 * plain[0].seconds)
    assert (products.kind, products.starts, products.flops) == ("GEMM bf16", 1.25, 1.25e12)
    assert others.seconds == pytest.approx(0.25 * adam[1].seconds)
    assert (others.kind, others.bound, others.num_bytes) == ("elementwise", "memory", 2.5e8)


def test_devices_without_fp8_multiply_in_16_bits():
    a100 = accelerators.load("a100")
    assert cost.flops_rate(a100, "fp8") == cost.flops_rate(a100, "bf16") == 2 * cost.flops_rate(a100, "f32")


@pytest.mark.parametrize("window_blocks", [1, 3, 16])
def test_attention_visits_the_tiles_in_which_somebody_sees_somebody(window_blocks):
    num_tokens, block_tokens = 2048, 128
    lengths = document_lengths(num_tokens, seed=0)
    doc_BT = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths))[None]
    seen_TS = np.asarray(visible(first_key(doc_BT, window_blocks, block_tokens)))[0]

    def pairs(tiles: attention_triton.Tiles) -> int:
        shape = num_tokens // tiles.queries, tiles.queries, num_tokens // tiles.keys, tiles.keys
        return int(seen_TS.reshape(shape).any(axis=(1, 3)).sum()) * tiles.queries * tiles.keys

    found = traced.visited_pairs(num_tokens, window_blocks, block_tokens)
    assert found == tuple(map(pairs, attention_triton.HOPPER))


def test_attention_is_counted_for_the_windows_of_the_schedule():
    """Record 21: three layers with the whole window, eight with half of it, rounded down to at least one block."""
    program = Program(recipes.load("record21"), mesh.make_mesh(8))
    windows = np.array([int(program.recipe.inputs_at(step)["window_blocks"]) for step in range(1770)])
    assert {*windows} == {*range(1, 15)}

    def flops(blocks: int) -> float:
        """Two products forward, three by queries and four by keys."""
        long, short = (
            np.dot((2, 3, 4), traced.visited_pairs(49_152, n, 128)) for n in (blocks, max(1, blocks // 2))
        )
        return 2 * 6 * 128 * (3 * long + 8 * short)

    works, _ = fusion.count(traced.step_jaxpr(program, 900, H100))
    found = sum(work.flops for work in works if work.kind == "attention")
    assert found == pytest.approx(flops(int(windows[900])))
    sampled = estimate._sampled(program, 0)
    assert sum(sampled.values()) == pytest.approx(1)
    mean = sum(share * flops(int(windows[step])) for step, share in sampled.items())
    assert mean == pytest.approx(np.mean([flops(int(n)) for n in windows]), rel=0.02)


def test_documents_are_as_long_as_finewebs():
    lengths = document_lengths(2_000_000, seed=1)
    assert lengths.sum() == 2_000_000
    assert np.median(lengths) == pytest.approx(MEDIAN, rel=0.05)
    assert np.mean(lengths) == pytest.approx(MEAN, rel=0.05)
    assert lengths.min() >= 1
