"""Eight simulated devices for every test, and no silent broadcasting of ranks."""

import dataclasses
import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Workers that share cores wait for each other: an eighth of the suite's time.
if (_worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    _number, _cores = int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, _cores[int(_worker[2:]) % len(_cores) :: _number])

os.environ.setdefault("SPEEDRUN_TEST_PLATFORM", "cpu")
# Two thirds of the suite's time would be XLA and LLVM making small programs for CPUs fast.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
    # Later ones do not know it, and end the process.
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "")
    if os.environ["SPEEDRUN_TEST_PLATFORM"] == "cpu"
    else "",
)

# A fifth would be making the same ones again: workers, and what they start, share them, and so do later test runs.
# JAX keys a program by its text, its flags and the version of XLA. `rm -r .venv/programs` makes a cold run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(sys.prefix) / "programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

# Files of other folders take from the core's.
sys.path.append(str(Path(__file__).parent / "core"))

import filelock
import hypothesis
import jax
import pytest
from jax.sharding import Mesh
from small_run import SMALL

from speedrun import recipes
from speedrun.base import mesh, track
from speedrun.data import shards, synthetic
from speedrun.record.summary import assemble
from speedrun.science.models import record21_model as record21
from speedrun.science.recipe import Recipe, Stage
from speedrun.train import device_benchmark
from speedrun.train.recorded import train
from speedrun.train.run_config import RunConfig

mesh.prepare(os.environ["SPEEDRUN_TEST_PLATFORM"])
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing makes many objects: to look for dead ones was a sixth of the time.
gc.set_threshold(200_000, 20, 100)
device_benchmark._TRIALS, device_benchmark._MULTIPLICATIONS = (
    2,
    1,
)  # every run times this machine, before and after


#: Fixtures that only tests of a group have.
GROUPS = {"h100": "compile", "page": "page", "browser": "page"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processor-limit-s", type=float, help="fail a test that takes more, its children included"
    )


@pytest.hookimpl(tryfirst=True)  # before groups are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put a test into the group of its fixtures."""
    for item in items:
        for name in GROUPS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(GROUPS[name])


@pytest.fixture(autouse=True, scope="module")
def _forget_the_past(request: pytest.FixtureRequest) -> None:
    """Drop the programs of earlier files where they take gigabytes; keep the collector away from what else there is.

    A checkpoint that is damaged calls the collector.
    """
    if request.config.option.markexpr.startswith("compile"):
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
    gc.freeze()


def processor_s() -> float:
    """Seconds of processor time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@pytest.fixture(autouse=True)
def _processor_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """A budget for each test, without what it shares with others: `scripts/test.sh --all` sets it."""
    limit_s, before_s = request.config.getoption("--processor-limit-s"), processor_s()
    yield
    spent_s = processor_s() - before_s
    assert not limit_s or spent_s <= limit_s, f"took {spent_s:.1f} s of processor, more than {limit_s:.0f} s"


@pytest.fixture(scope="session")
def tiny() -> Recipe:
    """The smoke recipe with everything that occurs in it, as small as it can be: compiles in a second or two."""
    smoke = recipes.load("smoke")
    config = dataclasses.replace(
        smoke.config,
        vocab_size=61,
        padded_vocab_size=64,
        model_dim=16,
        num_heads=2,
        head_dim=8,
        mlp_dim=32,
        attention_kinds=("long", "none", "short", "long"),
        value_tables=(0, record21.NO_TABLE, 1, 0),
        block_tokens=4,
    )
    return dataclasses.replace(
        smoke,
        name="tiny",
        config=config,
        stages=(Stage(num_steps=6, num_sequences=16, seq_len=32),),
        eval_sequences=16,
        eval_seq_len=32,
    )


@pytest.fixture
def forged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for forged records, with their track, which is the only one."""
    from record_forge import install_track

    install_track(tmp_path)
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)
    return tmp_path


@pytest.fixture
def record(forged: Path) -> Path:
    """An honest record of two runs, with seeds 1 and 2."""
    from record_forge import forge

    return forge(forged / "record")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all workers have."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def smoke_data(shared: Path) -> Path:
    """The shards of the smoke track, made by the first worker that needs them."""
    with filelock.FileLock(shared / "smoke.lock"):
        if not (shared / "smoke" / shards.MANIFEST).exists():
            synthetic.write(track.load("smoke-cpu"), shared / "smoke")
    return shared / "smoke"


@pytest.fixture(scope="session")
def trained(shared: Path, smoke_data: Path) -> RunConfig:
    """A finished run with a checkpoint after every step, and its record. Read it, or change a copy."""
    out = shared / "trained" / "record"
    kept: Any = {"checkpoint_every": 1, "keep_checkpoints": 0}
    config = RunConfig("smoke-cpu", out, overrides=SMALL, data=smoke_data, **kept)
    with filelock.FileLock(shared / "trained.lock"):
        if not (out / "about.json").exists():
            train(config)
            assemble(out, title="small")
    return config


@pytest.fixture(scope="session")
def h100() -> Callable[..., Mesh]:
    """Meshes of so many H100s, on one node or more, to compile for, where the compiler is installed."""
    import deviceless  # it needs `plan`, which may be taken out

    if missing := deviceless.missing_wheels():
        pytest.skip(f"needs {', '.join(missing)}: scripts/test.sh --compile installs them")
    return partial(deviceless.target_mesh, "h100")
