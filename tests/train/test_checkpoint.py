"""A resumed run ends with the bytes of an unbroken one; damage is found, named and never used."""

import errno
import os
import re
import shutil
import signal
from pathlib import Path
from pkgutil import resolve_name

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import Result
from small_run import SMALL, files, log_of, runs_of
from typed import invoke

from speedrun import recipes
from speedrun.base import mesh, runlog
from speedrun.base.atomic_files import lock_record
from speedrun.base.errors import CheckpointError, Terminated, UsageError
from speedrun.base.sourcefile import RECIPES_VARIABLE, recipe_folders
from speedrun.commands import is_here, pictures
from speedrun.data.stream import Cursor
from speedrun.record.logged_run import Run
from speedrun.record.salvage import salvage
from speedrun.record.summary import assemble
from speedrun.record.validate import validate
from speedrun.science.step import TrainState
from speedrun.train import recorded, resume_settings, run, run_config
from speedrun.train.checkpoint import CheckpointFacts, described, named, opened
from speedrun.train.preflight import prepare
from speedrun.train.program import Program
from speedrun.train.run_config import Resumable, RunConfig, decoded, folder_of, read_sealed, seal, steps_in

NUM_STEPS = 12


def steps(out: Path, run_id: str) -> list[tuple[object, ...]]:
    lines = runlog.read(out / "runs" / run_id / "metrics.jsonl")
    found = [line.event for line in lines if isinstance(line.event, runlog.Step)]
    return [(s.step, s.loss.hex(), s.tokens_seen, s.cursor, s.inputs) for s in found]


def copied(config: RunConfig, tmp_path: Path) -> Path:
    out = shutil.copytree(config.out, tmp_path / "out")
    shutil.copytree(folder_of(config.out), folder_of(out))
    return out


def kept(out: Path) -> list[int]:
    return sorted(int(path.name) for path in folder_of(out).iterdir() if path.name.isdigit())


def went_on(config: RunConfig, tmp_path: Path, after: int) -> tuple[Path, Run]:
    out = copied(config, tmp_path)
    for step in (step for step in kept(out) if step > after):
        shutil.rmtree(folder_of(out) / str(step))
    recorded.train(msgspec.structs.replace(config, out=out, resume=True))
    return out, runs_of(out)[-1]


def assert_says_only(out: Path, message: str) -> None:
    """The record is valid but for what says that a run went on."""
    assemble(out, title="went on")
    pictures(out)
    found = {r.check.id: r.messages for r in validate(out).results if r.status in ("failed", "warning")}
    assert found == {"V311": (message,)}


@pytest.mark.parametrize(
    "after", [1, *(pytest.param(k, marks=pytest.mark.compile) for k in range(2, NUM_STEPS + 1))]
)
def test_a_run_that_goes_on_ends_with_the_same_bytes(trained, tmp_path, after):
    out, new = went_on(trained, tmp_path, after)
    (old,) = runs_of(trained.out)
    assert new.end.final_hash == old.end.final_hash
    assert new.outcome == "finished"
    assert steps(out, new.folder) == steps(trained.out, old.folder)[after:]
    log = out / "runs" / old.folder / "metrics.jsonl"  # as if it was killed after the checkpoint
    raw = log.read_bytes().splitlines(keepends=True)
    kept_at = next(l.i for l in old.lines if isinstance(l.event, runlog.Checkpoint) and l.event.step == after)
    log.write_bytes(b"".join(raw[: kept_at + 1]))
    if after < NUM_STEPS:  # a plot needs a step
        assert_says_only(out, f"{new.folder}: resumes {old.folder} after step {after}")


def test_a_run_that_is_told_to_stop_keeps_its_state(trained, tmp_path, monkeypatch):
    out, real = tmp_path / "out", run.log_stage_change
    config = msgspec.structs.replace(trained, out=out, checkpoint_every=100)

    def tell(executables, step, log) -> None:
        real(executables, step, log)
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run, "log_stage_change", tell)
    with pytest.raises(Terminated, match="stopped by SIGTERM"):
        recorded.train(config)
    assert kept(out) == [7]
    assemble(out, title="stopped")
    (stopped,) = runs_of(out)
    assert [(r.start, r.stop) for r in stopped.data.shards] == [(0, 7 * 512)]
    (failed,) = validate(out).having("failed")
    told = f"{stopped.folder} crashed after 7 of 12 steps: Terminated: stopped by SIGTERM"
    assert (failed.check.id, failed.messages) == ("V301", ("0 of 1 runs finished", told))
    assert f"- {told}" in (out / "README.md").read_text()
    monkeypatch.setattr(run, "log_stage_change", real)
    recorded.train(msgspec.structs.replace(config, resume=True))
    assert runs_of(out)[-1].end.final_hash == runs_of(trained.out)[0].end.final_hash
    assert [run.outcome for run in runs_of(out)] == ["aborted", "finished"]


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_over(trained, tmp_path):
    out = tmp_path / "out"
    (killed,) = (trained.out / "runs").iterdir()
    shutil.copytree(killed, out / "runs" / killed.name)
    raw = (killed / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (out / "runs" / killed.name / "metrics.jsonl").write_bytes(b"".join(raw[: len(raw) // 2]))
    old = runs_of(trained.out)[0]
    salvage(out)
    recorded.train(msgspec.structs.replace(trained, out=out, resume=True))
    new = runs_of(out)[-1]
    assert new.end.final_hash == old.end.final_hash
    assert_says_only(out, f"{new.folder}: resumes {killed.name} after step 0")
    lines = [*runlog.read(out / "runs" / killed.name / "metrics.jsonl")]
    assert new.end.lost_s == (lines[-1].t_mono_ns - lines[0].t_mono_ns) / 1e9


@pytest.fixture
def untrained(monkeypatch) -> None:
    monkeypatch.setattr(recorded, "run", lambda *_: (_ for _ in ()).throw(CheckpointError("seen")))


@pytest.mark.usefixtures("untrained")
def test_what_was_killed_before_its_folder_appeared_starts_over(trained, tmp_path):
    """Only `run.json` of its checkpoints exists."""
    out = tmp_path / "out"
    folder_of(out).mkdir()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="seen"):
            recorded.train(msgspec.structs.replace(trained, out=out, resume=True))
        assert (out / "source.txt").read_bytes() == (trained.out / "source.txt").read_bytes()
        (out / "source.txt").unlink()
    shutil.rmtree(out)
    assert resume_settings.resumed(out).resume, "the command finds it, too"


@pytest.mark.parametrize(
    "reader", [*filter(is_here, ("train.resume_settings:resumed", "model.weights:load"))]
)
def test_a_recipe_of_ones_own_is_found_when_its_run_is_read(trained, tmp_path, monkeypatch, reader):
    monkeypatch.setenv(RECIPES_VARIABLE, str(tmp_path))
    out = copied(trained, tmp_path)
    shutil.rmtree(out)
    run_json = folder_of(out) / "run.json"
    kept = msgspec.structs.replace(
        read_sealed(run_json, Resumable), recipe_folders=("/of/mine", "here", str(out), f"{folder_of(out)}/1")
    )
    run_json.write_bytes(msgspec.json.encode(seal(msgspec.json.encode(kept, enc_hook=str))))
    resolve_name(f"speedrun.{reader}")(out)
    assert set(recipe_folders()) == {tmp_path, Path("/of/mine")}
    ready = prepare(msgspec.structs.replace(trained, out=tmp_path / "new"))
    assert decoded(ready.resumable, Resumable).recipe_folders == tuple(map(str, recipe_folders()))


@pytest.mark.usefixtures("untrained")
def test_what_was_killed_in_its_first_write_is_told_to_start_again(trained, tmp_path):
    out = tmp_path / "out"
    folder_of(out).mkdir()
    for name in (".lock", "run.json.partial"):
        (folder_of(out) / name).write_text("torn")
    result = resumed(out)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "killed before its settings were written; start it again" in result.stderr
    with pytest.raises(CheckpointError, match="seen"):
        recorded.train(msgspec.structs.replace(trained, out=out))


def test_a_second_run_into_one_folder_is_refused_without_checkpoints_too(trained, tmp_path):
    config = msgspec.structs.replace(trained, out=tmp_path / "out", checkpoint_every=0)
    with lock_record(config.out), pytest.raises(UsageError, match="another program writes into it"):
        recorded.train(config)
    assert not config.out.exists()


def test_an_earlier_log_that_is_damaged_is_told_before_anything_is_compiled(trained, tmp_path):
    out = copied(trained, tmp_path)
    log = log_of(out)
    log.write_bytes(log.read_bytes().replace(b'"ev":"plan"', b'"ev":"span"'))
    result = resumed(out)
    assert result.exit_code == 2, result.output
    assert "restore that file, or start a new run" in result.stderr
    assert len(list(out.glob("runs/*"))) == 1


def resumed(out: Path) -> Result:
    return invoke("run", "--resume", str(out))


def test_a_finished_run_whose_record_was_not_is_not_run_again(trained, tmp_path):
    """Killed while its record was assembled; it needs no checkpoint."""
    out = shutil.copytree(trained.out, tmp_path / "out")
    (out / "about.json").unlink()
    (out / "README.md.partial").write_text("half")
    shutil.rmtree(out / "plots", ignore_errors=True)
    result = resumed(out)
    assert result.exit_code == 1, result.output  # the target is out of reach of twelve steps
    assert "card    smoke-cpu@2: target 3.15 NOT reached" in result.stdout
    facts = msgspec.json.decode(invoke("run", "--resume", out, "--json").stdout)
    assert (facts["summary"]["target_reached"], facts["failed_checks"]) == (False, {})
    assert (out / "plots/loss.png").is_file() == is_here("board")
    assert (out / "README.md").read_text().startswith("# smoke on smoke-cpu@2")
    assert [path.name for path in (out / "runs").iterdir()] == [runs_of(trained.out)[0].folder]
    assert not validate(out).having("failed")


def test_a_changed_run_json_is_refused(trained, tmp_path):
    (out := tmp_path / "out").mkdir()
    path = shutil.copytree(folder_of(trained.out), folder_of(out)) / "run.json"
    raw = path.read_text()
    path.write_text(raw.replace('checkpoint_every\\":1', 'checkpoint_every\\":2'))
    assert path.read_text() != raw
    result = resumed(out)
    assert (result.exit_code, result.stderr.count("\n")) == (4, 1)
    assert "its digest does not fit" in result.stderr


def test_a_run_goes_on_only_with_the_source_it_began_with(trained, tmp_path):
    out = shutil.copytree(trained.out, tmp_path / "out")
    (out / "source.txt").write_text("other\n")
    with pytest.raises(UsageError, match="the source changed since"):
        recorded.train(msgspec.structs.replace(trained, out=out, resume=True))


def program(num_devices: int = 8, **overrides: str) -> Program:
    mesh.prepare("cpu")
    settings = SMALL | {name.replace("__", "."): value for name, value in overrides.items()}
    return Program(recipes.load("smoke").override(settings), mesh.make_mesh(num_devices))


@pytest.fixture(scope="module")
def small() -> Program:
    return program()


def facts(state, step: int) -> CheckpointFacts:
    return CheckpointFacts(
        step, "small-0-0000", "c" * 64, Cursor(0, 512 * step), 512 * step, 0.1 * step, described(state)
    )


def saved(folder: Path, *states: TrainState, keep: int = 0) -> Path:
    with opened(folder, b"{}", keep=keep) as checkpoints:
        for step, state in enumerate(states, start=1):
            checkpoints.save(state, facts(state, step))
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory, small) -> Path:
    states = (small.init(jax.random.key(step)) for step in (1, 2))
    return saved(tmp_path_factory.mktemp("written") / "checkpoints", *states)


@pytest.fixture
def copy(tmp_path, written) -> Path:
    return shutil.copytree(written, tmp_path / "checkpoints")


def restored(folder: Path, small: Program, said: list[str]) -> tuple[TrainState, CheckpointFacts]:
    with opened(folder, b"{}", keep=0) as checkpoints:
        return checkpoints.restore(small, "c" * 64, said.append)


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("num_devices", [1, 4, 8])
def test_a_state_comes_back_on_any_number_of_devices(copy, num_devices):
    other, said = program(num_devices, stages__0__num_steps="12"), []
    state, found = restored(copy, other, said)
    want = program().init(jax.random.key(2))
    assert found == facts(want, 2)
    assert said == []
    for name, array in named(want).items():
        np.testing.assert_array_equal(np.asarray(named(state)[name]), np.asarray(array), err_msg=name)
        assert named(state)[name].sharding.mesh.size == num_devices


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def blank(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4096] = bytes(len(content[middle : middle + 4096]))
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, blank, cut, Path.unlink])
def test_damage_is_found_and_the_step_before_is_taken(copy, small, damage):
    damage(largest(copy / "2"))
    said = []
    state, found = restored(copy, small, said)
    assert found.step == 1
    assert described(state) == facts(small.init(jax.random.key(1)), 1).arrays
    (line,) = said
    assert line.startswith("checkpoint 2 is damaged (")
    assert "\n" not in line
    assert not (copy / "2").exists()
    assert (copy / "2.damaged" / "facts").exists()


#: What reading facts or arrays may raise, and whether orbax wraps it in an error of its own.
NO_DAMAGE = {
    "status": ("state", True, ValueError('UNKNOWN: Error reading "x": Input/output error [os_error_code=5]')),
    "memory": ("state", True, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8")),
    "permission": ("facts", False, PermissionError(errno.EACCES, "Permission denied")),
    "no text": ("state", False, MemoryError()),
}


@pytest.mark.parametrize(("item", "is_wrapped", "error"), NO_DAMAGE.values(), ids=NO_DAMAGE)
def test_what_is_no_damage_stops_and_changes_nothing(copy, small, monkeypatch, error, item, is_wrapped):
    before = files(copy)

    def fail(*_args, **_named) -> None:
        if is_wrapped:  # as orbax does
            raise Exception("Encountered error while reading array index\nand so on") from error
        raise error

    with opened(copy, b"{}", keep=0) as checkpoints:
        where = (run_config, "read_regular") if item == "facts" else (ocp.Checkpointer, "restore")
        monkeypatch.setattr(*where, fail)
        reason = str(error).partition(" [")[0] or type(error).__name__
        said = re.escape(f"{copy / '2'}: cannot be read: {reason}; it is kept")
        with pytest.raises(CheckpointError, match=said):
            checkpoints.restore(small, "c" * 64, print)
    assert files(copy) == before


def test_a_pipe_in_a_checkpoint_is_not_waited_for(copy, small):
    (file := next(path for path in (copy / "2").rglob("*") if path.is_file())).unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=re.escape(f"{file} is not a regular file; move it away")):
        restored(copy, small, [])


@pytest.mark.parametrize(
    ("was", "becomes", "reason"),
    [
        ("[0,1024]", "[0,1025]", "its digest does not fit"),
        ('tokens_seen\\":1024', 'tokens_seen\\":1025', "its digest does not fit"),
        ("}", "", "Input data was truncated"),
        ("{", "[" * 100_000, "Expected `object`, got `array`"),
    ],
)
def test_a_changed_fact_is_damage_too(copy, small, was, becomes, reason):
    """No other check would notice a changed cursor, count of tokens or clock."""
    path = copy / "2" / "facts" / "metadata"
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, becomes, 1) if becomes else text.rstrip("}"))
    said = []
    assert restored(copy, small, said)[1].step == 1
    assert said == [f"checkpoint 2 is damaged ({reason}); kept as 2.damaged; the one before it is used"]


def test_swapped_checkpoints_are_damage(copy, small):
    (copy / "1").rename(copy / "3")
    shutil.rmtree(copy / "2")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        restored(copy, small, [])


def test_arrays_that_changed_places_are_damage(tmp_path, small):
    """They have one shape and dtype, so only their digests differ."""
    state = small.init(jax.random.key(0))
    params = {**state.params, "embed": state.params["head"], "head": state.params["embed"]}
    with opened(tmp_path, b"{}", keep=0) as checkpoints:
        checkpoints.save(state._replace(params=params), facts(state, 1))
    with pytest.raises(CheckpointError, match="embed is not what was written"):
        restored(tmp_path, small, [])


def test_no_changed_bit_of_what_was_sealed_passes(tmp_path):
    raw, path = '{"seed":"0","note":"größer \\" \\n"}'.encode(), tmp_path / "run.json"
    whole = msgspec.json.encode(seal(raw))
    path.write_bytes(whole)
    assert read_sealed(path, dict[str, str]) == msgspec.json.decode(raw)
    for place in range(0, 8 * len(whole), 7):  # in every byte, each bit in turn
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(ValueError):  # noqa: PT011 - of the parser, or of the digest
            read_sealed(path, dict[str, str])


def test_no_whole_checkpoint_is_an_error(copy, small):
    for step in ("1", "2"):
        flip(largest(copy / step))
    before = files(copy)
    with pytest.raises(CheckpointError, match=r"no whole checkpoint; 2 is damaged \(.*\); 1 is damaged \("):
        restored(copy, small, [])
    assert files(copy) == before


def test_a_step_that_is_damaged_again_keeps_both(copy, small):
    for _ in range(2):
        flip(largest(copy / "2"))
        with opened(copy, b"{}", keep=0) as checkpoints:
            state, _ = checkpoints.restore(small, "c" * 64, lambda _: None)
            assert steps_in(copy) == [1]
            checkpoints.save(state, facts(state, 2))
    assert {path.name for path in copy.iterdir()} >= {"1", "2", "2.damaged", "2.damaged+"}


def test_the_state_of_another_model_is_refused(copy):
    with pytest.raises(CheckpointError, match=r"is nothing, need float32\["):
        restored(copy, program(config__mlp_dim="64"), [])


def test_another_dtype_is_refused_not_cast(tmp_path, small):
    state = small.init(jax.random.key(0))
    narrow = state._replace(params={name: x.astype("bfloat16") for name, x in state.params.items()})
    saved(tmp_path, narrow)
    with pytest.raises(CheckpointError, match=r"is bfloat16\[.*\], need float32\["):
        restored(tmp_path, small, [])


def test_the_run_of_another_config_is_refused(copy, small):
    refused = pytest.raises(CheckpointError, match="of a run with another config")
    with opened(copy, b"{}", keep=0) as checkpoints, refused:
        checkpoints.restore(small, "d" * 64, print)


def test_one_process_writes_at_a_time(copy):
    refused = pytest.raises(CheckpointError, match="another program writes into it")
    with opened(copy, b"{}", keep=0), refused, opened(copy, b"{}", keep=0):
        pass


def test_what_a_killed_writer_left_is_removed(copy, small):
    left, file = copy / "3.orbax-checkpoint-tmp-1", copy / "45.orbax-checkpoint-tmp-1"
    (left / "state").mkdir(parents=True)
    file.touch()
    assert restored(copy, small, [])[1].step == 2
    assert not left.exists()
    assert file.exists()


def test_the_newest_are_kept(tmp_path, small):
    saved(tmp_path, *3 * [small.init(jax.random.key(0))], keep=2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["2", "3"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path, small, monkeypatch):
    state = small.init(jax.random.key(0))

    def full(*_args, **_named) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: no space left\nand a page of traces")

    with opened(tmp_path, b"{}", keep=0) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "save", full)
        said = "step 1 or the one before cannot be written: RESOURCE_EXHAUSTED: no space left;"
        with pytest.raises(CheckpointError, match=said):
            checkpoints.save(state, facts(state, 1))
