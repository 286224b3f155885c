"""Eight simulated devices for every test, and no silent broadcasting of ranks."""

import atexit
import dataclasses
import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

# Workers that share cores wait for each other: an eighth of the suite's time.
if (_worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    _number, _cores = int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, _cores[int(_worker[2:]) % len(_cores) :: _number])

os.environ.setdefault("SPEEDRUN_TEST_PLATFORM", "cpu")
# Half of the suite's time would be LLVM making small programs for CPUs fast.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    if os.environ["SPEEDRUN_TEST_PLATFORM"] == "cpu"
    else "",
)

# A fifth would be making the same ones again: the workers of a session, and what they start, share them.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="speedrun-programs-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax
import pytest
from jax.sharding import Mesh

from speedrun.data import synthetic
from speedrun.ground import mesh, track
from speedrun.predict import deviceless
from speedrun.science import recipes
from speedrun.science.models import record21
from speedrun.science.recipe import Recipe, Stage
from speedrun.training import health

mesh.prepare(os.environ["SPEEDRUN_TEST_PLATFORM"])
jax.config.update("jax_numpy_rank_promotion", "raise")
gc.set_threshold(
    200_000, 20, 100
)  # tracing makes many objects: to look for dead ones was a sixth of the time
health._TRIALS = 2  # every run times this machine first; a second of each test that trains


@pytest.fixture(scope="session")
def tiny() -> Recipe:
    """The smoke recipe with everything that occurs in it, as small as it can be: compiles in a second or two."""
    smoke = recipes.load("smoke")
    config = dataclasses.replace(
        smoke.config,
        vocab_size=61,
        head_size=64,
        model_dim=16,
        num_heads=2,
        head_dim=8,
        mlp_dim=32,
        mixing=("long", "none", "short", "long"),
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


@pytest.fixture(scope="session")
def smoke_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards of the smoke track."""
    folder = tmp_path_factory.mktemp("smoke")
    synthetic.write(track.load("smoke-cpu"), folder)
    return folder


@pytest.fixture(scope="session")
def h100() -> Callable[..., Mesh]:
    """Meshes of so many H100s, on one node or more, to compile for, where the compiler is installed."""
    if missing := deviceless.missing_wheels():
        pytest.skip(f"needs {', '.join(missing)}: scripts/test.sh installs them, --quick leaves them out")
    return partial(deviceless.target_mesh, "h100")
