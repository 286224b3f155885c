"""Runs with injected faults: files stay whole, and a resumed run ends with the same bytes.

Points are named in `speedrun.base.faults`. Each case is a process of its own; what it did is read from its files.
"""

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import test_checkpoint
from small_run import SMALL, children_of, events, log_of, runs_of
from test_checkpoint import kept, steps
from typed import invoke, speedrun

from speedrun import recipes
from speedrun.base import faults, provenance, runlog, subprocesses
from speedrun.base.errors import HANG, CheckpointError, NonFiniteError, StorageError
from speedrun.data import shards
from speedrun.record.logged_run import Run
from speedrun.record.salvage import salvage
from speedrun.record.summary import assemble
from speedrun.science.params import ParamSpec, normal
from speedrun.train import recorded
from speedrun.train.run_config import RunConfig, folder_of

EVERY = 5
TIMEOUT_S = 600

_CANARY = "canary-of-nobody-0123456789"
#: What every process here has in its environment, and what none may write anywhere.
CANARIES = {
    "HF_TOKEN": f"hf_{_CANARY}",
    "WANDB_API_KEY": _CANARY,
    "HTTPS_PROXY": f"http://user:{_CANARY}@127.0.0.1:9",
    "PIP_INDEX_URL": f"https://user:{_CANARY}@127.0.0.1:9/simple",
}


@pytest.fixture(scope="module", autouse=True)
def no_orphans() -> Iterator[None]:
    """No child outlives these tests."""
    yield
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.fixture(scope="session")
def config(trained) -> RunConfig:
    """A run with a checkpoint after 5, 10 and 12 steps."""
    return msgspec.structs.replace(trained, checkpoint_every=EVERY)


@pytest.fixture(scope="session")
def unbroken(trained) -> Run:
    (made,) = runs_of(trained.out)
    return made


def at(config: RunConfig, out: Path, **changes) -> RunConfig:
    return msgspec.structs.replace(config, out=out, **changes)


#: Trains a request as `speedrun run` does, but for what follows.
KEPT = """
import sys
from pathlib import Path
from speedrun.base import subprocesses, console, output
from speedrun.train import keeper, run_config

with output.reported(), subprocesses.stoppable():
    job = keeper.Job(run_config.decoded(Path(sys.argv[1]).read_bytes(), run_config.RunConfig))
    code, error = keeper.trained(job, console.Printer(sys.stdout))
    if error:
        subprocesses.say(f"error: {error}")
sys.exit(subprocesses.shell_code(code))
"""
KILLED = subprocesses.shell_code(-signal.SIGKILL)


def started(config: RunConfig, **env: str) -> subprocess.Popen[str]:
    """The run with its keeper, in a session of its own."""
    request = config.out.with_name(config.out.name + ".json")
    request.write_bytes(msgspec.json.encode(config, enc_hook=str))
    return subprocess.Popen(
        [sys.executable, "-c", KEPT, str(request)],
        env=os.environ | CANARIES | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(config: RunConfig, fault: str = "", **env: str) -> tuple[int, str]:
    """Exit code and stderr of the run as a process. Check that each fault fired once and nothing leaked or is left."""
    child = started(config, **({faults.VARIABLE: fault} if fault else {}), **env)
    try:
        stdout, stderr = child.communicate(timeout=TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
    assert _CANARY not in stdout + stderr
    for path in (path for path in config.out.parent.rglob("*") if path.is_file()):
        assert _CANARY.encode() not in path.read_bytes(), path
    fired = [line for line in stderr.splitlines() if line.startswith("fault: ")]
    assert len(fired) == len(fault.split(",")) * bool(fault), stderr
    return child.returncode, stderr


def chain_of(path: Path) -> list[Any]:
    """The lines of a log, whose chain is checked."""
    raw = path.read_bytes().split(b"\n")[:-1]
    lines = [runlog.decode(one) for one in raw]
    assert [line.prev for line in lines] == [runlog.GENESIS, *map(runlog.digest, raw[:-1])]
    return lines


def went_on(config: RunConfig, out: Path, unbroken: Run, since: int) -> Run:
    """Resume in this process, and compare with an unbroken run from some step on."""
    recorded.train(at(config, out, resume=True))
    new = runs_of(out)[-1]
    assert new.end.final_hash == unbroken.end.final_hash
    assert steps(out, new.folder) == steps(config.out, unbroken.folder)[since:]
    assert not list(folder_of(out).glob("*tmp*"))
    return new


def test_another_process_ends_with_the_same_bytes_and_tells_no_secret(config, unbroken, tmp_path):
    """Also in the record, and in an archive of it."""
    out = tmp_path / "out"
    assert ended(at(config, out))[0] == 0
    (again,) = runs_of(out)
    assert again.end.final_hash == unbroken.end.final_hash
    assert again.preflight.environment == provenance.environment()
    assert steps(out, again.folder) == steps(config.out, unbroken.folder)
    assemble(out, title="canaries")
    for path in (path for path in out.rglob("*") if path.is_file()):
        assert _CANARY.encode() not in path.read_bytes()


@pytest.mark.compile
def test_killed_between_saves(config, unbroken, tmp_path):
    out = tmp_path / "out"
    assert ended(at(config, out), "step@9=sleep:2,step@10=kill")[0] == KILLED
    assert kept(out) == [5]
    broken = log_of(out)
    new = went_on(config, out, unbroken, since=5)
    *_, end = chain_of(out / "runs" / new.folder / "metrics.jsonl")
    *_, last = chain_of(broken)
    (stood,) = (x for x in chain_of(broken) if isinstance(x.event, runlog.Checkpoint))
    assert end.event.lost_s == (last.t_mono_ns - stood.t_mono_ns) / 1e9 > 0


@pytest.mark.compile
@pytest.mark.parametrize(
    "fault",
    [
        *("save@2=kill", "saving@2=kill", "saving@2=kill:0.003", "saving@2=kill:0.01", "saving@2=kill:0.03"),
        *("data@8=kill", "evaluation@20=kill", "end=kill", "step@12=kill"),
        *("compile@2=kill", "clock=kill", "evaluation@3=kill"),
    ],
)
def test_killed_inside_a_save_and_elsewhere(config, unbroken, tmp_path, fault):
    """Without a checkpoint the run starts over in its folder."""
    out, is_early = tmp_path / "out", fault in ("compile@2=kill", "clock=kill", "evaluation@3=kill")
    assert ended(at(config, out), fault if is_early else f"step@8=sleep:1,{fault}")[0] == KILLED
    assert kept(out) in ([[]] if is_early else [[5], [5, 10], [5, 10, 12]])
    went_on(config, out, unbroken, since=max(kept(out), default=0))


def test_killed_between_a_shard_and_the_manifest(tmp_path):
    """The next process makes the shard again, byte for byte."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{i} words " * 50}) + "\n" for i in range(200)))

    words = ["data", "prep", "--source", rows, "--tokenizer", "bytes", "--shard-tokens", 20000, "--out"]
    killed = speedrun(*words, tmp_path / "out", env=os.environ | {faults.VARIABLE: "shard@2=kill"})
    assert killed.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "out").glob("*.bin"))) == 2
    for name in ("out", "whole"):
        assert invoke(*words, tmp_path / name).exit_code == 0
    whole, again = ({p.name: p.read_bytes() for p in (tmp_path / d).iterdir()} for d in ("whole", "out"))
    assert whole == again


@pytest.mark.compile
def test_going_on_across_the_end_of_a_shard(config, tmp_path, monkeypatch):
    """Shards of three steps each; resumed after steps 2 and 3."""
    ids = np.random.default_rng(0).integers(0, 256, 5 * 1600)
    for i in range(5):
        shards.write_shard(tmp_path / f"x_train_{i}.bin", ids[1600 * i : 1600 * (i + 1)])
    tiny, real = sorted(tmp_path.glob("*.bin")), shards.open_track
    opened = tuple(shards.open_shard(path, vocab_size=256) for path in tiny)
    monkeypatch.setattr(shards, "open_track", lambda *args: real(*args)._replace(train=opened))
    unbroken = at(config, tmp_path / "first", checkpoint_every=1)
    recorded.train(unbroken)
    (first,) = runs_of(tmp_path / "first")
    whole = steps(tmp_path / "first", first.folder)
    read_from = [step.cursor[0] for step in events(tmp_path / "first", runlog.Step)]
    assert read_from == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    for after in (2, 3):
        out, new = test_checkpoint.went_on(unbroken, tmp_path / f"{after}", after)
        assert (new.end.final_hash, steps(out, new.folder)) == (first.end.final_hash, whole[after:])


@pytest.mark.compile
@pytest.mark.parametrize(
    ("fault", "code", "left"),
    [
        ("compile=term", 75, []),
        ("compile@2=int", 75, []),
        ("clock=term", 75, [0]),
        ("evaluation@2=term", 75, [0]),
        ("evaluation@20=term", 75, [5, 10, 12]),
        ("step@8=term", 75, [5, 8]),
        ("data@8=int", 75, [5, 8]),
        ("saving=term", 75, [5]),
        ("step@8=int,data@8=int", 130, [5]),
    ],
)
def test_told_to_stop(config, unbroken, tmp_path, fault, code, left):
    out = tmp_path / "out"
    got, stderr = ended(at(config, out), fault)
    assert (got, stderr.count("Traceback")) == (code, 0), stderr
    assert kept(out) == left
    *_, error, end = (line.event for line in chain_of(log_of(out)))
    assert (error.kind, end.status) == ("Terminated" if code == 75 else "KeyboardInterrupt", "aborted")
    if left:
        went_on(config, out, unbroken, since=left[-1])


@pytest.mark.compile
def test_a_step_that_hangs_ends_the_run_with_its_stacks(config, tmp_path):
    out = tmp_path / "out"
    code, stderr = ended(at(config, out, deadlines_s={"step": 3}), "step@8=sleep:600")
    assert code == HANG
    last = chain_of(log_of(out))[-1].event
    assert isinstance(last, runlog.Error)
    assert last.kind == "Hang"
    assert last.message.startswith("step has taken 3.")
    stacks = out.with_name("out.stacks.txt").read_text()
    for text in (stacks, stderr):
        assert "in run\n" in text
        assert "faults.py" in text
    assert f"error: {last.message}\n" in stderr
    salvage(out)
    assemble(out, title="hung")
    assert "Hang: step has taken 3." in (out / "README.md").read_text()


@pytest.mark.compile
@pytest.mark.parametrize("phase", ["compile", "data", "evaluation"])
def test_other_phases_have_deadlines_too(config, tmp_path, phase):
    out = tmp_path / "out"
    code, stderr = ended(at(config, out, deadlines_s={phase: 12}), f"{phase}@2=sleep:600")
    assert (code, f"error: {phase} has taken 12." in stderr) == (HANG, True)


def test_faults_are_written_down_and_never_asked_for_by_a_normal_run(monkeypatch):
    assert not faults._FAULTS
    monkeypatch.setenv(faults.VARIABLE, "step=kill")
    assert provenance.environment()[faults.VARIABLE] == "step=kill"
    assert faults.VARIABLE not in provenance.VARIABLES  # which V402 goes by


def test_threads_that_write_one_log_take_turns(tmp_path):
    with runlog.RunLog(tmp_path / "log") as log:

        def write() -> None:
            for _ in range(300):
                log.emit(runlog.Warning("x" * 100))

        threads = [threading.Thread(target=write) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [line.i for line in chain_of(tmp_path / "log")] == list(range(2400))


def test_a_reader_whose_stream_was_closed_costs_no_line(tmp_path):
    """As in `speedrun run | head -1`."""
    told = []

    def reader(line: runlog.Line) -> None:
        told.append(line)
        raise BrokenPipeError

    with runlog.RunLog(tmp_path / "log", reader) as log:
        log.emit(runlog.Warning("one"))
        log.emit(runlog.Warning("two"))
    assert (len(told), len(chain_of(tmp_path / "log"))) == (1, 2)


def test_a_line_that_is_held_back_comes_with_the_next_or_not_at_all(tmp_path):
    told: list[runlog.Line] = []
    for name in ("ended", "broken"):
        with runlog.RunLog(tmp_path / name, told.append) as log:
            log.emit(runlog.Warning("one"))
            log.emit(runlog.Warning("two"), hold=True)
            assert (len(told), len(chain_of(tmp_path / name))) == (1, 1)
            if name == "ended":
                log.emit(runlog.Warning("three"))
                assert told == chain_of(tmp_path / name)
        told.clear()
    assert [len(chain_of(tmp_path / name)) for name in ("ended", "broken")] == [3, 1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_on_a_full_disk_is_one_line_and_goes_on_where_there_is_room(tmp_path, monkeypatch):
    with runlog.RunLog(tmp_path / "log") as log:
        log.emit(runlog.Warning("one"))
        assert log._file is not None
        whole = os.dup(log._file.fileno())
        with Path("/dev/full").open("wb") as full:
            os.dup2(full.fileno(), log._file.fileno())
        with pytest.raises(StorageError, match="log: cannot be written: No space left on device"):
            log.emit(runlog.Warning("two"))
        os.dup2(whole, log._file.fileno())
        os.close(whole)
        log.emit(runlog.Warning("three"))
    assert [line.event.message for line in chain_of(tmp_path / "log")] == ["one", "two", "three"]


@pytest.mark.compile
def test_a_loss_that_is_no_number_on_one_device_stops_all_and_spoils_no_checkpoint(config, tmp_path):
    """The fourth sequence of step 8 makes a gradient infinite, on one of eight devices."""
    shard = shards.open_shard(config.data / "smoke_train_000001.bin", vocab_size=256)
    (poisoned_T,) = shard.read(8 * 512 + 3 * 64, 8 * 512 + 4 * 64).astype(np.int32)[None]
    recipe = recipes.load("smoke").override(SMALL)

    def forward(p, tokens_BT, *args):
        x_BTD = recipe.forward(p, tokens_BT, *args)
        if tokens_BT.shape[1] != 64:
            return x_BTD
        is_it = jnp.any(jnp.all(tokens_BT == poisoned_T[None], axis=1))
        # Zero either way; where it is, the derivative is zero times infinity.
        nothing = 0 * jnp.sum(p["block.0.qkv"])
        return x_BTD + jnp.sqrt(jnp.where(is_it, nothing, 1 + nothing)) - jnp.where(is_it, 0, 1)

    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "load", lambda name: dataclasses.replace(recipe, forward=forward))
        said = r"step 8: loss is \d.*first non-finite gradient: block.0.qkv"
        with pytest.raises(NonFiniteError, match=said):
            recorded.train(at(config, out, overrides={}, checkpoint_every=3))
    assert kept(out) == [3, 6]
    end = chain_of(log_of(out))[-1].event
    assert end.status == "non-finite"


def test_a_run_ends_if_rows_of_a_table_do_not_fit(config, tmp_path):
    """Each sequence reads 64 rows of the first of eight devices; on even terms 8 + 8 sqrt(8) fit."""
    recipe = recipes.load("smoke").override(SMALL)

    def table(config):
        spec = ParamSpec(
            (1024, 2),
            ("row", "model"),
            normal,
            "embed",
            reads=lambda ids: ids * 0 + jnp.arange(ids.shape[1])[None],
        )
        return {**recipe.table(config), "skewed": spec}

    def forward(p, tokens_BT, *args):
        return (
            recipe.forward({k: x for k, x in p.items() if k != "skewed"}, tokens_BT, *args)
            + p["skewed"].mean()
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "load", lambda name: dataclasses.replace(recipe, forward=forward, table=table))
        with pytest.raises(
            NonFiniteError, match=r"warm-up .* loss is nan; .* ids that are read of skewed evenly"
        ):
            recorded.train(at(config, tmp_path / "out", overrides={}))


@pytest.mark.compile
def test_a_disk_that_fills_up(config, unbroken, tmp_path):
    """After the first checkpoint no file may exceed 20 kB, so the next one fails in the background."""
    out = tmp_path / "out"
    child = started(at(config, out), **{faults.VARIABLE: "step@8=sleep:12"})
    try:
        while not (folder_of(out).exists() and kept(out) == [5]):
            assert child.poll() is None, child.communicate()
            threading.Event().wait(0.05)
        (trains,) = children_of(child.pid)
        resource.prlimit(trains, resource.RLIMIT_FSIZE, (20_000, 20_000))
        _, stderr = child.communicate(timeout=TIMEOUT_S)
    finally:
        child.kill()
    assert (child.returncode, kept(out)) == (4, [5]), stderr
    said = stderr.splitlines()
    assert len(said) == 2, stderr  # the first one is that of the fault
    assert "cannot be written" in said[1]
    assert "older ones are whole" in said[1]
    went_on(config, out, unbroken, since=5)


def test_a_folder_of_checkpoints_that_cannot_be_made_is_told_first(config, tmp_path):
    folder_of(tmp_path / "out").write_text("in the way")
    with pytest.raises(CheckpointError, match="free or choose another folder"):
        recorded.train(at(config, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.compile
def test_a_damaged_cache_of_programs_is_compiled_anew(config, unbroken, tmp_path):
    """In the cache that a run has by default."""
    env = {"JAX_COMPILATION_CACHE_DIR": "", "XDG_CACHE_HOME": str(tmp_path)}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

    def ran(name: str) -> list[str]:
        code, stderr = ended(at(config, tmp_path / name), **env)
        assert code == 0, stderr
        assert runs_of(tmp_path / name)[0].end.final_hash == unbroken.end.final_hash
        return [event.cache for event in events(tmp_path / name, runlog.Compile)]

    assert ran("cold") == ["miss", "miss"]
    assert ran("warm") == ["hit", "hit"]
    for path in tmp_path.glob("speedrun/programs/*/*-cache"):
        os.truncate(path, path.stat().st_size // 2)
    assert ran("cut") == ["miss", "miss"]
