"""Ablations and sweeps: features, arms, seeds, the statistics of arms, and the way from a plan to a table."""

import dataclasses
import itertools
import json
import math
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from forgeries import BLEW_UP, BROKE
from record_forge import CONFIG, Spec, digest, source_text, write_code, write_run
from scipy import stats
from small_run import SMALL
from typed import as_words, invoke, speedrun

from speedrun import recipes
from speedrun.base import provenance, subprocesses, track
from speedrun.base.errors import SpeedrunError, UsageError
from speedrun.lab import declare_experiment, effects, experiments
from speedrun.lab import sweep as running
from speedrun.lab.experiments import BASELINE, Arm, Experiment, Request
from speedrun.record import layout
from speedrun.record.batch import TrackRef
from speedrun.record.logged_run import Run, read_run
from speedrun.record.reader import encode, read_files
from speedrun.record.validate import validate
from speedrun.science.recipe import Recipe, describe
from speedrun.train import keeper
from speedrun.train.recorded import train
from speedrun.train.run_config import RunConfig

HAD = [
    (name, feature)
    for name in recipes.names()
    for feature in recipes.load(name).features
    if recipes.load(name).without(feature)
]


def without(feature: str, recipe: str = "record21") -> Recipe:
    full = recipes.load(recipe)
    return full.override(full.without(feature))


@pytest.mark.parametrize(("recipe", "feature"), HAD)
def test_a_feature_that_is_off_is_another_recipe_which_does_not_have_it(recipe, feature):
    if recipe.startswith("record92") and feature == "other-values":
        with pytest.raises(UsageError, match="the end mix reads their embeddings"):
            without(feature, recipe)
        return
    less = without(feature, recipe)
    assert describe(less) != describe(recipes.load(recipe))
    assert less.without(feature) == {}


def test_what_is_off_is_what_the_name_says():
    record21 = recipes.load("record21").config
    unshared = without("shared-values").config.value_tables
    assert [table == -1 for table in unshared] == [table == -1 for table in record21.value_tables]
    assert len(set(unshared) - {-1}) == sum(table != -1 for table in unshared)
    assert without("short-windows").config.attention_kinds.count("none") == 1
    assert set(without("skipped-attention").config.attention_kinds) == {"long", "short"}
    warm = without("momentum-warm-up")
    assert warm.inputs_at(0)["momentum"] == warm.inputs_at(1000)["momentum"] == np.float32(0.95)
    for name in ("smoke", "record21"):
        whole = without("windows", name)
        seen = int(whole.inputs_at(1)["window_blocks"]) * whole.config.block_tokens
        assert seen >= max(whole.eval_seq_len, *(stage.seq_len for stage in whole.stages)), "from step 2 on"


def test_what_is_off_in_record_89_is_what_the_name_says():
    full = recipes.load("record89")
    less = without("other-values", "record89").config.layers
    for layer, other in zip(full.config.layers[:10], less[:10], strict=True):
        assert other.extras == tuple(extra for extra in layer.extras if extra != "value")
    assert less[10] == full.config.layers[10]
    whole = without("growing-windows", "record89")
    for kind, last in {"short_keys": 769, "long_keys": 2561}.items():
        assert {whole.inputs_at(step)[kind] for step in range(1286)} == {last}
    last = full.inputs_at(full.num_steps)["attention_scale"]
    for step in (0, 600, 1285):
        assert whole.inputs_at(step)["attention_scale"] == pytest.approx(last, rel=1e-5)


def test_what_is_off_in_record_92_is_what_the_name_says():
    full, whole = recipes.load("record92"), without("growing-windows", "record92")
    last = full.inputs_at(full.num_steps)
    for step in (0, 600, 1194):
        for name in ("short_keys", "long_keys", "short_scale", "long_scale"):
            assert whole.inputs_at(step)[name] == pytest.approx(last[name], rel=1e-5), (step, name)
    often = without("rare-updates", "record92")
    lengths = [often.stages[often.stage_of(step)].seq_len for step in range(often.num_steps)]
    assert [often.inputs_at(step)["update_tables"] for step in range(4)] == [0, 1, 0, 1]
    for step in range(1, often.num_steps, 2):
        waiting = sum(lengths[step - 1 : step + 1]) / lengths[step]
        assert waiting <= often.inputs_at(step)["rows_room"], step
    prefixes = [phase.prefix_weights for phase in full.schedule.phases]
    assert [
        phase.prefix_weights for phase in without("future-tokens", "record92").schedule.phases
    ] == prefixes


@pytest.fixture
def designed(tmp_path, monkeypatch):
    """`design`, where everything can be run that any recipe is."""

    def prepare(config: RunConfig) -> Any:
        assert config.recipe is not None
        recipe = recipes.load(config.recipe).override(config.overrides)
        program = SimpleNamespace(num_devices=8, microbatches=8, attention="auto")
        return SimpleNamespace(
            config=config,
            track=track.load(config.track),
            program=program,
            described={"recipe": describe(recipe)},
            source_sha256=digest(config.recipe),
        )

    monkeypatch.setattr(declare_experiment, "prepare", prepare)

    def make(kind, recipe: str = "smoke", overrides: dict[str, str] | None = None, **rest) -> Experiment:
        config = RunConfig("smoke-cpu", tmp_path / "new", recipe=recipe, overrides=overrides or {})
        return declare_experiment.design(Request(config, kind, num_runs=2, num_confirming=3, **rest))

    return make


def test_an_ablation_is_the_recipe_and_the_recipe_less_one_feature_each(designed, tmp_path):
    chosen = ("cooldown", "short-windows", "bfloat16-muon")
    found = designed("features", features=chosen, overrides={"stages.0.num_steps": "9"})
    off = [("no cooldown", BASELINE), ("no short-windows", BASELINE)]
    assert [(arm.name, arm.against) for arm in found.arms] == [(BASELINE, None), *off]
    assert found.arms[1].overrides == {"stages.0.num_steps": "9", "schedule.final_lr_scale": "1.0"}
    assert found.left_out == ("bfloat16-muon: smoke does not have it",)
    assert found.status == "research, not ranked"
    assert experiments.read(tmp_path / "new")[0] == found


def test_a_feature_that_cannot_be_turned_off_is_left_out_unless_it_is_named(designed):
    found = designed("features", recipe="record92", overrides={"size": "smoke"})
    assert len(found.arms) > 10
    (said,) = [text for text in found.left_out if text.startswith("other-values: ")]
    assert "the end mix reads their embeddings" in said
    with pytest.raises(UsageError, match="the end mix reads their embeddings"):
        designed("features", recipe="record92", features=("other-values",))


def test_a_ladder_is_each_recipe_against_its_parent(designed):
    found = designed("ladder", recipe="docs")
    rungs = [(arm.name, arm.recipe, arm.against) for arm in found.arms]
    assert rungs == [("smoke", "smoke", None), ("docs", "docs", "smoke")]


def test_a_sweep_leaves_out_what_is_there_already(designed):
    variants = tuple({"optimizer.muon_lr": lr, "schedule.final_window": "3"} for lr in ("0.05", "0.1"))
    found = designed("sweep", variants=variants)
    assert [arm.name for arm in found.arms] == [BASELINE, "muon_lr=0.1 final_window=3"]
    assert found.left_out == ("muon_lr=0.05 final_window=3: the same as 'as it is'",)


@pytest.mark.parametrize(
    "asked",
    [
        {"kind": "features", "features": ("cool-down",)},
        {"kind": "features", "features": ("bfloat16-muon",)},  # smoke does not have it
        {"kind": "ladder"},
        {"kind": "sweep", "variants": ({"nope": "1"},)},
    ],
)
def test_what_cannot_be_designed_is_refused_and_leaves_nothing(designed, tmp_path, asked):
    with pytest.raises(UsageError):
        designed(**asked)
    assert not (tmp_path / "new").exists()


def arms(*names: str) -> tuple[Arm, ...]:
    sums = {"config_sha256": layout.config_sha256(CONFIG), "source_sha256": digest(source_text())}
    return tuple(Arm(name, "tiny", {}, None if name == names[0] else names[0], **sums) for name in names)


def test_seeds_are_nobodys_choice_and_those_that_confirm_are_fresh():
    chosen, confirming = experiments.seeds_for(arms("a", "b"), 5, 7)
    assert (len(chosen), len(confirming), len({*chosen, *confirming})) == (5, 7, 12)
    assert all(0 <= seed < 2**31 for seed in (*chosen, *confirming))
    assert experiments.seeds_for(arms("a", "b"), 5, 7) == (chosen, confirming)
    for other in (experiments.seeds_for(arms("a", "c"), 5, 7), experiments.seeds_for(arms("a", "b"), 6, 7)):
        assert not {*chosen, *confirming} & {*other[0], *other[1]}


def test_a_sweep_is_every_combination_of_values():
    assert experiments.values("(0, -1),(1, 2)") == ("(0, -1)", "(1, 2)")
    assert experiments.values("float32, bfloat16") == ("float32", "bfloat16")
    with pytest.raises(UsageError, match="an empty value"):
        experiments.values("1,,2")
    every = [{"a": a, "b": b} for a in "12" for b in "xyz"]
    assert experiments.grid({"a": ("1", "2"), "b": ("x", "y", "z")}) == every
    with pytest.raises(UsageError, match="at most 200"):
        experiments.grid({name: tuple("1234567") for name in "abc"})


def test_holm_is_the_closure_of_bonferroni():
    """By definition: a hypothesis is rejected if every set of hypotheses that it stands in is."""
    chance = random.Random(0)
    for size in (1, 2, 3, 4, 5, 5, 5, 5):
        ps = [chance.random() ** 2 / 2 for _ in range(size)]
        sets = [one for n in range(1, size + 1) for one in itertools.combinations(range(size), n)]
        closed = [
            max(min(1.0, len(one) * min(ps[i] for i in one)) for one in sets if place in one)
            for place in range(size)
        ]
        assert effects.holm(ps) == pytest.approx(closed)
    assert effects.holm([]) == []


@pytest.fixture
def run(forged):
    count = itertools.count()

    def make(loss: float = 3.25, step_s: float = 0.1, seed: int = 1, **rest) -> Run:
        spec = Spec(seed=seed, step_s=(step_s,) * 10, val_losses=(5.5, 4.0, 3.4, loss), **rest)
        folder = forged / f"forged-{next(count)}"
        write_run(folder, spec)
        return read_run(read_files(folder)[0], spec.run_id)

    return make


def found_of(
    names: Sequence[str], seeds: Sequence[int], runs: experiments.Runs
) -> dict[str, effects.Finding]:
    base, *others = arms(*names)
    found = effects.findings([(arm, base) for arm in others], seeds, runs)
    return {one.arm: one for one in found}


def test_differences_are_taken_inside_pairs_and_loss_counts_as_time(run):
    """The baseline takes 1 s; 100 / 1770 of it buy 0.0045 nats. The third seed's arm ended badly, so its pair goes."""
    base, arm = (3.25, 3.25, 3.25), (3.265, 3.28, 0.0)
    runs = {("a", seed): run(loss, 0.1) for seed, loss in zip((1, 2, 3), base, strict=True)}
    runs |= {("b", seed): run(loss, 0.11) for seed, loss in zip((1, 2), arm, strict=False)}
    runs["b", 3] = run(seed=3, edit_log=BLEW_UP)
    found: Any = found_of("ab", (1, 2, 3), runs)["b"]
    assert (found.seeds, found.num_non_finite, found.verdict) == ((1, 2), 1, "non-finite")
    assert found.loss.mean == pytest.approx(0.0225)
    assert found.log_time.mean == pytest.approx(math.log(1.1))
    assert found.s_per_nat == pytest.approx(100 / 1770 / 0.0045)
    assert found.together_s.mean == pytest.approx(0.1 + 0.0225 * 100 / 1770 / 0.0045)
    expected = stats.t.interval(0.95, 1, loc=0.0225, scale=stats.sem([0.015, 0.03]))
    assert (found.loss.low, found.loss.high) == pytest.approx(expected)


def judged(run, differences_s: dict[str, Sequence[float]]) -> dict[str, effects.Finding]:
    """Arms that need so much longer than a baseline of 1 s, a number a seed."""
    seeds = range(1, 1 + len(next(iter(differences_s.values()))))
    runs = {("a", seed): run(step_s=0.1) for seed in seeds}
    runs |= {
        (name, seed): run(step_s=0.1 + more / 10)
        for name, row in differences_s.items()
        for seed, more in zip(seeds, row, strict=True)
    }
    return found_of(["a", *differences_s], seeds, runs)


def test_verdicts(run):
    wanted: dict[str, Sequence[float]] = {
        "worse": (0.1, 0.101, 0.102),
        "better": (-0.1, -0.101, -0.102),
        "equal": (0.001, -0.001, 0.0),
        "unresolved": (0.2, -0.2, 0.1),
    }
    found = judged(run, wanted)
    assert all(one.verdict == name for name, one in found.items()), found
    best = effects.winner(list(found.values()))
    assert best is found["better"]
    assert all(one.loss and one.loss.p == 1.0 for one in found.values()), "copies of one run prove nothing"


def test_more_arms_ask_for_more(run):
    row, noise = (0.05, 0.08, 0.06, 0.02), (0.1, -0.1, 0.2, -0.2)
    alone: Any = judged(run, {"b": row})["b"]
    assert (alone.verdict, alone.together_s and alone.together_s.p < 0.05) == ("worse", True)
    among: Any = judged(run, {"b": row, **{f"c{i}": noise for i in range(9)}})["b"]
    assert among.verdict == "unresolved"
    assert among.together_s.p == pytest.approx(alone.together_s.p)
    assert among.together_s.adjusted_p == pytest.approx(10 * alone.together_s.p)


def test_one_seed_tells_nothing(run):
    found = judged(run, {"b": (0.5,)})["b"]
    assert (found.verdict, found.loss, found.together_s) == ("unresolved", None, None)


ARMS = arms(BASELINE, "no brake", "no anchor")


@pytest.fixture
def performed(forged, monkeypatch):
    """An experiment of three arms whose runs are forged: "no brake" is faster. Tells which runs were asked for."""
    monkeypatch.setattr(provenance, "closure", lambda *_: source_text())
    folder = forged / "out"
    asked: list[tuple[str, int]] = []
    codes: list[int | None] = []  # of the next runs, else 0; None: it ends well and leaves nothing
    drawn: list[Path] = []

    def plan(num_confirming: int = 2) -> Experiment:
        seeds, confirming = experiments.seeds_for(ARMS, 2, num_confirming)
        made = Experiment(
            status="research, not ranked",
            kind="features",
            track=TrackRef("forged@1", track.sha256("forged")),
            num_devices=8,
            microbatches=8,
            attention="auto",
            arms=ARMS,
            left_out=("cannon: tiny does not have it",),
            seeds=seeds,
            confirming=confirming,
            created_utc="2026-10-02T00:00:00+00:00",
        )
        folder.mkdir(exist_ok=True)
        (folder / "experiment.json").write_bytes(encode(made))
        return made

    def designed(module: str, request: Request) -> int:
        assert module == "speedrun.lab.declare_experiment"
        plan(request.num_confirming)
        return 0

    def trained(job: keeper.Job, *_: object, **__: object) -> tuple[int, str]:
        out, seed = job.config.out, job.config.seed
        out.mkdir(parents=True)
        write_code(out, Spec())
        arm = out.parent.name[3:]
        asked.append((arm, seed))
        code = codes.pop(0) if codes else 0
        if code is None:
            return 0, ""
        noise = seed % 997 / 142_000  # no two alike: a variance of zero tells nothing
        step_s = (0.08 if arm == "no-brake" else 0.1) * (1 + noise)
        rest: dict[int, Any] = {
            0: {"seed": seed, "step_s": (step_s,) * 10},
            5: {"seed": seed, "edit_log": BLEW_UP},
        }
        spec = Spec(**rest[code]) if code in rest else dataclasses.replace(BROKE[0], seed=seed)
        write_run(out, spec)
        return code, ""

    monkeypatch.setattr(subprocesses, "run_module", designed)
    monkeypatch.setattr(keeper, "trained", trained)
    monkeypatch.setattr(running, "pictures", drawn.append)
    return SimpleNamespace(folder=folder, asked=asked, codes=codes, drawn=drawn, plan=plan)


def ablate(performed, *args: str):
    words = ["--track", "forged", "--features", "all", "--runs", "2", "--out", str(performed.folder)]
    return invoke("sweep", *words, *args)


def test_an_ablation_runs_confirms_and_tells(performed):
    result = ablate(performed)
    assert result.exit_code == 0, result.exception or result.output
    plan, _ = experiments.read(performed.folder)
    seeds = [seed for seed in plan.seeds for _ in range(3)]
    seeds += [seed for seed in plan.confirming for _ in range(2)]
    assert [seed for _, seed in performed.asked] == seeds
    assert [arm for arm, _ in performed.asked[6:]] == ["as-it-is", "no-brake", "no-brake", "as-it-is"]
    for said in ("left out  cannon: tiny does not have it", "run 4 of 6", "eta ", "research, not ranked"):
        assert said in result.stderr
    for said in ("no brake", "no brake, fresh seeds", "harmful: better without it", "research, not ranked"):
        assert said in result.stdout
    assert "no brake: confirmed by 2 fresh seeds" in result.stdout
    assert len(performed.drawn) == 10
    written = msgspec.json.decode((performed.folder / "summary.json").read_bytes(), type=effects.Summary)
    assert (written.status, written.num_runs) == ("research, not ranked", 10)
    assert {found.seeds for found in written.findings} == {plan.seeds}
    assert written.confirmation is not None
    assert written.confirmation.seeds == plan.confirming, "what was chosen by does not confirm"
    record = next(performed.folder.glob("01-no-brake/*"))
    assert "research, not ranked" in (record / "README.md").read_text()
    assert not validate(record).having("failed")


def test_what_broke_off_is_run_again_and_nothing_else_is(performed):
    performed.codes += [0, 0, 130]
    first = ablate(performed)
    assert (first.exit_code, len(performed.asked)) == (130, 3)
    assert f"resume with: speedrun sweep --resume {performed.folder}" in first.stderr
    again = invoke("sweep", "--resume", str(performed.folder), "--json")
    assert again.exit_code == 0, again.exception or again.output
    assert performed.asked[3] == performed.asked[2]
    assert len(performed.asked) == 3 + 3 + 1 + 4
    assert len(list(performed.folder.glob("*/*-*"))) == 11, "what crashed stays"
    assert json.loads(again.stdout)["summary"]["winner"] == "no brake"
    once_more = invoke("sweep", "--resume", str(performed.folder), "--json")
    assert json.loads(once_more.stdout) == json.loads(again.stdout)
    assert len(performed.asked) == 11, "nothing was missing"


def test_an_arm_that_blew_up_is_judged_by_that(performed):
    performed.codes += [0, 0, 5]
    result = ablate(performed, "--confirm", "0")
    assert (result.exit_code, len(performed.asked), len(performed.drawn)) == (0, 6, 5), result.exception
    assert "1 run became non-finite" in result.stdout
    assert "no brake: not confirmed, because no fresh seeds ran" in result.stdout
    assert [folder.parent.name for folder in performed.drawn].count("02-no-anchor") == 1


def test_a_run_that_ends_well_and_leaves_nothing_stops_it(performed):
    performed.codes += [None]
    result = ablate(performed)
    assert (result.exit_code, len(performed.asked), "--resume" in result.stderr) == (1, 1, True)


def test_a_plan_that_was_edited_is_refused(performed):
    plan = performed.plan()
    edited = msgspec.structs.replace(plan, arms=plan.arms[:2])
    (performed.folder / "experiment.json").write_bytes(encode(edited))
    result = invoke("sweep", "--resume", str(performed.folder))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "its seeds do not follow from its arms" in result.stderr


def test_what_was_designed_is_found_unchanged(smoke_data, tmp_path):
    """Nothing is patched: the design and the sweep must see the same source."""
    config = RunConfig("smoke-cpu", tmp_path / "sweep", overrides=SMALL, data=smoke_data)
    variants = ({"optimizer.muon_lr": "0.02"}, {"optimizer.muon_lr": "0.04"})
    declare_experiment.design(
        Request(config=config, kind="sweep", num_runs=2, num_confirming=0, variants=variants)
    )
    plan, _ = experiments.read(tmp_path / "sweep")
    modules = ["speedrun.recipes.smoke", "speedrun.train.recorded"]  # in the order of all records
    source = provenance.closure(modules, [track.TRACKS_DIR / "smoke-cpu.toml"])
    assert {arm.source_sha256 for arm in plan.arms} == {layout.sha256(source.encode())}

    def fails(_: object, configs: Iterable[RunConfig], __: object) -> Iterator[tuple[RunConfig, int]]:
        yield next(iter(configs)), 3

    with pytest.raises(SpeedrunError, match="a run ended with exit code 3"):
        running.run_sweep(tmp_path / "sweep", smoke_data, print, fails)


def test_another_source_or_run_is_no_part_of_it(performed, monkeypatch):
    plan = performed.plan()
    out = performed.folder / "00-as-it-is" / f"{plan.seeds[0]}-1"
    write_run(out, Spec(seed=1))
    result = invoke("sweep", "--resume", str(performed.folder))
    assert (result.exit_code, "move it away" in result.stderr) == (2, True)
    monkeypatch.setattr(provenance, "closure", lambda *_: source_text() + "\n")
    result = invoke("sweep", "--resume", str(performed.folder))
    assert (result.exit_code, "the source of tiny changed" in result.stderr, performed.asked) == (2, True, [])


#: With the smoke recipe's own layers.
FEW = {key: value for key, value in SMALL.items() if key != "config.attention_kinds"} | {
    "stages.0.num_steps": "4"
}


@pytest.mark.compile
@pytest.mark.parametrize("feature", [feature for recipe, feature in HAD if recipe == "smoke"])
def test_a_recipe_without_a_feature_trains(feature, smoke_data, tmp_path):
    """A value that the kernels cannot take would look like a feature of great worth."""
    off = {key: str(value) for key, value in recipes.load("smoke").override(FEW).without(feature).items()}
    done = train(RunConfig("smoke-cpu", tmp_path / "run", overrides=FEW | off, data=smoke_data))
    assert done.status == "finished"


@pytest.mark.compile
def test_real_runs_from_the_command_to_the_table(tmp_path, smoke_data):
    env, out = os.environ | {"SPEEDRUN_DATA": str(smoke_data.parent)}, tmp_path / "out"
    words = ["--features", "windows", "--runs", "2", "--confirm", "1", "--out", str(out), "--json"]
    first = speedrun("sweep", *words, *as_words(FEW), env=env)
    assert first.returncode == 0, first.stderr
    told = json.loads(first.stdout)
    assert [found["arm"] for found in told["summary"]["findings"]] == ["no windows"]
    assert len(told["summary"]["findings"][0]["seeds"]) == 2
    records = [*out.glob("0*/*-1")]
    assert len(records) == told["summary"]["num_runs"]
    assert all(not validate(record).having("failed") for record in records)
    assert json.loads(speedrun("sweep", "--resume", str(out), "--json", env=env).stdout) == told
