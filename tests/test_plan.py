"""The plan: its arithmetic against programs and states that are real."""

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
from speedrun.plan import deviceless, hlo, shares
from speedrun.plan import estimate as planning
from speedrun.plan.schedule import replayed
from speedrun.science.params import SHARDS
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


#: A rate that gives round numbers: no share is lost.
ROUND = accelerators.load("h100")._replace(memory_rate=1e9 / shares.REACHES["memory"])


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
    assert anatomy.groups(text.removeprefix("replica_groups=")) == groups
    with pytest.raises(ValueError, match="got groups '<every second>'; need lists"):
        anatomy.groups("<every second>")


#: One of four devices: 1 MB is summed over all while 2 MB are read and written, and then again.
SCHEDULE = """HloModule step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: f32[250000]) -> (f32[250000], f32[250000]) {
  %x = f32[250000] parameter(0)
  %start = f32[250000] all-reduce-start(%x), replica_groups={}, to_apply=%sum
  %negated = f32[250000] negate(%x)
  %done = f32[250000] all-reduce-done(%start)
  %again = f32[250000] all-reduce(%negated), replica_groups={}, to_apply=%sum
  ROOT %all = (f32[250000], f32[250000]) tuple(%done, %again)
}
"""


@pytest.mark.parametrize("link_rate", [1e9, 5e8, 1e8])
def test_a_device_waits_for_what_is_still_on_its_way(link_rate):
    device = ROUND._replace(link_rate=link_rate / shares.REACHES["links"])
    computed, waiting = replayed(hlo.parse(SCHEDULE), np.zeros(2), device, num_devices=4)
    busy_s = 2e-3 + shares.START_S  # 1 MB read and 1 MB written, 1 GB/s
    assert (computed.seconds, computed.bound) == (pytest.approx(busy_s), "memory")
    # Four send three quarters twice. A start and six steps of the ring.
    all_s = 1.5e6 / link_rate + 8.4e-6 + 6 * 3.4e-6
    assert waiting.seconds == pytest.approx(max(0.0, all_s - busy_s) + all_s), "nothing hides the second"
    assert (waiting.num_bytes, waiting.starts) == (3_000_000, 2)
