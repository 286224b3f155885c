"""A profile tells of every instruction that the program executes, as often as the program says."""

import json
from collections import Counter
from pathlib import Path

import pytest
from typed import as_words, invoke

from speedrun.base.mesh import make_mesh
from speedrun.machine.bench_step import lowered_step
from speedrun.machine.profile import Profile, profile
from speedrun.plan import hlo
from speedrun.science.recipe import Recipe
from speedrun.train.program import Program

STEPS = 2


@pytest.fixture(scope="module")
def program(tiny: Recipe) -> Program:
    """Two devices, four micro-batches each: there is a loop."""
    return Program(tiny, make_mesh(2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def found(program, folder) -> Profile:
    return profile(program, num_steps=STEPS, folder=folder)


def test_products_run_as_often_as_the_program_says(program, found):
    schedule = hlo.parse(lowered_step(program, 0)[0].compile().as_text())
    dots = (one for one in schedule if one.instruction.kind == "dot")
    want = Counter({one.instruction.name: one.times for one in dots})
    got = {row.name: row.calls for row in found.rows if row.kind == "dot"}
    assert max(want.values()) > 1, "no product in a loop: the test shows nothing"
    assert got == want


def test_the_table_is_the_whole_time_and_the_trace_is_kept(found, folder):
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert [row.ms for row in found.rows] == sorted((row.ms for row in found.rows), reverse=True)
    assert {"all-gather", "reduce-scatter"} <= found.shares.keys()
    assert list(folder.rglob("*.xplane.pb"))


def test_every_device_computes_and_sends(found):
    assert [one.device for one in found.devices] == [0, 1]
    for one in found.devices:
        assert 0 < one.compute_ns <= one.span_ns
        assert 0 < one.collective_ns <= one.span_ns
        assert one.idle_ns == pytest.approx(sum(gap.length_ns for gap in one.gaps))
        assert one.span_ns <= found.step_ms * STEPS * 1e6 * (1 + 1e-9)


@pytest.mark.compile
def test_the_command_shows_it(tmp_path):
    small = as_words({"config.model_dim": 16, "config.num_heads": 2, "config.head_dim": 8})
    args = ["profile", "--devices", "1", "--steps", "1", "--top", "3", *small]
    shown = invoke(*args)
    assert shown.exit_code == 0, shown.output
    assert "ms, 1 steps of smoke on 1 x cpu" in shown.output
    assert " others\n" in shown.output
    result = json.loads(invoke(*args, "--json").stdout)
    assert len(result["rows"]) == 3
    assert result["devices"][0]["span_ns"] == pytest.approx(result["step_ms"] * 1e6)
