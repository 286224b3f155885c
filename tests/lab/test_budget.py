"""What a batch will take, and how likely it proves its target: before it starts, and as it would be declared."""

import functools
import re
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from msgspec.structs import replace
from small_run import FIRST, SMALL, log_of
from typed import invoke

from speedrun import recipes
from speedrun.base import accelerators, track
from speedrun.base.errors import UsageError
from speedrun.cli.train import batch, run
from speedrun.lab import afford
from speedrun.lab import budget as budgets
from speedrun.lab.commands import sweep
from speedrun.plan import estimate as planning
from speedrun.record.reader import load
from speedrun.train.batch import BatchRequest, Prospect, num_runs, prospect
from speedrun.train.run_config import RunConfig

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "records"


@functools.cache
def small_plan(plan: Any = planning.plan) -> Any:
    """To trace a step takes seconds, and prices only multiply."""
    return plan(recipes.load("smoke").override(SMALL), "h100", 8, 8)


def planned(
    _recipe: object, _kind: str, num_devices: int, *_: object, validates_at: Any, **__: object
) -> Any:
    """That plan in place of any other, with two programs on a track that validates every 125 steps."""
    return replace(small_plan(), num_devices=num_devices, num_programs=1 + validates_at(125))


@pytest.fixture(autouse=True)
def _nothing_here(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path))
    monkeypatch.setattr(planning, "plan", planned)


def priced(
    goal: str, runs: int | None = 2, *, records: Path = RECORDS, dollars: float | None = None, **config: Any
) -> Any:
    promise = BatchRequest(RunConfig(track=goal, out=Path(), **config), runs)
    return budgets.budget(promise, "h100", dollars=dollars, records=records)


def asked(found: Any) -> Any:
    return next(row for row in found.rows if row.is_asked)


@pytest.mark.parametrize(("goal", "warned"), [("main-8xh100", 1), ("single-gpu", 0)])
def test_a_price_on_a_card_that_the_track_does_not_rank_says_so(goal, warned):
    said = list[str]()
    budgets.budget(BatchRequest(RunConfig(goal, Path()), 2), "4090", dollars=None, say=said.append)
    assert [f"warning: {goal}@" in line and "NVIDIA H100" in line for line in said] == [True] * warned


def test_a_run_takes_what_the_records_took():
    """Those of 280 steps as they are, others for as many steps; fewer take less, but start as slowly."""
    trains, walls = [], []
    for path in RECORDS.glob("smoke-cpu/*/about.json"):
        runs = load(path.parent).finished
        trains.append(280 / runs[0].start.num_steps * fmean(run.train_time_s for run in runs))
        walls.append(trains[-1] + fmean(run.end.cold_wall_s - run.train_time_s for run in runs))
    found = priced("smoke-cpu", dollars=2.5)
    assert (found.basis, asked(found).dollars) == ("records", 0), "a simulated device costs nothing"
    assert found.first_s == 0
    assert (found.train_s, found.run_s) == pytest.approx((fmean(trains), fmean(walls)))
    assert asked(found).total_s == pytest.approx(2 * found.run_s)
    tenth = priced("smoke-cpu", overrides={"stages.0.num_steps": "28"})
    assert tenth.run_s == pytest.approx(found.run_s - 0.9 * found.train_s)


def test_records_count_on_as_many_devices_only(tmp_path):
    folder = tmp_path / "records" / "single-gpu" / "one"
    shutil.copytree(FIRST, folder)
    h100 = accelerators.load("h100").name
    log = log_of(folder)
    log.write_text(log.read_text().replace('"device_kind":"cpu"', f'"device_kind":"{h100}"'))

    def basis(num_devices: int) -> str:
        config: dict[str, Any] = {"recipe": "smoke", "num_devices": num_devices}
        return priced("single-gpu", records=tmp_path / "records", **config).basis

    assert (basis(8), basis(4)) == ("records", "plan")
    log.write_text(re.sub(r'"tokens_seen":\d+', '"tokens_seen":0', log.read_text()))
    assert basis(8) == "plan", "nothing was trained"


def test_nobody_knows_what_was_never_run():
    found = priced("docs-cpu")
    assert (found.basis, found.run_s, asked(found).total_s, found.limit_s) == ("unknown", None, None, None)
    assert "time is unknown" in found.lines()[1]


def test_a_plan_gives_steps_validations_and_a_guess(monkeypatch):
    """1,770 steps, a validation of 10,485,760 tokens before every 125th and at the end, each forward only."""
    validates_at = track.load("main-8xh100").validates_at
    plan = planning.plan(recipes.load("record21"), "h100", 8, 8, validates_at=validates_at)
    found = priced("main-8xh100", 4, dollars=2.5)
    num_vals = len(range(0, 1770, 125)) + 1
    vals_s = plan.total_s * num_vals * 10_485_760 / 3 / (1770 * 393_216)
    assert found.run_s == pytest.approx(plan.total_s + vals_s + budgets.UNTIMED_S)
    assert found.first_s == 2 * budgets.COMPILE_S
    assert asked(found).dollars == pytest.approx((4 * found.run_s + found.first_s) * 8 * 2.5 / 3600)
    assert found.limit_s == pytest.approx(2 * 4 * found.run_s + 3600)
    assert (found.basis, found.fetch_bytes) == ("plan", 10 * 200_001_024)
    lines = found.lines()
    assert lines[0] == "data   2.00 GB to fetch | 4.00 GB of disk, with what runs write"
    assert " on 8 x NVIDIA H100 80GB HBM3, " in lines[1]
    assert lines[2] == "first  about 2m52s more to compile, in the times below"
    assert "$" in lines[-2]
    assert "$" not in "".join(priced("main-8xh100", 4).lines())
    monkeypatch.setattr(budgets, "COMPILE_S", 3000.0)
    more = "a job may compile for as long as it is said to, also beyond the hour that the track grants"
    assert priced("main-8xh100", 4).limit_s == pytest.approx(2 * 4 * found.run_s + 6000), more


def test_a_table_has_the_chances_that_simulated_batches_have():
    """Record 21's table, and what it declares without a number: that with 90 %."""
    rules = track.load("main-8xh100")
    found = priced("main-8xh100", None)
    assert [(row.num_runs, row.is_asked) for row in found.rows] == [(4, False), (31, True)]
    known: Any = prospect(recipes.load("record21"), rules)
    assert [row.chance for row in found.rows] == [known.chance(n) for n in (4, 31)]
    assert found.rows[0].chance == pytest.approx(0.009, abs=0.001)  # examined by hand: findings of 2026
    assert 0.9 <= found.rows[1].chance < 0.91
    assert known.chance(30) < 0.9
    assert known.chance(31, 2) < known.chance(31), "half the level for each of two looks"


@pytest.mark.parametrize(
    ("goal", "recipe", "changes", "loss"),
    [
        ("main-8xh100", "record21", {}, 3.2787),
        ("single-gpu", "record21", {}, 3.2787),  # the same tokens
        ("smoke-cpu", "smoke", {}, 3.0908),
        ("main-8xh100", "record21", {"optimizer.muon_lr": "0.04"}, None),
        ("main-8xh100", "smoke", {}, None),  # stated of other tokens
    ],
)
def test_a_recipe_states_a_loss_of_itself_on_its_tokens_alone(goal, recipe, changes, loss):
    found = prospect(recipes.load(recipe).override(changes), track.load(goal))
    assert (found and found.loss) == loss


def test_who_knows_no_loss_must_say_a_number():
    rules = track.load("main-8xh100")
    promise = BatchRequest(RunConfig(track=rules.name, out=Path()), None)
    with pytest.raises(UsageError, match="is not known; pass --runs N, or --expect LOSS"):
        num_runs(promise, rules, None)
    with pytest.raises(UsageError, match="1,000 runs would not prove it"):
        num_runs(promise, rules, Prospect(rules, 3.2801, 0.0019, "nobody"))
    assert num_runs(promise, rules, Prospect(rules, 3.20, 0.0019, "nobody")) == rules.rules.min_runs


def test_what_is_planned_to_exceed_its_budget_does_not_start(monkeypatch, tmp_path):
    """Smoke's run is priced, in a child, as the records have it; a device and hour of eight costs eight."""
    found = priced("smoke-cpu", 1)
    row, request = asked(found), BatchRequest(RunConfig("smoke-cpu", tmp_path), 1)
    assert afford.planned(request, None) == (row.total_s, row.flops, 0)
    small = RunConfig("single-gpu", tmp_path, recipe="smoke", overrides=SMALL)
    seconds, *_ = afford.planned(BatchRequest(small, 1), "h100")
    assert seconds == pytest.approx(budgets.UNTIMED_S, abs=60), "without compiling, unlike the table"
    monkeypatch.setattr(afford, "planned", lambda *_: (row.total_s, row.flops, 8))
    limits = {"{:.4f}s": found.run_s, "{:.4f}flop": row.flops, "${:.4f}": found.run_s * 10 / 3600}
    for form, limit in limits.items():
        near = [form.format(x * limit) for x in (0.99, 1.01)]
        few, enough = (replace(request, budget=one) for one in near)
        assert afford.afford(enough, None, 1.25)[0].limit == pytest.approx(1.01 * limit, rel=1e-3)
        with pytest.raises(UsageError, match=r"are planned, .* allowed; plan less"):
            afford.afford(few, None, 1.25)
    with pytest.raises(UsageError, match="need --dollars"):
        afford.afford(replace(request, budget="$5"), None, None)


#: A command with what changes its request.
TYPED = {
    batch: "--runs 7 --then 40 --expect 3.277",
    run: "--replicas 2 --checkpoint-every 100 --sample-every 100",
    sweep: "--runs 2 --confirm 3 --features cooldown",
}
SHARED = "--track capped-8xh100 --recipe windows --devices 4 --attention banded --microbatches 16"


@pytest.mark.parametrize("command", TYPED, ids=lambda one: one.name)
def test_what_is_priced_is_what_would_be_declared(command, monkeypatch):
    """Whatever the options: the price is a function of the request, which is the same with --dry-run."""
    requests: list[Any] = []
    monkeypatch.setattr("speedrun.base.subprocesses.run_module", lambda _, one: requests.append(one) or 9)
    monkeypatch.setattr("speedrun.train.single_run.run", lambda job, *_: requests.append(job.config))
    monkeypatch.setattr("speedrun.lab.budget.budget", lambda one, *_, **__: requests.append(one) or 1 / 0)
    words = f"{SHARED} --set stages.0.num_steps=900 {TYPED[command]}".split()
    for more in (["--dry-run"], []):
        invoke(command.name, *words, *more)
    priced, declared = requests
    config = declared if command is run else declared.config
    assert (priced.config if command is run else priced) == declared
    assert (config.num_devices, config.attention, config.overrides["stages.0.num_steps"]) == (
        4,
        "banded",
        "900",
    )
