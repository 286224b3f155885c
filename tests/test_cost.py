"""The model of cost: bounds by hand, and what attention visits against the mask itself."""

import jax.numpy as jnp
import numpy as np
import pytest

from speedrun import recipes
from speedrun.base import accelerators, mesh
from speedrun.data.synthetic import MEAN, MEDIAN, document_lengths
from speedrun.plan import cost, estimate, shares
from speedrun.plan.cost import Work
from speedrun.plan.shares import REACHES
from speedrun.science.kernels import attention_triton
from speedrun.science.kernels.attention import sight, visible
from speedrun.train import footprint
from speedrun.train.program import Program

H100 = accelerators.load("h100")


@pytest.mark.parametrize(
    ("work", "bound", "seconds"),
    [
        (Work("GEMM bf16", REACHES["bf16"] * 989.4e12), "tensor cores", 1.0),
        (Work("GEMM FP8", REACHES["fp8"] * 1978.9e12, "fp8"), "tensor cores", 1.0),
        (Work("GEMM f32", REACHES["f32"] / 2 * 989.4e12, "f32"), "tensor cores", 1.0),
        (Work("head passes", instructions=REACHES["instructions"] * 132 * 128 * 1.98e9), "instructions", 1.0),
        (Work("elementwise", num_bytes=REACHES["memory"] * 3.352e12), "memory", 1.0),
        (Work("GEMM bf16", 1e6, num_bytes=2 * REACHES["memory"] * 3.352e12), "memory", 2.0),
        (Work("elementwise", num_bytes=4, starts=1000), "starts", 1000 * shares.START_S),
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
    assert all(cost.num_attention_layers(program, stage) for stage in recipe.stages)


def test_arithmetic_leaves_out_tables_of_which_the_optimiser_moves_few_rows():
    """All rows of record 89's table of bigrams are updated, though few are read."""
    older, newer = (Program(recipes.load(name), mesh.make_mesh(8)) for name in ("record89", "record92"))
    assert estimate._moved_state_bytes(older) == footprint.state_bytes(older)
    rows = newer.recipe.config.ngram_rows // 8  # of a device: weights and sums in bfloat16, a square, a mark
    left_out = footprint.state_bytes(newer) - estimate._moved_state_bytes(newer)
    assert left_out == rows * (2 * 2 * newer.recipe.config.model_dim + 4 + 1)


@pytest.mark.parametrize(
    ("recipe", "device", "calls"),
    [
        ("record21", "h100", {"head", "mlp"}),
        ("record21", "a100", set()),
        ("shortcuts", "h100", {"head"}),
        ("modern", "h100", set()),
    ],
)
def test_a_plan_knows_which_operations_get_kernels(recipe, device, calls):
    """An A100 has none of ours, a head without a cap neither, and the MLPs of the ladder are their definition."""
    program = Program(recipes.load(recipe), mesh.make_mesh(8))
    assert cost.mosaic_calls(program, program.recipe.stages[0], accelerators.load(device)) == calls


def test_the_table_adds_up_by_kind_and_names_the_bound_that_costs_most():
    long, short = Work("elementwise", num_bytes=3e12), Work("elementwise", instructions=1e12)
    muon, long_line = Work("Muon", 1e12), cost.seconds(long, H100)[0]
    elementwise, other = cost.table([short, long, muon, short], H100)
    assert (elementwise.kind, elementwise.bound, elementwise.starts) == ("elementwise", "memory", 3)
    assert elementwise.seconds == pytest.approx(long_line + 2 * cost.seconds(short, H100)[0])
    assert (other.kind, other.flops) == ("Muon", 1e12)


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
    seen_TS = np.asarray(visible(sight(doc_BT, window_blocks, block_tokens)))[0]

    def pairs(tiles: attention_triton.Tiles) -> int:
        shape = num_tokens // tiles.queries, tiles.queries, num_tokens // tiles.keys, tiles.keys
        return int(seen_TS.reshape(shape).any(axis=(1, 3)).sum()) * tiles.queries * tiles.keys

    found = cost.visited_pairs(num_tokens, window_blocks, block_tokens)
    forward, by_queries, by_keys = map(pairs, attention_triton.HOPPER)
    assert [*found] == [2 * forward, 3 * by_queries + 4 * by_keys]


def test_attention_is_counted_for_every_window_of_the_schedule(monkeypatch):
    """Record 21: three layers with the whole window, eight with half of it, rounded down to at least one block."""
    program = Program(recipes.load("record21"), mesh.make_mesh(8))
    windows = [int(program.recipe.inputs_at(step)["window_blocks"]) for step in range(1770)]
    assert {*windows} == {*range(1, 15)}
    attention = {blocks: cost.attention_at(program, windows.index(blocks)) for blocks in {*windows}}
    for blocks, flops in attention.items():
        long, short = (cost.visited_pairs(49_152, n, 128) for n in (blocks, max(1, blocks // 2)))
        assert [*flops] == pytest.approx([*(2 * 6 * 128 * (3 * long + 8 * short))])
    mean = np.mean([attention[blocks] for blocks in windows], axis=0)
    (stage,) = program.recipe.stages
    assert [*cost.mean_attention(program, stage)] == pytest.approx([*mean])
    monkeypatch.setattr(cost, "_calls", lambda *_: [])  # a model without attention
    assert [*cost.mean_attention(program, stage)] == [0.0, 0.0]


def test_documents_are_as_long_as_finewebs():
    lengths = document_lengths(2_000_000, seed=1)
    assert lengths.sum() == 2_000_000
    assert np.median(lengths) == pytest.approx(MEDIAN, rel=0.05)
    assert np.mean(lengths) == pytest.approx(MEAN, rel=0.05)
    assert lengths.min() >= 1
