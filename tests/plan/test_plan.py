"""The plan: its counts against programs and states that are real."""

import json
import re
from functools import partial
from pathlib import Path

import anatomy
import deviceless
import jax
import pytest
from typed import invoke

from speedrun import recipes
from speedrun.base import accelerators
from speedrun.plan import cost, efficiencies
from speedrun.plan import estimate as planning
from speedrun.plan.cost import Work
from speedrun.science.params import SHARDS
from speedrun.train import memory
from speedrun.train.program import Program

planned = partial(invoke, "plan")
CARDS = Path(__file__).parents[2] / "docs" / "cards.md"


@pytest.mark.compile
def test_kernels_are_those_of_one_device():
    """Attention runs in each layer and microbatch, once forward and twice backward, and once for the norm of keys."""
    recipe = recipes.load("record21")
    plans = (planning.plan(recipe, "h100", num_devices, 8).stages[0] for num_devices in (1, 8))
    one, eight = ({line.kind: line.starts for line in stage.lines} for stage in plans)
    assert (one["attention"], eight["attention"]) == (8 * 11 * 4, 11 * 4)


@pytest.mark.compile
def test_the_table_of_cards_is_what_plan_says():
    rows = re.findall(
        r"^\| `(.+)` \| (.+) \| (.+) \| (.+) \| (.+) \| (.+)% \|$", CARDS.read_text(), re.MULTILINE
    )
    assert {kind for kind, *_ in rows} == {*accelerators.DEVICES}
    for kind, *said in rows:
        found = planning.plan(recipes.load("record21"), kind, 1, 8)
        memory_gb, limit_gb = found.memory_bytes / 1e9, found.memory_limit_bytes / 1e9
        now = memory_gb, limit_gb, found.stages[0].step_s * 1e3, found.total_s / 60, found.stages[0].mfu * 100
        assert [float(x.replace(",", "")) for x in said] == pytest.approx(now, rel=0.01, abs=0.5), (
            "write these"
        )


@pytest.mark.compile
@pytest.mark.usefixtures("h100")
def test_24_gb_are_enough_for_record_21():
    """Also for the three quarters that JAX takes, unless told otherwise."""
    recipe, card = recipes.load("record21"), accelerators.load("4090")
    assert planning.plan(recipe, "l40s", 1, 8).remat == "off"
    plan = planning.plan(recipe, "4090", 1, 8)
    assert plan.remat == "on"
    program = Program(recipe, deviceless.target_mesh("4090", 1), remat=plan.remat)
    needed = deviceless.compiled_step(program, 0).memory_analysis().peak_memory_in_bytes
    assert needed < 0.75 * card.memory_bytes
    assert needed < plan.memory_bytes < 1.17 * needed, (
        "in a trace, all activations are computed again at once"
    )


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


def test_the_compiled_program_is_the_one_that_runs(tiny, h100):
    """Its donated bytes are the whole state, and it gathers and scatters each packed array once, as the plan says."""
    program = Program(tiny, h100(8))
    found = anatomy.dissect(deviceless.compiled_step(program, 0))
    assert found.memory.alias_size_in_bytes == memory.state_bytes(program)
    packed = jax.eval_shape(program.layout.init, jax.random.key(0))
    whole_bytes = 4 * sum(leaf.size for name, leaf in packed.items() if program.layout.specs[name])
    assert found.sent_bytes("all-gather") == found.sent_bytes("reduce-scatter") == whole_bytes
    (stage,) = planning.plan(tiny, "h100", 8, SHARDS).stages
    assert (stage.gathered_bytes, stage.scattered_bytes) == (whole_bytes, whole_bytes)
    scored = anatomy.dissect(anatomy.compiled_evaluation(program))
    assert {(one.kind, one.times) for one in scored.collectives} == {("all-gather", 1)}


def test_it_prints_for_people_and_for_programs():
    shown = planned("--recipe", "webmini")
    assert shown.exit_code == 0, shown.output
    assert "8 x NVIDIA H100 80GB HBM3" in shown.output
    plan = json.loads(planned("--recipe", "webmini", "--json").stdout)
    assert f"{plan['total_s']:,.1f} s" in shown.output
    assert (plan["fits"], plan["error"]) == (True, None)
    errors = {line["kind"]: line["error"] for line in plan["stages"][0]["lines"]}
    assert errors.items() <= efficiencies.ERRORS.items(), "known on an H100"


def test_what_does_not_fit_is_refused(monkeypatch):
    small = accelerators.DEVICES["4090"]._replace(memory_bytes=18_900_000)
    monkeypatch.setitem(accelerators.DEVICES, "small", small)
    device = ["--device-kind", "small", "--devices", "1", "--set", "eval_seq_len=1024"]
    refused = planned(*device, "--json")
    assert refused.exit_code == 1
    told = r"smoke needs 0\.\d\d GB, NVIDIA GeForce RTX 4090 gives JAX 0\.\d\d GB; try more"
    assert re.match(told, json.loads(refused.stdout)["error"])
    fewer = ["--microbatches", "32", "--set", "stages.0.num_sequences=64", "--set", "stages.0.seq_len=64"]
    assert planned(*device, *fewer).exit_code == 0


@pytest.mark.parametrize("num_bytes", [10**6, 10**9])
def test_a_device_waits_for_what_nothing_hides(num_bytes):
    """The first collective and the last; others while computation lasts. A start and six or three steps of a ring."""
    h100, ms = accelerators.load("h100"), Work("elementwise", num_bytes=1e9)
    sent = [cost.Collective("all-gather", num_bytes, 1), cost.Collective("all-reduce", num_bytes, 1)]
    rate = efficiencies.REACHES["links"] * h100.link_rate
    each_s = [8.4e-6 + n * (3 * 3.4e-6 + 0.75 * num_bytes / rate) for n in (1, 2)]
    computed, waited = planning._lines(planning._Counted([ms], sent, 0), 4, h100)
    assert waited.seconds == pytest.approx(sum(each_s))
    computed, waited = planning._lines(planning._Counted([ms], 3 * sent, 0), 4, h100)
    assert waited.seconds == pytest.approx(max(sum(each_s), 3 * sum(each_s) - computed.seconds))
