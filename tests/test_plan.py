"""The plan: its arithmetic against programs and states that are real."""

import json
import re
import shlex
from collections.abc import Callable
from functools import partial

import jax
import pytest
from jax.sharding import Mesh
from typed import invoke

from speedrun import recipes
from speedrun.base import accelerators
from speedrun.base.mesh import make_mesh
from speedrun.plan import deviceless
from speedrun.plan import estimate as planning
from speedrun.science.params import SHARDS
from speedrun.science.recipe import Recipe
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


@pytest.mark.parametrize("kind", accelerators.DEVICES)
def test_memory_is_scarce_for_record_21_only_on_24_gb(kind: str):
    program = Program(recipes.load("record21"), make_mesh(1))
    fitted = footprint.fitted(program, accelerators.load(kind).memory_bytes)
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
    "kind",
    ["4090", *(pytest.param(x, marks=pytest.mark.compile) for x in accelerators.DEVICES if x != "4090")],
)
def test_no_step_beats_its_floors(kind: str):
    """And more devices are faster."""
    recipe = recipes.load("record21")
    stages = [stage for n in (1, 8) for stage in planning.plan(recipe, kind, n, 8).stages]
    for stage in stages:
        assert stage.step_s > max(stage.compute_floor_s, stage.traffic_floor_s, stage.communication_floor_s)
    assert stages[0].step_s > stages[1].step_s


def test_the_compiled_program_is_the_one_that_runs(
    tiny: Recipe, h100: Callable[[int], Mesh], monkeypatch: pytest.MonkeyPatch
):
    """Its donated bytes are the whole state, and it gathers and scatters each packed array once."""
    program = Program(tiny, h100(8))
    compiled = deviceless.compiled_step(program, 0)
    found = deviceless.dissect(compiled)
    assert found.memory.alias_size_in_bytes == footprint.state_bytes(program)
    packed = jax.eval_shape(program.layout.init, jax.random.key(0))
    whole_bytes = 4 * sum(leaf.size for name, leaf in packed.items() if program.layout.specs[name])
    assert found.sent_bytes("all-gather") == found.sent_bytes("reduce-scatter") == whole_bytes
    monkeypatch.setattr(planning, "compiled_step", lambda *_: compiled)  # once is slow enough
    (stage,) = planning.plan(tiny, "h100", 8, SHARDS, "compiled program").stages
    assert (stage.gathered_bytes, stage.scattered_bytes) == (whole_bytes, whole_bytes)
    assert stage.memory_bytes == found.memory.peak_memory_in_bytes
    assert stage.traffic_bytes == found.traffic_bytes


def test_validation_gathers_once_and_adds_nothing_up(tiny: Recipe, h100: Callable[[int], Mesh]):
    found = deviceless.dissect(deviceless.compiled_evaluation(Program(tiny, h100(8))))
    assert {one.kind for one in found.collectives} == {"all-gather"}
    assert all(one.times == 1 for one in found.collectives), found


def test_it_prints_for_people_and_for_programs():
    shown = planned("--recipe", "webmini", "--dollars", "3600")
    assert shown.exit_code == 0, shown.output
    assert "8 x NVIDIA H100 80GB HBM3" in shown.output
    assert "by arithmetic" in shown.output
    plan = json.loads(planned("--recipe", "webmini", "--dollars", "3600", "--json").output)
    assert plan["dollars"] == pytest.approx(8 * plan["total_s"])
    assert f"${plan['dollars']:,.2f}" in shown.output
    assert (plan["fits"], plan["error"]) == (True, None)


@pytest.mark.parametrize(
    ("limit", "eval_seq_len", "advice"),
    [
        (18_000_000, 1_024, "--microbatches 16"),
        (14_000_000, 1_024, "--microbatches 32 --set stages.0.num_sequences=64 --set stages.0.seq_len=64"),
        (200_000_000, 262_144, "--microbatches 16 --set eval_sequences=32 --set eval_seq_len=131072"),
    ],
    ids=["parts", "shorter", "validation"],
)
def test_what_does_not_fit_is_refused_with_advice_that_helps(
    limit: int, eval_seq_len: int, advice: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(
        accelerators.DEVICES, "small", accelerators.DEVICES["4090"]._replace(memory_bytes=limit)
    )
    device = ["--device-kind", "small", "--devices", "1"]
    settings = {"stages.0.num_sequences": 16, "eval_seq_len": eval_seq_len}
    args = [*device, *(f"--set={key}={value}" for key, value in settings.items())]
    refused = planned(*args)
    assert refused.exit_code == 1
    told = r"smoke does not fit: needs 0\.\d\d GB, NVIDIA GeForce RTX 4090 has 0\.\d\d GB"
    assert re.search(told, refused.stderr)
    in_json = planned(*args, "--json")
    assert in_json.exit_code == 1
    assert json.loads(in_json.output)["error"].endswith(f"; try {advice}")
    # A setting may be given once only: the advice takes the place of what it changes.
    changed = {word.partition("=")[0] for word in shlex.split(advice)}
    kept = [f"--set={key}={value}" for key, value in settings.items() if key not in changed]
    assert planned(*device, *kept, *shlex.split(advice)).exit_code == 0, advice


@pytest.mark.parametrize("seq_len", [256, 3])
def test_what_never_fits_is_said(seq_len: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(accelerators.DEVICES, "toy", accelerators.DEVICES["4090"]._replace(memory_bytes=1000))
    refused = planned("--device-kind", "toy", "--set", f"stages.0.seq_len={seq_len}")
    assert "try another --device-kind" in refused.stderr
