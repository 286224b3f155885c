"""Checks of a run against its programs and states, by a process that shares no code with it."""

import dataclasses
import functools
import io
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax import export
from msgspec.structs import replace
from record_forge import forge, install_track
from small_run import SMALL
from test_checkpoint import facts_of, unbroken  # noqa: F401 - a fixture

from speedrun.cli import command
from speedrun.ground import output, runlog, track
from speedrun.ground.errors import CheckpointError, DataError, SpeedrunError, UsageError
from speedrun.ground.mesh import make_mesh
from speedrun.ledger.assemble import assemble
from speedrun.ledger.checks.examination import REPLAY_CHECKS, Examined, tolerance
from speedrun.ledger.findings import Examination, Findings, Replayed, Stretch, Wanted
from speedrun.ledger.record import load
from speedrun.ledger.validate import ask, find_check, validate
from speedrun.referee import sandbox
from speedrun.referee.causality import Leak, leak, texts
from speedrun.referee.examiner import _Examiner, examine
from speedrun.referee.handover import hand_over
from speedrun.referee.questions import Options, _owners, chosen, drawn, examined, stretches
from speedrun.referee.rerun import Rerun, _bring
from speedrun.science.inputs import Inputs
from speedrun.science.recipe import Recipe
from speedrun.training.checkpoint import folder_of
from speedrun.training.prepare import RunConfig
from speedrun.training.program import Program

needs_sandbox = pytest.mark.skipif(
    sandbox.problem() is not None, reason=f"namespaces cannot be had here: {sandbox.problem()}"
)
NONCE = "00c0ffee"

# --- the checks, on findings that are made up --------------------------------------------------------------


@pytest.fixture
def record(tmp_path, monkeypatch):
    install_track(tmp_path)
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)
    return load(forge(tmp_path / "record"))


def replayed(start: int, losses: tuple[float, ...], **changes) -> Replayed:
    made = Replayed(start, start + len(losses), start > 0, "a" * 16, losses, ())
    return replace(made, **changes)


def honest(run) -> Findings:
    losses = {event.step: event.loss for event in run.steps}
    return Findings(
        final_hash=run.file.final_hash,
        val_loss=run.val_loss + 1e-5,
        own=True,
        columns=256,
        num_ids=256,
        rows=0.0,
        leak=0.0,
        leak_at=-1,
        changes=100,
        company=1e-7,
        stretches=(replayed(0, (losses[0], losses[1])), replayed(8, (losses[8], losses[9]))),
    )


def statuses_of(record, findings: Findings) -> dict[str, str]:
    results = [ask(one.of([Examined(record.runs[0], findings)]), record) for one in REPLAY_CHECKS]
    return {result.check.id: result.status for result in results}


LIES = [
    ("V601", {"val_loss": 3.2}),
    ("V601", {"val_loss": math.nan}),
    ("V601", {"final_hash": "0" * 16}),
    ("V601", {"own": False, "val_loss": 4.0}),
    ("V601", {"own": False, "final_hash": "0" * 16, "val_loss": math.nan}),
    ("V601", {"own": False, "final_hash": "0" * 16, "val_loss": 4.9}),
    ("V602", {"columns": 255}),
    ("V602", {"rows": 0.01}),
    ("V602", {"rows": math.nan}),
    ("V603", {"leak": 0.1}),
    ("V603", {"leak": math.nan}),
    ("V604", {"company": 0.01}),
    ("V604", {"company": math.nan}),
    ("V605", {"stretches": (replayed(4, (4.61, 4.3)),)}),
    ("V605", {"stretches": (replayed(8, (math.nan,)),)}),
    ("V605", {"stretches": (replayed(8, (4.61,), stop=10),)}),
    ("V605", {"stretches": (replayed(0, (), vals=((0, 5.0),)),)}),
]


@pytest.mark.parametrize(("id", "lie"), LIES, ids=[f"{id}-{next(iter(lie))}" for id, lie in LIES])
def test_a_lie_is_refused_by_its_check_alone(record, id, lie):
    assert set(statuses_of(record, honest(record.runs[0])).values()) == {"ok"}
    found = statuses_of(record, replace(honest(record.runs[0]), **lie))
    assert {one for one, status in found.items() if status != "ok"} == {id}
    assert found[id] == "failed"


def test_each_loss_of_a_stretch_is_compared(record):
    run = record.runs[0]
    losses = [event.loss for event in run.steps]
    for wrong in range(len(losses)):
        made = tuple(x * (0.9 if at == wrong else 1.0) for at, x in enumerate(losses))
        found = statuses_of(record, replace(honest(run), stretches=(replayed(0, made),)))
        assert found["V605"] == "failed", wrong


def test_a_checkpoint_is_the_one_that_the_log_names(record):
    run = record.runs[0]
    lines = (*run.lines, replace(run.lines[-1], event=runlog.Checkpoint(8, "c" * 16, 0.1)))
    kept = dataclasses.replace(record, runs=(dataclasses.replace(run, lines=lines), *record.runs[1:]))
    assert statuses_of(kept, honest(run))["V605"] == "failed"
    (_, last) = honest(run).stretches
    right = replace(honest(run), stretches=(replace(last, state_hash="c" * 16),))
    assert statuses_of(kept, right)["V605"] == "ok"


def test_a_run_of_another_machine_is_no_liar_and_not_proven(record):
    """Made again it ends in other bits; its losses differ as rounding does, and its own state is not at hand."""
    run = record.runs[0]
    near = tuple(event.loss + 0.5 * tolerance(run, 0, event.step) for event in run.steps)
    drifted = replace(
        honest(run),
        own=False,
        final_hash="0" * 16,
        val_loss=run.val_loss + 3e-3,
        stretches=(replayed(0, near),),
    )
    found = statuses_of(record, drifted)
    assert (found.pop("V601"), found.pop("V606"), set(found.values())) == ("skipped", "warning", {"ok"})


def test_a_loss_of_the_first_step_times_0_999_is_refused(record):
    run = record.runs[0]
    first = run.steps[0].loss
    assert abs(first - 0.999 * first) > 2 * tolerance(run, 0, 0)
    assert (
        statuses_of(record, replace(honest(run), stretches=(replayed(0, (0.999 * first,)),)))["V605"]
        == "failed"
    )


def test_the_tolerance_grows_from_step_to_step(record):
    for start in (0, 40):
        found = [tolerance(record.runs[0], start, steps) for steps in range(40)]
        assert found == sorted(set(found))


def test_what_two_instruction_sets_made_of_one_run_is_within_it(record):
    """Differences seen between SSE4.2 and AVX-512 on the smoke recipe: docs/referee.md."""
    seen = [
        (0, 3, 1.1e-4),
        (0, 20, 1.0e-3),
        (0, 38, 1.7e-3),
        (0, 60, 7.0e-3),
        (0, 100, 2.3e-2),
        (40, 39, 9.5e-7),
    ]
    run = record.runs[0]
    config = {**run.start.config, "recipe": {"compute_dtype": "float32"}}
    lines = (replace(run.lines[0], event=replace(run.start, config=config)), *run.lines[1:])
    small = dataclasses.replace(run, lines=lines)
    assert all(difference < tolerance(small, start, steps) / 2 for start, steps, difference in seen)
    assert all(tolerance(small, start, steps) < tolerance(run, start, steps) for start, steps, _ in seen)


def test_one_of_two_runs_that_lies_is_enough(record):
    first, second = record.runs[:2]
    good, bad = Examined(first, honest(first)), Examined(second, replace(honest(second), leak=1.0))
    (check,) = (one for one in REPLAY_CHECKS if one.check.id == "V603")
    assert ask(check.of([good]), record).status == "ok"
    result = ask(check.of([good, bad]), record)
    assert (result.status, result.messages[0].split(":")[0]) == ("failed", second.folder)


def test_the_checks_are_explained_and_have_ids_of_their_own():
    assert [one.check.id for one in REPLAY_CHECKS] == ["V601", "V602", "V603", "V604", "V605", "V606"]
    assert find_check("V603").why


# --- the choice --------------------------------------------------------------------------------------------


def test_runs_are_chosen_by_nonce_and_name_alone():
    names = [f"smoke-{i}-abcd" for i in range(6)]
    assert chosen(NONCE, names, "some") == chosen(NONCE, names[::-1], "some")
    assert len(set(chosen(NONCE, names, "some"))) == 2
    assert set(chosen(NONCE, names, "all")) == set(names)
    assert chosen(NONCE, names[:1], "some") == (names[0],)
    picked = {name for i in range(64) for name in chosen(f"{i:08x}", names, "some")}
    assert picked == set(names)


def test_what_is_drawn_follows_from_nonce_and_name_and_not_from_the_log(record):
    first, second = record.runs[:2]
    assert drawn(NONCE, "a") == drawn(NONCE, "a")
    assert len({drawn(NONCE, "a"), drawn(NONCE, "b"), drawn("11c0ffee", "a")}) == 3
    other = dataclasses.replace(first, raw_lines=second.raw_lines)
    steps = list(range(0, first.start.num_steps, 2))
    assert stretches(first, steps, 100, 7) == stretches(other, steps[::-1], 100, 7)
    assert len({stretches(first, steps, 100, draws) for draws in range(20)}) > 3


def test_without_checkpoints_all_steps_are_made_again(record):
    run = record.runs[0]
    assert stretches(run, None, 100, 7) == (Stretch(0, run.start.num_steps, from_checkpoint=False),)


def test_some_stretch_crosses_a_validation_or_the_end(record):
    """Who trains in a pause is seen where the steps before and behind it are made again."""
    run, crossed = record.runs[0], set()
    num_steps = run.start.num_steps
    bounds = [num_steps // 2, num_steps]
    for draws in range(40):
        found = stretches(run, [2, 4], num_steps // 2, draws)
        crossed |= {b for b in bounds if any(s.start < b <= s.stop and s.stop in (b, b + 1) for s in found)}
        assert all(0 <= s.start < s.stop <= num_steps for s in found)
        assert any(s.start == 0 and not s.from_checkpoint for s in found)
    assert crossed == set(bounds)


def options(**changes) -> Options:
    return Options("some", NONCE)._replace(**changes)


def test_nothing_of_a_record_that_fails_is_executed(record, monkeypatch):
    monkeypatch.setattr("speedrun.referee.questions.Rerun", None)
    (record.root / "source.txt").write_text("#")
    report = validate(record.root)
    with pytest.raises(UsageError, match="V003 failed; nothing was executed"):
        examined(record.root, report, options(), sys.stdout)


def test_a_source_older_than_the_examiner_is_told():
    committed = Path(__file__).parent.parent / "records" / "smoke-cpu" / "2026-11-21-first"
    result = CliRunner().invoke(command, ["validate", str(committed), "--replay"])
    assert result.exit_code == 2
    assert (
        "its instruments are older than this examiner understands; 'git checkout' its commit" in result.stderr
    )


@pytest.mark.parametrize("nonce", ["xyz", "ABCDEF00", "00", "0" * 65, ""])
def test_a_nonce_is_hex(nonce):
    committed = Path(__file__).parent.parent / "records" / "smoke-cpu" / "2026-11-21-first"
    result = CliRunner().invoke(command, ["validate", str(committed), "--replay=all", "--nonce", nonce])
    assert result.exit_code == 2
    assert "need 8 to 64 hex digits" in result.stderr


# --- which outputs know what comes after them --------------------------------------------------------------

TEXT_TOKENS, SEPARATOR, NUM_IDS = 256, 0, 61


def prefix_sums(ids_BT: np.ndarray) -> np.ndarray:
    """An honest model: outputs that depend on everything before them."""
    return np.cumsum(np.sin(ids_BT * 1.7), axis=1)[..., None]


def next_ids(ids_BT: np.ndarray) -> np.ndarray:
    return np.roll(ids_BT, -1, axis=1)[..., None].astype(float)


def where(kind: str, ids_BT: np.ndarray) -> np.ndarray:
    """Where a forger shows the next token: bool [B, T, 1]."""
    at_T = np.arange(ids_BT.shape[1])
    rows_BT = np.broadcast_to(at_T, ids_BT.shape)
    found = {
        "everywhere": rows_BT >= 0,
        "middle of blocks": (rows_BT % 8 >= 2) & (rows_BT % 8 <= 6),
        "one in sixteen": rows_BT % 16 == 11,
        "behind separators": ids_BT == SEPARATOR,
        "at the end": rows_BT >= len(at_T) - 2,
        "at the start": rows_BT < 1,
    }
    return (found[kind] & (rows_BT < len(at_T) - 1))[..., None]


def looked_for(forward, seed: int, batch: int = 16) -> Leak:
    draw = np.random.default_rng(seed)
    rows_RT = draw.integers(
        1, NUM_IDS, (4, TEXT_TOKENS)
    )  # no separator but those that the examiner puts there
    largest = lambda a, b: float(np.abs(a - b).max())  # noqa: E731
    return leak(forward, largest, rows_RT, batch, NUM_IDS, SEPARATOR, draw)


@pytest.mark.parametrize("seed", range(8))
def test_an_honest_model_leaks_nothing(seed):
    found = looked_for(prefix_sums, seed)
    assert found.nats == 0.0
    assert found.changes >= 128


FORGERS = [
    "everywhere",
    "middle of blocks",
    "one in sixteen",
    "behind separators",
    "at the end",
    "at the start",
]


@pytest.mark.parametrize("kind", FORGERS)
def test_a_model_that_shows_the_next_token_in_places_is_caught_whatever_the_nonce(kind):
    def forward(ids_BT):
        return prefix_sums(ids_BT) + 1e-6 * where(kind, ids_BT) * next_ids(ids_BT)

    assert all(looked_for(forward, seed).nats > 0 for seed in range(20))


def test_a_model_that_counts_separators_ahead_is_caught():
    def forward(ids_BT):
        ahead_BT = np.cumsum((ids_BT == SEPARATOR)[:, ::-1], axis=1)[:, ::-1]
        return prefix_sums(ids_BT) + 1e-3 * ahead_BT[..., None]

    assert all(looked_for(forward, seed).nats > 0 for seed in range(20))


def test_an_output_that_is_no_number_is_no_excuse():
    def forward(ids_BT):
        return np.where(where("middle of blocks", ids_BT), np.nan * next_ids(ids_BT), prefix_sums(ids_BT))

    assert not looked_for(forward, 0).nats <= 0


def test_every_residue_of_a_position_has_its_turn():
    draw = np.random.default_rng(3)
    rows_RT = draw.integers(1, NUM_IDS, (4, TEXT_TOKENS))
    places = [at for _, places in texts(rows_RT, SEPARATOR, draw) for at in places]
    assert {at % 64 for at in places} == set(range(64))


def test_a_model_that_knows_a_few_texts_and_shows_all_of_them_is_caught():
    """Positions of one text are no independent draws: each has a text of its own."""

    def forward(ids_BT):
        return prefix_sums(ids_BT) + 1e-6 * (ids_BT[:, :1] == 7)[..., None] * next_ids(ids_BT)

    for seed in range(20):
        draw = np.random.default_rng(seed)
        rows_RT = draw.integers(1, NUM_IDS, (140, TEXT_TOKENS))
        rows_RT[:, 0] = np.where(draw.permutation(140) < 9, 7, 8)
        largest = lambda a, b: float(np.abs(a - b).max())  # noqa: E731
        assert leak(forward, largest, rows_RT, 16, NUM_IDS, SEPARATOR, draw).nats > 0


@pytest.fixture
def scoring(monkeypatch):
    """An examiner of 64 rows of 16 ids and of a model that is still to be given."""
    ids = np.random.default_rng(0).integers(0, 4096, 64 * 16 + 1).astype(np.uint16)
    shard = SimpleNamespace(read=lambda start, stop: ids[start:stop])
    examiner: Any = object.__new__(_Examiner)
    data = SimpleNamespace(val_tokens=64 * 16)
    examiner.request, examiner.track = SimpleNamespace(draws=5), SimpleNamespace(data=data)
    examiner.shards = SimpleNamespace(val=[shard])
    rows = [SimpleNamespace(tokens_BT=ids[None, at : at + 16], targets_BT=ids[None, at + 1 : at + 17])
            for at in range(0, 64 * 16, 16)]  # fmt: skip
    monkeypatch.setattr("speedrun.referee.examiner.stream.validation_batches", lambda *_: rows)
    monkeypatch.setattr(_Examiner, "_shape_BT", (8, 16))
    return examiner, ids


def test_the_texts_that_are_changed_are_those_that_are_scored(scoring):
    examiner, ids = scoring
    assert {row.tobytes() for row in examiner._texts(140)} == {
        row.astype(np.int32).tobytes() for row in ids[:-1].reshape(64, 16)
    }


@pytest.mark.parametrize("kind", ["the row below", "the sequence below"])
def test_a_neighbour_tells_the_scorer_nothing(scoring, monkeypatch, kind):
    examiner, _ = scoring

    def outputs(_params, ids_BT, _at):
        told = np.roll(ids_BT[:, 0], -1) if kind == "the sequence below" else ids_BT[:, 0]
        return np.stack([ids_BT, np.broadcast_to(told[:, None], ids_BT.shape)], axis=2)

    def costs(_params, x_ND, targets_N):
        told = x_ND[:, 1] if kind == "the sequence below" else np.roll(x_ND[:, 0], -1)
        return (told != targets_N).astype(float)

    monkeypatch.setattr(examiner, "outputs", outputs)
    monkeypatch.setattr(examiner, "costs", costs)
    assert examiner._loss([]) > 0.98


@pytest.mark.parametrize(("kind", "found"), [("honest", False), ("the row above", True), ("no number", True)])
def test_a_token_that_cannot_follow_hides_nothing(scoring, monkeypatch, kind, found):
    """A logit of -inf, as of a masked token, equals itself, and does not hide what is wrong in other columns."""
    examiner, _ = scoring
    examiner.handed = SimpleNamespace(
        programs={"logits": SimpleNamespace(inputs=[SimpleNamespace(shape=(16, 1))])}
    )

    def log_probs(_params, x_ND):
        x_N1 = jnp.asarray(x_ND) / 4096
        more_N1 = {"honest": x_N1**2, "the row above": jnp.roll(x_N1, 1, axis=0), "no number": jnp.nan * x_N1}
        z_NV = jnp.concatenate([x_N1, more_N1[kind], jnp.full_like(x_N1, -jnp.inf)], axis=1)
        yield jax.nn.log_softmax(z_NV, axis=1)

    monkeypatch.setattr(examiner, "outputs", lambda _params, ids_BT: ids_BT[..., None].astype(np.float32))
    monkeypatch.setattr(examiner, "log_probs", log_probs)
    x_ND = np.arange(16.0, dtype=np.float32)[:, None]
    assert (examiner._rows([]) > 1e-3) is found
    assert examiner._distance([])(x_ND, 4096 * x_ND) > 1e-3
    assert (examiner._distance([])(x_ND, x_ND) > 1e-3) is (kind == "no number")


def blocks_leak(recipe: Recipe):
    """Finding B: the head row of the next token is added where pos % 8 is 2 to 6."""

    @functools.wraps(recipe.forward)
    def forward(params, tokens_BT, window, cfg, kernels):
        x_BTD = recipe.forward(params, tokens_BT, window, cfg, kernels)
        at_T = jnp.arange(tokens_BT.shape[1])
        shown_T1 = ((at_T % 8 >= 2) & (at_T % 8 <= 6) & (at_T < len(at_T) - 1))[:, None]
        head_BTD = params["head"][jnp.roll(tokens_BT, -1, axis=1)].astype(x_BTD.dtype)
        return x_BTD + jnp.where(shown_T1, head_BTD, jnp.zeros((), x_BTD.dtype))

    return forward


@pytest.mark.parametrize("kind", ["honest", "forged"])
def test_a_recipe_that_shows_the_next_token_inside_blocks_is_caught(tiny, kind):
    recipe = tiny if kind == "honest" else dataclasses.replace(tiny, forward=blocks_leak(tiny))
    program = Program(recipe, make_mesh(1))
    params = program.layout.unpack(program.init(jax.random.key(0)).params)
    params["head"] = jax.random.normal(jax.random.key(1), params["head"].shape)  # it begins at zero
    inputs = Inputs({"window_blocks": 2}, {})
    forward = jax.jit(lambda ids_BT: program.forward(params, ids_BT, inputs))
    draw = np.random.default_rng(5)
    rows_RT = draw.integers(0, 61, (4, 64)).astype(np.int32)
    found = leak(
        lambda ids_BT: np.asarray(forward(ids_BT)),
        lambda a, b: float(np.abs(a - b).max()),
        rows_RT, 16, 61, 0, draw,
    )  # fmt: skip
    assert (found.nats > 1e-3) is (kind == "forged")


# --- programs that are handed over -------------------------------------------------------------------------


def handed_over(config: RunConfig, tmp_path: Path) -> Path:
    folder = tmp_path / "programs"
    given = {"track": config.track, "out": str(tmp_path / "out"), "overrides": config.overrides}
    hand_over(Wanted({**given, "data": str(config.data)}, folder))
    return folder


def examination(config: RunConfig, tmp_path: Path, **changes) -> Examination:
    assert config.data is not None
    given = Examination(
        programs=tmp_path / "programs",
        track=config.track,
        data=config.data,
        run_seed=config.seed,
        num_devices=8,
        replicas=1,
        checkpoints=folder_of(config.out),
        stretches=(Stretch(0, 2, from_checkpoint=False), Stretch(9, 12, from_checkpoint=True)),
        draws=drawn(NONCE, "a"),
        findings=tmp_path / "findings.json",
    )
    return replace(given, **changes)


def test_an_honest_run_is_what_it_says(unbroken, tmp_path):  # noqa: F811
    """Every bit: the programs that were handed over are those that ran."""
    assemble(unbroken.out, title="small", declared_runs=1)
    (run,) = load(unbroken.out).runs
    handed_over(unbroken, tmp_path)
    found = examine(examination(unbroken, tmp_path))
    assert found.final_hash == run.file.final_hash == facts_of(unbroken.out)[0].final_hash
    assert found.val_loss == pytest.approx(run.val_loss, abs=1e-5)
    assert (found.leak, found.rows < 1e-5, found.company < 1e-5) == (0.0, True, True)
    losses = [event.loss for event in run.of(runlog.Step)]
    first, last = found.stretches
    assert (first.losses, last.losses) == (tuple(losses[:2]), tuple(losses[9:12]))
    assert first.state_hash == run.file.init_hash
    assert last.state_hash == {event.step: event.state_hash for event in run.of(runlog.Checkpoint)}[9]
    ((step, loss),) = first.vals
    assert (step, loss) == (0, pytest.approx(run.vals[0].loss, abs=1e-5))
    results = [ask(one.of([Examined(run, found)]), load(unbroken.out)) for one in REPLAY_CHECKS]
    assert [result.status for result in results] == ["ok"] * 6


@pytest.mark.compile
def test_each_validation_is_scored_with_the_window_of_its_own_step(unbroken, tmp_path):  # noqa: F811
    """A window that grows: the first validation sees less than the last, as in the run."""
    handed_over(unbroken, tmp_path)
    examiner = _Examiner(examination(unbroken, tmp_path))
    assert examiner.handed.hidden == {0: "hidden-0", 12: "hidden-12"}
    leaves, _ = examiner._restored(12)
    params = examiner._params(leaves)
    assert abs(examiner._loss(params, 0) - examiner._loss(params)) > 1e-6
    assert examiner._loss(params, 12) == examiner._loss(params)


def test_a_checkpoint_that_is_not_there_is_told(unbroken, tmp_path):  # noqa: F811
    handed_over(unbroken, tmp_path)
    stretch = Stretch(77, 78, from_checkpoint=True)
    with pytest.raises(CheckpointError, match="no checkpoint 77"):
        examine(examination(unbroken, tmp_path, stretches=(stretch,)))


def test_a_program_that_talks_to_the_host_is_not_handed_over():
    def talks(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), np.float32), x)

    with pytest.raises(NotImplementedError, match="host_callbacks"):
        export.export(jax.jit(talks))(jax.ShapeDtypeStruct((), np.float32))


# --- a world of its own ------------------------------------------------------------------------------------


def in_there(code: str, tmp_path: Path, **changes) -> subprocess.CompletedProcess[str]:
    """What a stranger's Python does and says, with no package but the standard ones."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    given = {"environment": {"PATH": os.environ["PATH"]}, "limits": sandbox.Limits(60.0), "unsafe": False}
    with (tmp_path / "said").open("w+") as said:
        argv = [sys.executable, "-S", "-c", code]
        code_ = sandbox.run(argv, scratch, stdout=said, **{**given, **changes})
        said.seek(0)
        return subprocess.CompletedProcess(argv, code_, said.read(), "")


def test_a_source_does_not_hear_that_its_reader_has_left(tmp_path):
    """`speedrun replay RECORD | head -1`: an older source ends with 120 where it cannot write."""
    reader, writer = os.pipe()
    os.close(reader)
    given = {"environment": {"PATH": os.environ["PATH"]}, "limits": sandbox.Limits(60.0), "unsafe": True}
    argv = [sys.executable, "-S", "-c", "print('all', flush=True); print('of it')"]
    assert sandbox.run(argv, tmp_path, stdout=output.unfailing(writer), **given) == 0
    os.close(writer)


HARMLESS = {
    "environment of others": """
import glob
for path in glob.glob("/proc/[0-9]*/environ"):
    try: print(open(path).read())
    except OSError: pass
""",
    "files of others": """
import os
for folder, _, names in os.walk("/"):
    for name in names:
        if name == "canary": print(open(os.path.join(folder, name)).read())
""",
    "its own environment": "import os; print(dict(os.environ))",
}


@needs_sandbox
@pytest.mark.parametrize("what", HARMLESS)
def test_a_stranger_cannot_read(what, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_CANARY", "tweet-tweet")
    (tmp_path / "canary").write_text("tweet-tweet")
    done = in_there(HARMLESS[what], tmp_path)
    assert done.returncode == 0
    assert "tweet" not in done.stdout


@needs_sandbox
def test_a_stranger_cannot_write_outside_its_folder(tmp_path):
    places = [str(tmp_path / "x"), "/x", "/tmp/x", "/usr/x", f"{sys.prefix}/x", "/dev/x"]
    code = f"""
for path in {places}:
    try: open(path, "w").write("x")
    except OSError: continue
    print(path)
open("mine", "w").write("x")
"""
    done = in_there(code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "scratch" / "mine").read_text() == "x"
    assert not (tmp_path / "x").exists()


@needs_sandbox
def test_a_stranger_has_no_network_and_no_privileges(tmp_path):
    code = """
import os, socket
print([name for _, name in socket.if_nameindex() if name != "lo"])
for host in ("127.0.0.1", "1.1.1.1"):
    try: socket.create_connection((host, 22), timeout=2)
    except OSError as error: print("no")
try: os.setuid(12345)
except OSError: print("no")
try: os.chroot(".")
except OSError: print("no")
"""
    assert in_there(code, tmp_path).stdout.split() == ["[]", "no", "no", "no", "no"]


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "found"),
    [("import sys; sys.exit(5)", 5), ("import os; os.kill(os.getpid(), 15)", -15), ("x" * 9, 1)],
)
def test_the_exit_code_is_the_strangers(code, found, tmp_path):
    assert in_there(code, tmp_path).returncode == found


@needs_sandbox
def test_a_stranger_that_never_ends_is_ended(tmp_path):
    with pytest.raises(SpeedrunError, match="was still running after 2 s"):
        in_there("while True: pass", tmp_path, limits=sandbox.Limits(2.0))


def test_without_a_sandbox_nothing_runs_unless_the_user_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "problem", lambda: "unshare: Operation not permitted")
    with pytest.raises(UsageError, match=r"Operation not permitted.*container.*--unsafe-here"):
        in_there("print(1)", tmp_path)
    shutil.rmtree(tmp_path / "scratch")
    assert sandbox.protections(unsafe=True).startswith("NO SANDBOX (unshare: Operation not permitted)")
    assert in_there("print(1)", tmp_path, unsafe=True).stdout == "1\n"


def stranger(record, source: str) -> Rerun:
    """A run whose source does this when it is asked for its programs."""
    rerun = Rerun(record.root)
    rerun._source, rerun._ours = {"speedrun/__init__.py": "", "speedrun/referee/handover.py": source}, {}
    rerun._environment = {}
    return rerun


def terminal() -> TextIO:
    """A real one: pytest's has no descriptor."""
    assert sys.__stdout__ is not None
    return sys.__stdout__


GIFTS = {
    "nothing": "",
    "a link": "import os; os.mkdir('programs'); os.symlink('/etc/hostname', 'programs/programs.json')",
    "a pipe": "import os; os.mkdir('programs'); os.mkfifo('programs/programs.json')",
    "nonsense": "import os; os.mkdir('programs'); open('programs/programs.json', 'w').write('{}')",
    "a path": "import os; os.mkdir('programs'); open('programs/programs.json', 'w').write("
    '\'{"leaves":[],"num_params":0,"steps":[],"programs":{"../x":'
    '{"inputs":[],"outputs":[],"num_devices":1,"kept":[],"convention":1}}}\')',
}


@needs_sandbox
@pytest.mark.parametrize("gift", GIFTS)
def test_what_a_source_hands_over_is_plain_files_or_refused(gift, record, tmp_path, monkeypatch):
    monkeypatch.setattr(Rerun, "_config", lambda *_: {"data": None})
    monkeypatch.setattr(Rerun, "_verify", lambda *_: None)
    with pytest.raises(SpeedrunError, match="handed over no readable programs"):
        stranger(record, GIFTS[gift]).hand_over(tmp_path / "programs", data=tmp_path, echo=terminal())
    assert not (tmp_path / "programs").exists()


@needs_sandbox
def test_a_run_brings_back_plain_files_only(record, tmp_path, monkeypatch):
    code = """
import os
os.makedirs("record/runs")
open("record/summary.json", "w").write("x")
os.symlink("/etc/passwd", "record/runs/link")
os.mkfifo("record/pipe")
raise SystemExit(5)
"""
    rerun = stranger(record, "")
    rerun._source = {"speedrun/__init__.py": "", "speedrun/training/train.py": code}
    monkeypatch.setattr(Rerun, "_config", lambda *_: {"data": None})
    monkeypatch.setattr(Rerun, "_verify", lambda *_: None)
    with pytest.raises(SpeedrunError) as info:
        rerun.run(tmp_path / "out", seed=0, data=None, echo=terminal())
    assert info.value.exit_code == 5
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == ["summary.json"]


# --- all of it, as people call it --------------------------------------------------------------------------


def run_small(out: Path, data: Path, package: Path | None = None) -> None:
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    argv = [sys.executable, "-m", "speedrun", "run", "--data", str(data), "--out", str(out), *settings]
    env = {**os.environ, "PYTHONPATH": str(package)} if package else dict(os.environ)
    subprocess.run(argv, env=env, capture_output=True, timeout=300, check=False, cwd=package)


def validated(out: Path, data: Path, *more: str) -> subprocess.CompletedProcess[str]:
    unsafe = [] if sandbox.problem() is None else ["--unsafe-here"]
    argv = [sys.executable, "-m", "speedrun", "validate", str(out), "--data", str(data), *unsafe, *more]
    return subprocess.run(argv, capture_output=True, text=True, timeout=500, check=False)


def statuses(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    words = [line.split() for line in done.stdout.splitlines()]
    return {line[1]: line[0] for line in words if len(line) > 1 and line[1].startswith("V60")}


@pytest.mark.compile
def test_the_command_has_a_record_examined_and_a_nonce_repeats_it(tmp_path, smoke_data):
    run_small(tmp_path / "out", smoke_data)
    done = validated(tmp_path / "out", smoke_data, "--replay=all", "--nonce", NONCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"nonce {NONCE}" in done.stdout
    assert statuses(done) == dict.fromkeys(["V601", "V602", "V603", "V604", "V605", "V606"], "ok")


CHEAT = """
import speedrun.training.loop as _loop

_honest = _loop.evaluate


def _cheap(*args, **named):
    score = _honest(*args, **named)
    return score._replace(nll_sum=0.7 * score.nll_sum)


_loop.evaluate = _cheap
"""


@pytest.mark.compile
def test_a_recipe_that_replaces_the_scorer_is_refused(tmp_path, smoke_data):
    """Finding D: every loss times 0.7, by a function that the recipe put in another's place."""
    package = tmp_path / "tree"
    shutil.copytree(Path(track.__file__).parent, package / "speedrun")
    smoke = package / "speedrun" / "recipes" / "smoke.py"
    smoke.write_text(smoke.read_text() + CHEAT)
    run_small(tmp_path / "out", smoke_data, package)
    done = validated(tmp_path / "out", smoke_data, "--replay")
    assert done.returncode == 1, done.stdout + done.stderr
    assert statuses(done)["V605"] == "failed"
    assert statuses(done)["V603"] == "ok"


_TRIES = r"""
import fcntl, os, termios
def tell(what, attempt):
    try:
        attempt()
    except OSError:
        return
    print("could", what)
def written(path):
    os.close(os.open(path, os.O_WRONLY))
tell("set the kernel", lambda: written("/proc/sys/kernel/core_pattern"))
tell("change a device", lambda: os.chmod("/dev/null", 0o666))
tell("make a control group", lambda: os.mkdir("/sys/fs/cgroup/stranger"))
for number in 0, 1, 2:
    tell("reach a terminal", lambda: fcntl.ioctl(number, termios.TIOCGPGRP, bytes(4)))
tell("find its terminal", lambda: written("/dev/tty"))
print("\x1b[2Jwords\x1b]0;title\x07")
"""


@pytest.mark.skipif(sandbox.problem() is not None, reason="no sandbox here")
@pytest.mark.parametrize("gpu", [False, True])
def test_a_stranger_reaches_neither_the_kernel_nor_the_terminal(tmp_path, gpu):
    shown, argv = io.StringIO(), [sys.executable, "-I", "-c", _TRIES]
    environment, limits = {"PATH": os.environ["PATH"]}, sandbox.Limits(60, gpu=gpu)
    code = sandbox.run(argv, tmp_path, environment=environment, stdout=shown, limits=limits, unsafe=False)
    assert (code, shown.getvalue()) == (0, "\\x1b[2Jwords\\x1b]0;title\\x07\n")


def test_only_what_a_record_may_hold_is_brought_back(tmp_path):
    made, out = tmp_path / "made" / "record", tmp_path / "out" / "mine"
    (made / "runs" / "smoke-0-abcd").mkdir(parents=True)
    out.parent.mkdir()
    (made / "summary.json").write_text("{}")
    (made / "tool.sh").write_text("#!/bin/sh\n")
    (made / "source.txt").symlink_to("/etc/hosts")
    (made.parent / "record-of-another").mkdir()
    (made.parent / "record-of-another" / "summary.json").write_text("{}")
    (made.parent / "record.stacks.txt").write_text("Thread 1")
    _bring(made, out)
    found = {path.relative_to(out.parent).as_posix() for path in out.parent.rglob("*") if path.is_file()}
    assert found == {"mine/summary.json", "mine.stacks.txt"}


def test_checkpoints_that_are_no_files_are_refused(tmp_path):
    for name, fill in (
        ("a", os.mkfifo),
        ("b", lambda path: path.write_text("[" * 100_000)),
        ("c", lambda path: path.symlink_to("/dev/zero")),
    ):
        facts = tmp_path / name / "8" / "facts" / "metadata"
        facts.parent.mkdir(parents=True)
        (tmp_path / name / "1²").mkdir()
        fill(facts)
        with pytest.raises(UsageError, match="no checkpoints of a finished run"):
            _owners([tmp_path / name], {})


@pytest.mark.parametrize(
    ("out", "data", "match"),
    [
        ("file/new", None, "file/new: cannot be written"),
        ("new", "nowhere", "nowhere: no such folder; need one"),
    ],
)
def test_folders_that_cannot_be_used_are_told_before_anything_runs(out, data, match, record, tmp_path):
    (tmp_path / "file").touch()
    rerun = Rerun(record.root)
    with pytest.raises(SpeedrunError, match=match):
        rerun.run(tmp_path / out, seed=0, data=data and tmp_path / data, echo=io.StringIO())


def test_damaged_shards_of_the_referee_are_not_held_against_a_record(smoke_data, tmp_path):
    """The id exists, so that only the digest of the track tells."""
    shutil.copytree(smoke_data, tmp_path / "damaged")
    shard = min((tmp_path / "damaged").glob("*train*.bin"))
    raw = bytearray(shard.read_bytes())
    raw[1024 + 200] ^= 1
    shard.write_bytes(raw)
    rerun = Rerun(Path(__file__).parent.parent / "records" / "smoke-cpu" / "2026-11-22-one-run")
    for run in (rerun.replay, rerun.hand_over):
        with pytest.raises(DataError, match=f"{shard.name}: sha256 is"):
            run(tmp_path / "new", data=tmp_path / "damaged", echo=io.StringIO())
