"""The whole loop on a small model: what a run writes, what it refuses, and that it repeats."""

import dataclasses
import gc
import math
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
from msgspec.structs import replace
from small_run import SMALL, children_of, events, log_of, rewrite
from test_processes import ends, started
from typed import as_words, invoke, speedrun

from speedrun import recipes
from speedrun.base import mesh, provenance, runlog, signals, sourcefile
from speedrun.base.clock import Phases
from speedrun.base.errors import DataError, NonFiniteError, Terminated, UsageError
from speedrun.cli.options import parse_settings
from speedrun.data import shards
from speedrun.record.examine import sandbox
from speedrun.record.source import split_source
from speedrun.record.summary import assemble
from speedrun.record.validate import validate
from speedrun.train.attempt import Attempt
from speedrun.train.compile import compilations, compile_all
from speedrun.train.preflight import prepare
from speedrun.train.program import Program
from speedrun.train.ranked import approve
from speedrun.train.recorded import opening, train
from speedrun.train.run_config import RunConfig


@pytest.fixture(scope="session")
def record(trained) -> Path:
    return trained.out


def refused(smoke_data: Path, tmp_path: Path, **changes) -> pytest.ExceptionInfo:
    given = {"track": "smoke-cpu", "out": tmp_path / "out", "overrides": SMALL, "data": smoke_data} | changes
    with pytest.raises((UsageError, DataError)) as info:
        train(RunConfig(**given))
    assert "\n" not in str(info.value)
    assert not (tmp_path / "out").exists()
    return info


def test_a_run_passes_every_check_and_says_which_code_packages_and_parameters_it_ran(record):
    report = validate(record)
    failed = {result.check.id: result.messages for result in report.having("failed")}
    assert not failed
    assert len(report.having("ok")) > 20
    (hw,), (plan,) = (events(record, kind) for kind in (runlog.Preflight, runlog.Plan))
    assert (hw.commit, hw.dirty) == provenance.checkout()
    assert (hw.lock, hw.lock_sha256) == provenance.lock()
    assert sum(map(math.prod, plan.shapes.values())) == plan.num_params
    assert {"embed", "head"} <= plan.shapes.keys()


def test_nothing_is_compiled_inside_the_clock(record):
    names = [type(event).__name__ for event in events(record)]
    inside = names[names.index("ClockStart") : names.index("ClockStop")]
    assert "Compile" not in inside
    assert names.count("Compile") == 2  # one stage, one validation


@dataclasses.dataclass(frozen=True)
class Odd:
    then: Any

    def at(self, step: int, num_steps: int) -> dict[str, Any]:
        return self.then.at(step, num_steps) | {"odd": step % 2 == 1}


def test_an_input_that_a_program_does_not_read_costs_no_other_program(tmp_path, smoke_data, monkeypatch):
    recipe = recipes.load("smoke").override(SMALL)
    odd = dataclasses.replace(recipe, schedule=Odd(recipe.schedule))
    monkeypatch.setattr(recipes, "load", lambda _: odd)
    ready = prepare(RunConfig("smoke-cpu", tmp_path / "out", data=smoke_data))
    with runlog.RunLog(tmp_path / "log") as log:
        found = compile_all(Attempt("a", ready, log, None, Phases()))
    compiled = [line.event for line in runlog.read(tmp_path / "log")]
    names = [event.name for event in compiled if isinstance(event, runlog.Compile)]
    assert len(found.steps) == 2
    assert len({*found.steps.values()}) == 1
    assert names == ["train/8x64, odd False", "eval/128x64, odd False"]


@pytest.mark.parametrize(("num_devices", "refused"), [(2, "V404"), (8, "")])
def test_a_run_that_no_ranked_record_could_hold_does_not_start_on_a_track_that_ranks(
    tmp_path, smoke_data, num_devices, refused
):
    given = RunConfig("smoke-cpu", tmp_path / "out", data=smoke_data, num_devices=num_devices)
    ready = prepare(given)
    start, preflight, data = opening(ready)
    commit = {"commit": "c" * 40, "dirty": None} if refused else {}
    first = start, replace(preflight, **commit), data
    assert [refused in line for line in approve(ready, first)] == [True] * bool(refused), "warned elsewhere"
    ranked = dataclasses.replace(
        ready, track=replace(ready.track, rules=replace(ready.track.rules, ranked=True))
    )
    if refused:
        with pytest.raises(
            UsageError, match=rf"{refused}: number of devices: got 2, need 8.* or pass --unranked"
        ):
            approve(ranked, first)
    unranked = dataclasses.replace(ranked, config=replace(given, purpose="unranked"))
    assert all("validate will not pass" in line for line in approve(unranked, first))


STILL = {f"optimizer.{group}_lr": "0.0" for group in ("muon", "embed", "head", "scalar")}


@pytest.mark.parametrize(("settings", "code", "verdict"), [({}, 0, "falls"), (STILL, 1, "does NOT fall")])
def test_a_check_says_whether_the_loss_falls_and_keeps_no_record(
    smoke_data, tmp_path, monkeypatch, settings, code, verdict
):
    monkeypatch.chdir(tmp_path)
    result = invoke("run", "--check", "--data", smoke_data, *as_words(SMALL | settings))
    assert (result.exit_code, f"the loss {verdict}: " in result.stdout) == (code, True), result.output
    assert not [*tmp_path.iterdir()]


def test_a_compilation_inside_the_clock_would_be_seen(tmp_path):
    with runlog.RunLog(tmp_path / "log") as log, compilations(log):
        jax.jit(lambda x: x * 3 + 1).lower(np.float32(2)).compile()
    assert [type(line.event) for line in runlog.read(tmp_path / "log")] == [runlog.Compile]


def test_the_run_reads_exactly_what_it_says(record):
    steps, vals = (events(record, kind) for kind in (runlog.Step, runlog.Val))
    assert [s.tokens_seen for s in steps] == [512 * (i + 1) for i in range(12)]
    assert steps[-1].cursor == (0, 12 * 512)
    assert [(v.step, v.tokens) for v in vals] == [(0, 131072), (12, 131072)]
    assert vals[0].loss == pytest.approx(np.log(256), abs=1e-5)
    assert vals[1].loss == float.fromhex(vals[1].nll_sum) / 131072


def test_the_closure_holds_the_science_and_no_command_line_and_gives_identical_losses(
    record, smoke_data, tmp_path
):
    files = split_source((record / "source.txt").read_text())
    assert next(iter(files)) == "speedrun/recipes/smoke.py"
    some = ("science/step.py", "science/models/record21_model.py", "tracks/smoke-cpu.toml")
    assert {f"speedrun/{path}" for path in some} <= set(files)
    assert not [path for path in files if path.startswith("speedrun/cli") or "webmini" in path]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    where = ["--data", smoke_data, "--out", tmp_path / "out"]
    done = speedrun("reproduce", record, "--same-seeds", *where, env=env)
    assert "bits     1 of 1 run ended in exactly the state" in done.stdout, done.stderr
    assert "12 of 12 losses are equal, the largest difference is 0" in done.stdout
    # The unpacked source, asked for its own closure, gives the text it was unpacked from.
    (again,) = (tmp_path / "out").glob("*-1/source.txt")
    assert again.read_text() == (record / "source.txt").read_text()


def test_lazy_imports_are_in_the_closure(tmp_path, monkeypatch):
    texts = {
        "a.py": "def f():\n    from speedrun import b\n    return b\n",
        "b.py": "import speedrun.c.d\n",
        **dict.fromkeys(("__init__.py", "c/__init__.py", "c/d.py", "unused.py"), ""),
    }
    (tmp_path / "speedrun/c").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / "speedrun" / name).write_text(text)
    for module in (provenance, sourcefile):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    files = split_source(provenance.closure(["speedrun.a"], []))
    assert set(files) == {f"speedrun/{name}" for name in texts if name != "unused.py"}


@dataclasses.dataclass(frozen=True)
class Spoilt:
    """An optimiser whose fourth update of the embedding has a NaN."""

    inner: Any

    def transform(self, layout):
        good = self.inner.transform(layout)

        def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
            moves: Any
            moves, inner = good.update(updates, state[0], params, **more)
            embed = moves["embed"].at[0, 0].add(jnp.where(state[1] == 3, jnp.nan, 0))
            return {**moves, "embed": embed}, (inner, state[1] + 1)

        made: Any = optax.GradientTransformationExtraArgs
        return made(lambda params: (good.init(params), 0), update)


def test_a_bad_update_ends_the_run_at_its_own_step_and_is_named(tmp_path, smoke_data, monkeypatch):
    recipe, out = recipes.load("smoke").override(SMALL), tmp_path / "out"
    spoilt = dataclasses.replace(recipe, optimizer=Spoilt(recipe.optimizer), if_nan="ask its author")
    monkeypatch.setattr(recipes, "load", lambda name: spoilt)
    said = (
        r"step 3: loss is 5.\d*; first non-finite update: embed; lower the learning rate, or ask its author"
    )
    with pytest.raises(NonFiniteError, match=said):
        train(RunConfig("smoke-cpu", out, overrides=SMALL, data=smoke_data))
    assert events(out)[-1].status == "non-finite"
    assemble(out)
    assert [result.check.id for result in validate(out).having("failed")] == ["V301", "V309"]


def test_a_bad_gradient_ends_the_warm_up_before_the_clock_and_is_named(tmp_path, smoke_data, monkeypatch):
    recipe, out = recipes.load("smoke").override(SMALL), tmp_path / "out"

    def forward(p, *args):
        nothing = 0 * jnp.sqrt(0 * jnp.sum(p["block.0.qkv"]))  # its derivative is zero times infinity
        return recipe.forward(p, *args) + nothing

    monkeypatch.setattr(recipes, "load", lambda name: dataclasses.replace(recipe, forward=forward))
    with pytest.raises(
        NonFiniteError, match=r"warm-up of 8x64.*: loss is .*; first .* gradient: block.0.qkv"
    ):
        train(RunConfig("smoke-cpu", out, overrides=SMALL, data=smoke_data))
    assert (events(out)[-1].status, events(out, runlog.ClockStart)) == ("non-finite", [])


def test_the_loop_refuses_a_transfer_that_nobody_asked_for(tmp_path, smoke_data, monkeypatch):
    real, out = mesh.shard, tmp_path / "out"
    # Warm-up places zeros and random ids before the clock; inside it, batches stay on the host.
    inside = lambda: list(out.glob("runs/*")) and events(out, runlog.ClockStart)  # noqa: E731
    monkeypatch.setattr(mesh, "shard", lambda x, m: x if inside() else real(x, m))
    with pytest.raises(Exception, match=r"[Dd]isallowed"):
        train(RunConfig("smoke-cpu", out, overrides=SMALL, data=smoke_data))
    assert events(out)[-1].status == "aborted"


def test_a_stopped_run_ends_its_log(tmp_path, smoke_data):
    out = tmp_path / "out"
    settings = as_words(SMALL | {"stages.0.num_steps": "400"})
    running = started(["speedrun", "run", "--data", str(smoke_data), "--out", str(out), *settings])
    while not any('"ev":"data"' in path.read_text() for path in out.glob("runs/*/metrics.jsonl")):
        assert running.poll() is None, running.communicate()
        threading.Event().wait(0.05)
    running.send_signal(signal.SIGINT)
    ((code, _, stderr),) = ends([running])
    assert code == 75, stderr
    assert stderr.count("Traceback") == 0
    *_, error, end = events(out)
    assert (error.message, end.status) == ("stopped by SIGINT", "aborted")
    (failed,) = validate(out).having("failed")
    assert failed.messages[1].endswith("crashed before the clock: Terminated: stopped by SIGINT")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize(("sent", "exit_code"), [([signal.SIGHUP] * 2, 75), ([signal.SIGINT] * 3, 130)])
def test_a_run_that_is_stopped_while_it_starts_says_so(tmp_path, smoke_data, sent, exit_code):
    """While JAX is imported. A lost terminal may send two; three others end it at once."""
    with signals.handled_by(signal.SIG_DFL, signal.SIGHUP):  # nohup ignores it, and children inherit that
        running = started(["speedrun", "run", "--data", str(smoke_data), "--out", str(tmp_path / "out")])
    while not any(
        "libjax_common" in Path(f"/proc/{child}/maps").read_text() for child in children_of(running.pid)
    ):
        assert running.poll() is None, running.communicate()
        threading.Event().wait(0.02)
    for number in sent:
        running.send_signal(number)
        threading.Event().wait(0.2)
    ((code, _, stderr),) = ends([running])
    assert code in (75, exit_code), stderr
    assert stderr.count("Traceback") == 0
    assert len(stderr.splitlines()) <= 1
    assert not (tmp_path / "out").exists()


def test_a_signal_that_comes_while_python_collects_is_not_lost_and_handlers_are_put_back(monkeypatch):
    """Python drops what a callback of its collector raises, and JAX has such a callback."""
    # So does a process of ours: `output.reported`. On a busy machine, the hook of pytest would still be at work.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def callback(_phase: str, _info: object) -> None:
        gc.callbacks.remove(callback)
        signal.raise_signal(signal.SIGTERM)

    def told_while_collecting() -> None:
        with signals.handled_by(signals.stop):
            gc.callbacks.append(callback)
            gc.collect()
            threading.Event().wait(10)

    with pytest.raises(Terminated, match="stopped by SIGTERM"):
        told_while_collecting()
    both = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in both]  # under nohup, SIGINT is ignored
    with signals.handled_by(signals.stop):
        assert [signal.getsignal(number) for number in both] == [signals.stop] * 2
    assert [signal.getsignal(number) for number in both] == before


def test_a_signal_is_heeded_while_xla_compiles():
    """Python runs no handlers while XLA compiles in the main thread."""
    compiling_in, compiled = [], threading.Event()

    class Lowered:
        def as_text(self) -> str:
            return ""

        def compile(self, **_: object) -> None:
            compiling_in.append(threading.current_thread())
            os.kill(os.getpid(), signal.SIGTERM)
            compiled.wait(60)

    with pytest.raises(Terminated), signals.handled_by(signals.stop):
        Program.compiled(SimpleNamespace(compiler_options={}), Lowered())  # pyright: ignore[reportArgumentType]
    assert compiling_in != [threading.main_thread()]
    assert not compiled.is_set()
    compiled.set()


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "JAX_PLATFORMS"])
def test_no_other_variable_is_taken_from_a_record_than_runs_record(
    record, smoke_data, tmp_path, monkeypatch, name
):
    copy = tmp_path / "copy"
    shutil.copytree(record, copy)

    def poisoned(event: Any) -> Any:
        if not isinstance(event, runlog.Preflight):
            return event
        return msgspec.structs.replace(event, environment={**event.environment, name: "cpu"})

    rewrite(copy, poisoned)
    given = []
    monkeypatch.setattr(sandbox, "run", lambda *_, environment, **__: given.append(environment) or 7)
    monkeypatch.setattr(sandbox, "problem", lambda: None)
    monkeypatch.setenv("SECRET", "of this machine")
    result = invoke("reproduce", copy, "--data", smoke_data, "--out", tmp_path / "again")
    if name in provenance.VARIABLES:
        assert given[0][name] == "cpu"
        assert "SECRET" not in given[0]
    else:
        assert (result.exit_code, given) == (2, [])
        assert f"holds {name}; only XLA_FLAGS" in result.stderr
        assert result.stderr.endswith("; nothing was executed\n")


@pytest.mark.parametrize("named", ["whole", "."])
def test_a_run_killed_without_checkpoints_is_told_what_to_do(record, tmp_path, monkeypatch, named):
    copy = tmp_path / "copy"
    shutil.copytree(record / "runs", copy / "runs")
    log = log_of(copy)
    log.write_bytes(log.read_bytes().rpartition(b'{"i":')[0])
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(copy)
    result = invoke("run", "--resume", str(copy) if named == "whole" else named)
    assert result.exit_code == UsageError.exit_code
    assert f"no checkpoints: {copy}.checkpoints/run.json is missing; start a new run" in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_the_folder_of_a_run_must_be_writable(tmp_path, smoke_data):
    (tmp_path / "file").write_text("")
    assert "exists already" in str(refused(smoke_data, tmp_path, out=tmp_path).value)
    said = str(refused(smoke_data, tmp_path, out=tmp_path / "file" / "out").value)
    assert "free or choose another folder" in said


#: Settings that no run can have, and what is said of them.
REFUSED = {
    "config.model_dim=wide": "need a whole number",
    "config.head_dim=6": "multiple of 4",
    "config.vocab_size=200": "knows 200 ids",
    "stages.0.num_sequences=12": "do not come out even",
    "stages.0.num_steps=10000000000": "need `int` <= 1000000",
    "stages.0.num_steps=9999": "last for",
    "compute_dtype=banana": "compute_dtype is 'banana'; need Literal['float32', 'bfloat16']",
    "config.attention_kinds=('foo','long','long','long')": "need tuple[Literal['long', 'short', 'none']",
    "schedule.cooldown_fraction=0": "cooldown_fraction is 0.0; need `float` >= 1e-37",
    "optimizer.muon_lr=1e999": "need a number",
    "name=../../x": "write a recipe file",
    "config.document_token=3": "for the start of a document",
    "eval_seq_len=100": "must divide",
}


ABSENT: list[tuple[dict[str, Any], str]] = [
    ({"track": "smoke-gpu"}, "did you mean 'smoke-cpu'"),
    ({"track": "single-gpu", "overrides": {}}, "found a cpu, single-gpu@2 needs a gpu"),
    ({"recipe": "smok"}, "did you mean 'smoke'"),
    ({"num_devices": 3}, "divisor of 8"),
    ({"num_devices": 64}, "found 8 cpu devices, need 64"),
    *(({"overrides": parse_settings((setting,))}, said) for setting, said in REFUSED.items()),
]


@pytest.mark.parametrize(
    ("changes", "said"), ABSENT, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_cannot_be_run_is_refused_in_one_line(tmp_path, smoke_data, changes, said):
    assert said in str(refused(smoke_data, tmp_path, **changes).value)


def test_an_error_of_a_recipe_is_told_before_a_record_begins(tmp_path, smoke_data, monkeypatch):

    def forward(params, tokens_BT, *_: object) -> jax.Array:
        return params["embed"][tokens_BT] + jnp.zeros(7)

    recipe = dataclasses.replace(recipes.load("smoke"), forward=forward)
    monkeypatch.setattr(recipes, "load", lambda _: recipe)
    with pytest.raises((TypeError, ValueError), match=r"\(7,\)") as info:
        train(RunConfig("smoke-cpu", tmp_path / "out", overrides=SMALL, data=smoke_data))
    assert "jax" in Path(info.traceback[-1].path).parts, "a line of the recipe is not where it was raised"
    assert not (tmp_path / "out").exists()


def test_a_validation_shard_that_is_too_short_is_refused(tmp_path):
    folder = tmp_path / "short"
    folder.mkdir()
    ids = np.arange(5000) % 50000
    shards.write_shard(folder / "x_val_000000.bin", ids)
    shards.write_shard(folder / "x_train_000001.bin", ids)
    info = refused(folder, tmp_path, track="webmini", overrides={})
    assert "validation needs" in str(info.value)
    info = refused(tmp_path / "nowhere", tmp_path)
    assert info.type is DataError
    assert "speedrun data synth" in str(info.value), "the command that gets it"


def test_settings_are_key_and_value_once():
    assert parse_settings(("a.b=1", "c=x=y")) == {"a.b": "1", "c": "x=y"}
    for bad in (("a",), ("=1",), ("a=",), ("a=1", "a=2")):
        with pytest.raises(UsageError):
            parse_settings(bad)
