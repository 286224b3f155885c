"""What a batch will take: from records where there are some, else from the plan."""

import functools
import json
import re
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typed import invoke

from speedrun import recipes
from speedrun.base import accelerators, track
from speedrun.lab import budget as budgets
from speedrun.lab.budget import budget
from speedrun.plan import estimate as planning
from speedrun.record.reader import load

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "records"


PLANNED = functools.cache(planning.plan)  #: tracing takes seconds, and a plan is a function of its arguments


@pytest.fixture(autouse=True)
def _nothing_here(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path))
    monkeypatch.setattr(planning, "plan", PLANNED)


def test_a_run_takes_what_the_records_took():
    """Those of 280 steps as they are, others for as many steps; fewer take less, but start as slowly."""
    trains, walls = [], []
    for path in RECORDS.glob("smoke-cpu/*/about.json"):
        runs = load(path.parent).finished
        trains.append(280 / runs[0].start.num_steps * fmean(run.train_time_s for run in runs))
        walls.append(trains[-1] + fmean(run.end.cold_wall_s - run.train_time_s for run in runs))
    smoke, rules = recipes.load("smoke"), track.load("smoke-cpu")
    found: Any = budget(rules, smoke, 2, RECORDS, None, dollars=2.5)
    assert (found.basis, found.dollars) == ("records", 0), "a simulated device costs nothing"
    assert (found.train_s, found.run_s) == pytest.approx((fmean(trains), fmean(walls)))
    assert found.total_s == pytest.approx(2 * found.run_s)
    tenth = budget(rules, smoke.override({"stages.0.num_steps": "28"}), 2, RECORDS, None, dollars=None)
    assert tenth.run_s == pytest.approx(found.run_s - 0.9 * found.train_s)


def test_records_count_on_as_many_devices_only(tmp_path):
    folder = tmp_path / "records" / "smoke-cpu" / "one"
    shutil.copytree(RECORDS / "smoke-cpu" / "2026-11-25-first", folder)
    h100 = accelerators.load("h100").name
    (log,) = folder.glob("runs/*/metrics.jsonl")
    log.write_text(log.read_text().replace('"device_kind":"cpu"', f'"device_kind":"{h100}"'))
    rules, recipe = track.load("smoke-cpu"), recipes.load("smoke")

    def basis(num_devices: int) -> str:
        plan = planning.plan(recipe, "h100", num_devices, 8)
        return budget(rules, recipe, 2, tmp_path / "records", plan, dollars=None).basis

    assert (basis(8), basis(4)) == ("records", "plan")
    log.write_text(re.sub(r'"tokens_seen":\d+', '"tokens_seen":0', log.read_text()))
    assert basis(8) == "plan", "nothing was trained"


def test_nobody_knows_what_was_never_run(tmp_path):
    found = budget(track.load("docs-cpu"), recipes.load("docs"), 2, RECORDS, None, dollars=None)
    assert (found.basis, found.run_s, found.total_s, found.dollars) == ("unknown", None, None, None)
    assert "time is unknown" in budgets.lines(found, 0.3)[-1]


def test_a_plan_gives_steps_validations_and_a_guess():
    """1,770 steps, a validation of 10,485,760 tokens before every 125th and at the end, each forward only."""
    rules, recipe = track.load("main-8xh100"), recipes.load("record21")
    plan = planning.plan(recipe, "h100", 1, 8)  # as the next test, since it takes long
    found: Any = budget(rules, recipe, 4, RECORDS, plan, dollars=2.5)
    num_vals = len(range(0, 1770, 125)) + 1
    vals_s = plan.total_s * num_vals * 10_485_760 / 3 / (1770 * 393_216)
    assert found.run_s == pytest.approx(plan.total_s + vals_s + budgets.UNTIMED_S)
    assert found.dollars == pytest.approx(4 * found.run_s * 2.5 / 3600)
    assert (found.basis, found.fetch_bytes) == ("plan", 10 * 200_001_024)
    disk, batch = budgets.lines(found, 0.3)
    assert disk == "data   2.00 GB to fetch | 4.00 GB of disk"
    assert batch.endswith(f"${found.dollars:,.2f} at $2.50 per GPU and hour, without fetching")
    assert "$" not in budgets.lines(budget(rules, recipe, 4, RECORDS, plan, dollars=None), 0.3)[-1]


def test_the_track_says_recipe_devices_and_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = json.loads(invoke("plan", "--track", "single-gpu", "--json").stdout)
    batch = found["batch"]
    assert (found["recipe"], found["num_devices"], batch["num_runs"]) == ("record21", 1, 3)
    assert batch["total_s"] == pytest.approx(3 * batch["run_s"])
    lines = invoke("plan", "--track", "smoke-cpu").stdout.splitlines()
    assert [line[:5] for line in lines] == ["data ", "batch"]
    assert lines[1].startswith("batch  2 runs of ")
    assert "from the records here" in lines[1]
