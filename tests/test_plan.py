"""The plan: its arithmetic against programs and states that are real."""

import dataclasses
import json
import re
from functools import partial

import anatomy
import jax
import numpy as np
import pytest
from typed import invoke

from speedrun import recipes
from speedrun.base import accelerators
from speedrun.base.mesh import make_mesh
from speedrun.plan import deviceless, hlo, scaling, shares
from speedrun.plan import estimate as planning
from speedrun.plan.deviceless import Collective
from speedrun.science.params import SHARDS, Layout
from speedrun.train import footprint
from speedrun.train.program import Program

planned = partial(invoke, "plan", "--arithmetic")


@pytest.mark.compile
def test_kernels_are_those_of_one_device():
    """Attention runs in each layer and microbatch, once forward and twice backward; Muon once a step, on stacks."""
    recipe = recipes.load("record21")
    plans = (planning.plan(recipe, "h100", num_devices, 8).stages[0] for num_devices in (1, 8))
    one, eight = ({line.kind: line.starts for line in stage.lines} for stage in plans)
    assert (one["attention"], eight["attention"]) == (8 * 11 * 3, 11 * 3)
    assert one["Muon"] == eight["Muon"]


def test_memory_is_scarce_for_record_21_only_on_24_gb():
    program = Program(recipes.load("record21"), make_mesh(1))
    for kind, card in accelerators.DEVICES.items():
        fitted = footprint.fitted(program, card.memory_bytes)
        assert fitted.memory == ("scarce" if kind == "4090" else "ample")


@pytest.mark.compile
@pytest.mark.usefixtures("h100")
def test_24_gb_are_enough_for_record_21():
    """Also for the three quarters that JAX takes, unless told otherwise."""
    recipe, card = recipes.load("record21"), accelerators.load("4090")
    found = planning.plan(recipe, "4090", 1, 8, "compiled program")
    assert found.memory_bytes < 0.75 * card.memory_bytes
    assert planning.plan(recipe, "4090", 1, 8).memory_bytes == pytest.approx(found.memory_bytes, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("4090", "webmini"),
        *(pytest.param(x, "record21", marks=pytest.mark.compile) for x in accelerators.DEVICES),
    ],
)
def test_no_step_beats_its_floors_and_more_devices_are_faster(kind, name):
    recipe = recipes.load(name)
    stages = [stage for n in (1, 8) for stage in planning.plan(recipe, kind, n, 8).stages]
    for stage in stages:
        assert stage.step_s > max(stage.compute_floor_s, stage.traffic_floor_s, stage.communication_floor_s)
    assert stages[0].step_s > stages[1].step_s


def test_the_compiled_program_is_the_one_that_runs(tiny, h100, monkeypatch):
    """Its donated bytes are the whole state, and it gathers and scatters each packed array once."""
    program = Program(tiny, h100(8))
    compiled = deviceless.compiled_step(program, 0)
    found = anatomy.dissect(compiled)
    assert found.memory.alias_size_in_bytes == footprint.state_bytes(program)
    packed = jax.eval_shape(program.layout.init, jax.random.key(0))
    whole_bytes = 4 * sum(leaf.size for name, leaf in packed.items() if program.layout.specs[name])
    assert found.sent_bytes("all-gather") == found.sent_bytes("reduce-scatter") == whole_bytes
    monkeypatch.setattr(planning, "compiled_step", lambda *_: compiled)  # once is slow enough
    (stage,) = planning.plan(tiny, "h100", 8, SHARDS, "compiled program").stages
    assert (stage.gathered_bytes, stage.scattered_bytes) == (whole_bytes, whole_bytes)
    assert stage.memory_bytes == found.memory.peak_memory_in_bytes
    assert stage.traffic_bytes == found.traffic_bytes
    scored = anatomy.dissect(anatomy.compiled_evaluation(program))
    assert {(one.kind, one.times) for one in scored.collectives} == {("all-gather", 1)}


def test_it_prints_for_people_and_for_programs():
    shown = planned("--recipe", "webmini", "--dollars", "3600")
    assert shown.exit_code == 0, shown.output
    assert "8 x NVIDIA H100 80GB HBM3" in shown.output
    assert "by arithmetic" in shown.output
    plan = json.loads(planned("--recipe", "webmini", "--dollars", "3600", "--json").output)
    assert plan["dollars"] == pytest.approx(8 * plan["total_s"])
    assert f"${plan['dollars']:,.2f}" in shown.output
    assert (plan["fits"], plan["error"]) == (True, None)


def test_what_does_not_fit_is_refused(monkeypatch):
    small = accelerators.DEVICES["4090"]._replace(memory_bytes=14_000_000)
    monkeypatch.setitem(accelerators.DEVICES, "small", small)
    device = ["--device-kind", "small", "--devices", "1", "--set", "eval_seq_len=1024"]
    refused = planned(*device, "--json")
    assert refused.exit_code == 1
    told = r"smoke does not fit: needs 0\.\d\d GB, NVIDIA GeForce RTX 4090 has 0\.\d\d GB; try more"
    assert re.match(told, json.loads(refused.output)["error"])
    fewer = ["--microbatches", "32", "--set", "stages.0.num_sequences=64", "--set", "stages.0.seq_len=64"]
    assert planned(*device, *fewer).exit_code == 0


H100 = accelerators.load("h100")
#: Rates that give round numbers: nothing is lost on links, a network of 1 GB/s.
ROUND = H100._replace(
    memory_rate=1e9 / shares.REACHES["memory"],
    link_rate=1e10 / shares.REACHES["links"],
    network_rate=1e9 / shares.REACHES["links"],
)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={}", ()),
        ("replica_groups={{0,2},{1,3}}, use_global_device_ids=true, to_apply=%sum", ((0, 2), (1, 3))),
        ("replica_groups=[4,2]<=[2,2,2]T(2,0,1)", ((0, 2), (4, 6), (1, 3), (5, 7))),
        ("replica_groups=mesh['replica'=2,'data'=3] {'replica'}, to_apply=%a", ((0, 3), (1, 4), (2, 5))),
    ],
)
def test_groups_are_read_in_all_forms(text, groups):
    line = hlo.Instruction("x", (), "all-reduce", (), f", channel_id=1, {text}", is_root=False)
    assert line.groups == groups
    with pytest.raises(ValueError, match="got groups '<every second>'; need lists"):
        hlo._groups("<every second>")


#: A device of two nodes of two: 1 MB is summed with the peer of the other node while 2 MB are read and written.
SCHEDULE = """HloModule step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: f32[250000]) -> (f32[250000], f32[250000]) {
  %x = f32[250000] parameter(0)
  %start = f32[250000] all-reduce-start(%x), replica_groups={{0,2},{1,3}}, to_apply=%sum
  %negated = f32[250000] negate(%x)
  %done = f32[250000] all-reduce-done(%start)
  %again = f32[250000] all-reduce(%negated), replica_groups={{0,1},{2,3}}, to_apply=%sum
  ROOT %all = (f32[250000], f32[250000]) tuple(%done, %again)
}
"""


@pytest.mark.parametrize("network_rate", [1e9, 5e8, 1e8])
def test_a_device_waits_for_what_is_still_on_its_way(network_rate):
    device = ROUND._replace(network_rate=network_rate / shares.REACHES["links"])
    nothing = np.zeros(2)
    trips, lines = scaling.replayed(hlo.parse(SCHEDULE), nothing, device, num_devices=2, num_nodes=2)
    (computed, waiting), (between, inside) = lines, trips
    busy_s = 2e-3 + shares.START_S  # 1 MB read and 1 MB written, 1 GB/s
    assert (computed.seconds, computed.bound) == (pytest.approx(busy_s), "memory")
    assert waiting.seconds == pytest.approx(between.waited_s + inside.waited_s)
    # Two of two exchange halves, twice: 1 MB each. A start and two steps of the ring.
    assert between.takes_s == pytest.approx(1e6 / network_rate + 8.4e-6 + 2 * 9.6e-6)
    assert inside.takes_s == pytest.approx(1e-4 + 8.4e-6 + 2 * 3.4e-6)
    assert between.waited_s == pytest.approx(max(0.0, between.takes_s - busy_s))
    assert inside.waited_s == pytest.approx(inside.takes_s)  # synchronous
    assert (between.span, inside.span) == ("between", "inside")


def summed(num_bytes: int) -> Collective:
    return Collective("all-reduce", "bf16", num_bytes, is_synchronous=False, times=1, name="")


def test_more_nodes_take_longer_small_sums_take_trees_and_large_ones_rings():
    for num_bytes in (200, 10**6, 10**8):
        times = [scaling.seconds(summed(num_bytes), 1, nodes, H100) for nodes in (2, 4, 8, 32, 128)]
        assert times == sorted(times)
    # A tree of 32 has five levels, up and down; a ring 62 steps.
    assert scaling.seconds(summed(200), 1, 32, H100) == pytest.approx(8.4e-6 + 10 * 8.5e-6, rel=0.01)
    whole_s = 2 * 31 / 32 * 1e8 / (shares.REACHES["links"] * 50e9)
    assert scaling.seconds(summed(10**8), 1, 32, H100) == pytest.approx(8.4e-6 + 62 * 9.6e-6 + whole_s)
    # Eight devices of a node have eight adapters together.
    together_s = 2 * 15 / 16 * 1e9 / (shares.REACHES["links"] * 400e9)
    assert scaling.seconds(summed(10**9), 8, 2, H100) == pytest.approx(together_s, rel=0.05)


@pytest.mark.compile
def test_what_a_small_program_sends_between_nodes_is_its_part_of_each_gradient(h100, tiny):
    h100(2)
    recipe = dataclasses.replace(tiny, compute_dtype="bfloat16")
    found = scaling.scale(recipe, H100, "h100", num_devices=2, num_nodes=2, microbatches=2)
    params = jax.eval_shape(Layout(recipe.table(recipe.config)).init, jax.random.key(0))
    divided = sum(x.size for name, x in params.items() if name != "scalars")
    assert (found.num_devices, found.batch_tokens) == (4, 2 * 16 * 32)
    # Halves of two devices, exchanged by two nodes, in 16 bits.
    scalars = 4 * (params["scalars"].size + 1)
    assert 2 * divided // 2 <= found.network_bytes <= 2 * divided // 2 + 2 * scalars
    assert 2 * divided <= found.link_bytes <= 2 * divided + 2 * scalars
    assert found.sent["inside"].kinds == {"all-gather": len(params) - 1, "reduce-scatter": len(params) - 1}
    assert found.sent["between"].kinds.keys() == {"all-reduce"}
    assert 0 < found.compute_s < found.step_s <= found.unhidden_s


@pytest.mark.compile
def test_a_slower_network_costs_more(h100):
    h100(8)
    words = ["plan", "--recipe", "smoke", "--nodes", "2", "--json"]
    results = [json.loads(invoke(*words, *more).stdout)["scaling"] for more in ([], ["--network", "10"])]
    fast, slow = ({row["num_nodes"]: row for row in result["nodes"]} for result in results)
    assert fast[1] == slow[1]
    assert fast[1]["efficiency"] == 1.0 > fast[2]["efficiency"] > slow[2]["efficiency"]
