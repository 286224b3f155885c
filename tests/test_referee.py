"""What a run says of its final state is asked of that state; each lie is told apart."""

import dataclasses
import functools
import math
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from record_forge import forge, install_track
from test_checkpoint import facts_of, unbroken  # noqa: F401 - a fixture
from test_train import SMALL

from speedrun import program, recipes, runlog, scoring, track
from speedrun.checkpoint import folder_of
from speedrun.cli import command
from speedrun.errors import CheckpointError, UsageError
from speedrun.examine import examine
from speedrun.ledger.assemble import assemble
from speedrun.ledger.checks.replay import REPLAY_CHECKS
from speedrun.ledger.findings import Examination, Findings, Restart
from speedrun.ledger.record import load
from speedrun.ledger.validate import ask, find_check, validate
from speedrun.prepare import RunConfig
from speedrun.recipe import Recipe
from speedrun.referee import chosen, examined

# --- the checks, on findings that are made up --------------------------------------------------------------


@pytest.fixture
def record(tmp_path, monkeypatch):
    install_track(tmp_path)
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)
    return load(forge(tmp_path / "record"))


def honest(run) -> Findings:
    losses = {event.step: event.loss for event in run.steps}
    return Findings(
        final_hash=run.file.final_hash,
        val_loss=run.val_loss + 1e-5,
        masses=(1.0, 0.99995),
        leak=0.0,
        company=1e-7,
        restarts=(Restart(4, "a" * 16, (losses[4], losses[5])), Restart(8, "b" * 16, (losses[8], losses[9]))),
    )


def asked(record, findings: Findings) -> dict[str, str]:
    results = [ask(one.of(record.runs[0], findings), record) for one in REPLAY_CHECKS]
    return {result.check.id: result.status for result in results}


LIES = [
    ("V601", {"val_loss": 3.2}),
    ("V601", {"val_loss": math.nan}),
    ("V601", {"final_hash": "0" * 16}),
    ("V602", {"masses": (1.0, 1.01)}),
    ("V602", {"masses": (math.nan,)}),
    ("V603", {"leak": 0.1}),
    ("V603", {"leak": math.nan}),
    ("V604", {"company": 0.01}),
    ("V605", {"restarts": (Restart(4, "a" * 16, (4.61, 4.3)),)}),
    ("V605", {"restarts": (Restart(8, "a" * 16, (math.nan,)),)}),
]


@pytest.mark.parametrize(("id", "lie"), LIES, ids=[f"{id}-{next(iter(lie))}" for id, lie in LIES])
def test_a_lie_is_refused_by_its_check_alone(record, id, lie):
    assert set(asked(record, honest(record.runs[0])).values()) == {"ok"}
    found = asked(record, replace(honest(record.runs[0]), **lie))
    assert {one for one, status in found.items() if status != "ok"} == {id}
    assert found[id] == "failed"


def test_a_checkpoint_is_the_one_that_the_log_names(record):
    run = record.runs[0]
    lines = (*run.lines, replace(run.lines[-1], event=runlog.Checkpoint(4, "c" * 16, 0.1)))
    kept = dataclasses.replace(record, runs=(dataclasses.replace(run, lines=lines), *record.runs[1:]))
    assert asked(kept, honest(run))["V605"] == "failed"
    right = replace(honest(run), restarts=(Restart(4, "c" * 16, honest(run).restarts[0].losses),))
    assert asked(kept, right)["V605"] == "ok"


def test_without_a_checkpoint_to_go_on_from_it_is_not_asked(record):
    assert asked(record, replace(honest(record.runs[0]), restarts=()))["V605"] == "skipped"


def test_a_vocabulary_that_is_too_large_is_not_asked(record):
    assert asked(record, replace(honest(record.runs[0]), masses=()))["V602"] == "skipped"


def test_nobody_knows_the_checkpoints_before_the_log_is_finished(record):
    steps, (first, second) = list(range(0, 200, 10)), record.runs
    assert chosen(first, steps) == chosen(first, steps[::-1])
    assert len(set(chosen(first, steps))) == 2
    assert chosen(first, [40]) == (40,)
    assert chosen(first, []) == ()
    assert chosen(first, steps) != chosen(second, steps)


def test_the_checks_are_explained_and_have_ids_of_their_own():
    assert [one.check.id for one in REPLAY_CHECKS] == ["V601", "V602", "V603", "V604", "V605"]
    assert find_check("V603").why


def test_nothing_of_a_record_that_fails_is_executed(record, monkeypatch):
    monkeypatch.setattr("speedrun.referee.Rerun", None)
    (record.root / "source.txt").write_text("#")
    report = validate(record.root)
    with pytest.raises(UsageError, match="V003 failed; nothing was executed"):
        examined(record.root, report, checkpoints=None, data=None, echo=sys.stdout)


def test_a_source_older_than_checkpoints_is_told():
    committed = Path(__file__).parent.parent / "records" / "smoke-cpu" / "2026-11-21-first"
    result = CliRunner().invoke(command, ["validate", str(committed), "--replay"])
    assert result.exit_code == 2
    assert "its source is older than checkpoints" in result.stderr


# --- the examiner, on a run that was made ------------------------------------------------------------------


def examination(config: RunConfig, tmp_path: Path, **changes) -> Examination:
    asked = {
        "track": config.track,
        "out": str(tmp_path / "out"),
        "overrides": config.overrides,
        "data": str(config.data),
    }
    given = {
        "config": asked,
        "checkpoints": folder_of(config.out),
        "restarts": (3, 9),
        "num_replayed": 4,
        "findings": tmp_path / "findings.json",
    }
    return Examination(**{**given, **changes})


def test_an_honest_run_is_what_it_says(unbroken, tmp_path):  # noqa: F811
    assemble(unbroken.out, title="small", declared_runs=1)
    (run,) = load(unbroken.out).runs
    found = examine(examination(unbroken, tmp_path))
    assert found.final_hash == run.file.final_hash == facts_of(unbroken.out)[0].final_hash
    assert found.val_loss == pytest.approx(run.val_loss, abs=1e-5)
    assert found.masses == pytest.approx((1.0, 1.0), abs=1e-4)
    assert (found.leak, found.company < 1e-6) == (0.0, True)
    losses = [event.loss for event in run.of(runlog.Step)]
    assert [restart.losses for restart in found.restarts] == [tuple(losses[3:7]), tuple(losses[9:12])]
    kept = {event.step: event.state_hash for event in run.of(runlog.Checkpoint)}
    assert [(restart.step, restart.state_hash) for restart in found.restarts] == [
        (k, kept[k]) for k in (3, 9)
    ]


def cheat(monkeypatch, forward) -> None:
    recipe = recipes.load("smoke")
    monkeypatch.setattr(recipes, "load", lambda _: dataclasses.replace(recipe, forward=forward(recipe)))


def peeks(recipe: Recipe):
    @functools.wraps(recipe.forward)  # under its name: another one would be another config
    def forward(params, tokens_BT, window, cfg, kernels):
        x_BTD = recipe.forward(params, tokens_BT, window, cfg, kernels)
        return x_BTD + 0.01 * jnp.roll(tokens_BT, -1, axis=1)[..., None].astype(x_BTD.dtype)

    return forward


def test_a_model_that_sees_the_next_token_is_seen(unbroken, tmp_path, monkeypatch):  # noqa: F811
    cheat(monkeypatch, peeks)
    assert examine(examination(unbroken, tmp_path, restarts=())).leak > 0.001


@pytest.mark.slow
def test_a_loss_that_is_no_distribution_is_seen(unbroken, tmp_path, monkeypatch):  # noqa: F811
    honest = scoring.nll_sums
    monkeypatch.setattr(scoring, "nll_sums", lambda *args, **named: 0.99 * honest(*args, **named))
    found = examine(examination(unbroken, tmp_path, restarts=()))
    assert all(mass > 1.01 for mass in found.masses)


@pytest.mark.slow
def test_a_sequence_that_knows_its_neighbours_is_seen(unbroken, tmp_path, monkeypatch):  # noqa: F811
    honest = program.Program.eval_step_for

    def knows(self, window):
        score = honest(self, window)

        def scored(*args):
            nll_BC = score(*args)
            return nll_BC + 1e-3 * jnp.roll(nll_BC, 1, axis=0)

        return scored

    monkeypatch.setattr(program.Program, "eval_step_for", knows)
    assert examine(examination(unbroken, tmp_path, restarts=())).company > 1e-5


@pytest.mark.slow
def test_a_checkpoint_that_is_not_there_is_told(unbroken, tmp_path):  # noqa: F811
    with pytest.raises(CheckpointError, match="no checkpoint 77"):
        examine(examination(unbroken, tmp_path, restarts=(77,)))


@pytest.mark.slow
def test_the_command_runs_a_record_again_and_asks_its_state(tmp_path, smoke_data):
    out = tmp_path / "out"
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    CliRunner().invoke(command, ["run", "--data", str(smoke_data), "--out", str(out), *settings])
    argv = [sys.executable, "-m", "speedrun", "validate", str(out), "--replay", "--data", str(smoke_data)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.split()[1:2] and line.split()[1] in LIES_IDS] == [
        "ok"
    ] * 5


LIES_IDS = {id for id, _ in LIES}
