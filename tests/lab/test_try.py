"""A recipe against its parent, pair by pair: the test that decides, and the way from the command to the verdict."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from record_forge import Spec, source_text, write_code, write_run
from scipy import special
from small_run import log_of
from test_experiment import arms
from typed import invoke

from speedrun.base import provenance, runlog, track
from speedrun.base.budget import flops
from speedrun.lab import afford, declare_experiment, experiments, sequential
from speedrun.lab import sweep as running
from speedrun.lab.experiments import Experiment, Request
from speedrun.record.batch import TrackRef
from speedrun.record.reader import encode
from speedrun.train import keeper
from speedrun.train.run_config import RunConfig

SEQUENCES = 10_000


@pytest.mark.parametrize("num_pairs", [5, 12, 40])
def test_false_verdicts_and_power_are_as_stated(num_pairs):
    """Any look may decide: of equal recipes 1 % at most; of those that differ by what is promised, 80 %, rightly."""
    rng, n = np.random.default_rng(num_pairs), np.arange(2, num_pairs + 1)
    levels_N = sequential.levels(num_pairs)
    reach_N = special.stdtrit(n - 1, 1 - np.asarray(levels_N)[1:] / 2)
    noise_MN = rng.standard_normal((SEQUENCES, num_pairs))
    rates = {}
    for shift in (0.0, -sequential.resolved(num_pairs)):
        x_MN = noise_MN + shift
        mean_MN = x_MN.cumsum(1)[:, 1:] / n
        sd_MN = np.sqrt(((x_MN**2).cumsum(1)[:, 1:] - n * mean_MN**2) / (n - 1))
        t_MN = mean_MN / sd_MN * np.sqrt(n)
        decided_M = (np.abs(t_MN) > reach_N).any(1)
        first_M = (np.abs(t_MN) > reach_N).argmax(1)
        better_M = decided_M & (t_MN[np.arange(SEQUENCES), first_M] < 0)
        rates[shift] = decided_M.mean(), better_M.mean()
        for one, stop, is_decided in zip(x_MN[:50], first_M, decided_M, strict=False):
            looks = [sequential.answer(one[:k], levels_N).verdict for k in range(num_pairs + 1)]
            found = [place for place, verdict in enumerate(looks) if verdict != "unresolved"]
            assert found[:1] == [stop + 2] * int(is_decided), "the test of the package is this one"
    (false, _), (decided, better) = rates.values()
    assert false <= sequential.ALPHA
    assert sequential.POWER - 0.015 <= better <= 0.9, "the promise is not far from the truth"
    assert decided == better
    assert sequential.answer([-1.0] * num_pairs, levels_N).verdict == "unresolved", "copies prove nothing"


@pytest.fixture
def trying(forged, monkeypatch):
    """A try whose runs are forged; the recipe is better by 0.1 nats. Tells what was asked for."""
    monkeypatch.setattr(provenance, "closure", lambda *_: source_text())
    monkeypatch.setattr(running, "pictures", lambda _: None)
    folder, asked = forged / "out", list[tuple[str, int]]()

    def designed(_: str, request: Request) -> int:
        both, number = arms("parent", "recipe"), request.num_runs
        levels = sequential.levels(number) if request.kind == "try" else ()
        kind: dict[str, Any] = {"kind": request.kind, "budget": request.budget, "levels": levels}
        split = {
            "num_devices": 8,
            "microbatches": 8,
            "attention": "auto",
            "left_out": (),
            "created_utc": "2026-10-02T00:00:00+00:00",
        }
        seeds = dict(zip(("seeds", "confirming"), experiments.seeds_for(both, number, 0), strict=True))
        rules = TrackRef("forged@1", track.sha256("forged"))
        made = Experiment("research, not ranked", track=rules, arms=both, **kind, **split, **seeds)
        folder.mkdir()
        (folder / "experiment.json").write_bytes(encode(made))
        return 0

    def trained(job: keeper.Job, *_: object) -> tuple[int, str]:
        out, seed = job.config.out, job.config.seed
        out.mkdir(parents=True)
        write_code(out, Spec())
        asked.append((out.parent.name[3:], seed))
        nth = [*dict.fromkeys(one for _, one in asked)].index(seed)  # two pairs decide nothing, three do
        loss = 3.25 - (0.1 - 0.0005 * (nth % 2)) * (asked[-1][0] == "recipe")
        write_run(out, Spec(seed=seed, attempt=asked[-1][0][0], val_losses=(5.5, 4.0, 3.4, loss)))
        return 0, ""

    monkeypatch.setattr("speedrun.base.subprocesses.run_module", designed)
    monkeypatch.setattr(keeper, "trained", trained)
    write_run(forged / "one", Spec())
    newest: Any = {type(line.event): line.event for line in runlog.read(log_of(forged / "one"))}
    monkeypatch.setattr(afford, "planned", lambda one, _: (None, 2 * one.num_runs * flops(newest), 0))
    return SimpleNamespace(folder=folder, asked=asked, run_flop=flops(newest))


def test_a_sweep_that_its_budget_ends_prints_what_it_found(trying):
    words = ["--track", "forged", "--set", "optimizer.muon_lr=0.1,0.2", "--runs", "2", "--confirm", "0"]
    budget = ["--budget", f"{4.1 * trying.run_flop:.0f}flop"]
    whole = invoke("sweep", *words, "--out", str(trying.folder), *budget)
    assert (whole.exit_code, len(trying.asked)) == (0, 4), whole.stderr
    lost = next(trying.folder.glob("00*/*-1"))  # as if it had been killed
    (lost / "runs").rename(lost / "lost")
    spent = invoke("sweep", "--resume", str(trying.folder))
    assert (spent.exit_code, len(trying.asked)) == (2, 4)
    assert "with a larger --budget goes on" in spent.stderr
    assert "not resolvable with 1 seed" in spent.stderr
    assert json.loads((trying.folder / "summary.json").read_bytes())["num_runs"] == 3


def test_a_try_ends_with_its_verdict_and_goes_on_after_its_budget(trying):
    words = ["smoke", "--against", "docs", "--track", "forged", "--out", str(trying.folder), "--budget"]
    short = invoke("try", *words, f"{3 * trying.run_flop:.0f}flop")
    assert (short.exit_code, "less than two; one takes" in short.stderr, trying.asked) == (2, True, [])
    first = invoke("try", *words, f"{11.1 * trying.run_flop:.0f}flop")
    assert first.exit_code == 0, first.stderr
    assert "with 5 pairs in this budget, differences of at least" in first.stderr
    assert "verdict better, 3 of at most 5 pairs: -0.09" in first.stdout
    seeds = [seed for _, seed in trying.asked]
    assert seeds[::2] == seeds[1::2], "in pairs"
    assert [arm for arm, _ in trying.asked] == ["parent", "recipe", "recipe", "parent", "parent", "recipe"]
    plan = experiments.read(trying.folder)[0]
    assert [*plan.seeds[:3]] == seeds[::2]
    for attempt in trying.folder.glob(f"0*/{plan.seeds[2]}-1"):  # as if it had been killed here
        (attempt / "runs").rename(attempt / "lost")
    spent = invoke(
        "try", "--resume", str(trying.folder), "--budget", f"{6.5 * trying.run_flop:.0f}flop", "--json"
    )
    told = json.loads(spent.stdout)["summary"]
    assert (spent.exit_code, told["verdict"], told["num_pairs"], len(trying.asked)) == (1, "unresolved", 2, 6)
    assert "with a larger --budget goes on" in spent.stderr
    more = invoke("try", "--resume", str(trying.folder), "--budget", f"{20 * trying.run_flop:.0f}flop")
    assert (more.exit_code, more.stdout) == (0, first.stdout), "the same test, to the same end"
    assert trying.asked[6:] == trying.asked[4:6]
    path = trying.folder / "experiment.json"
    for wrong in ((), (0.5, *plan.levels[1:])):
        path.write_bytes(encode(replace(plan, levels=wrong)))
        edited = invoke("try", "--resume", str(trying.folder))
        assert (edited.exit_code, "its test does not follow from its seeds" in edited.stderr) == (2, True)


def test_a_try_is_two_arms_with_the_same_settings():
    config = RunConfig("smoke-cpu", Path("new"), recipe="docs", overrides={"stages.0.num_steps": "9"})
    drafts, _ = declare_experiment.arms(Request(config, "try", 2, 0, against="smoke"))
    assert [(name, recipe.num_steps, other) for name, recipe, other in drafts] == [
        ("smoke", 9, None),
        ("docs", 9, "smoke"),
    ]
