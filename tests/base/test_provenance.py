"""What a run records about its code, packages and devices: correct if it can be known, else nothing."""

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typed import git, program

from speedrun import recipes
from speedrun.base import mesh as meshes
from speedrun.base import provenance
from speedrun.base.errors import UsageError
from speedrun.science.recipe import Recipe
from speedrun.train import device_benchmark, preflight
from speedrun.train.run_config import RunConfig


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A repository with one committed file, in place of ours."""
    (tmp_path / "speedrun").mkdir()
    (tmp_path / "speedrun/a.py").write_text("A = 1\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "dirty"),
    [
        ("speedrun/a.py", True),
        ("speedrun/new.py", True),
        ("pyproject.toml", True),
        ("records/README.md", False),  # records and notes beside the code do not count
    ],
)
def test_changed_and_new_files_of_a_checkout_are_seen(checkout, path, dirty):
    assert provenance.checkout() == (git(checkout, "rev-parse", "HEAD"), False)
    (checkout / path).parent.mkdir(exist_ok=True)
    (checkout / path).write_text("B = 2\n")
    assert provenance.checkout() == (git(checkout, "rev-parse", "HEAD"), dirty)


def test_without_git_or_a_checkout_nothing_is_known(checkout, tmp_path, monkeypatch):
    """A repository further up belongs to another project."""
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path / "nowhere"))
        assert provenance.checkout() == ("", None)
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "speedrun")
    assert provenance.checkout() == ("", None)


def lock_text(**versions: str) -> str:
    pins = {name: metadata.version(name) for name in ("jax", "jaxlib", "optax", "numpy")} | versions
    return "# Pins.\n" + "".join(
        f"{name}=={version} \\\n    --hash=sha256:0\n" for name, version in pins.items()
    )


def test_the_lock_is_the_largest_one_that_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.lock() == ("", "")
    (tmp_path / "requirements").mkdir()
    locks = {
        "run": lock_text(),
        "dev": lock_text(click=metadata.version("click")),
        "all": lock_text(click="0.0.1", pytest=metadata.version("pytest")),
        "other": lock_text(jax="0.0.1"),
        "part": "jax==" + metadata.version("jax") + " \\\n",
        # More pins, but of missing packages.
        "cuda": lock_text(click=metadata.version("click"))
        + "jax-no-plugin==1.0 ; sys_platform == 'linux' \\\n",
    }
    for name, text in locks.items():
        (tmp_path / f"requirements/{name}.lock").write_text(text)
    assert provenance.lock().name == "dev.lock"
    for name in ("run", "dev", "cuda"):
        (tmp_path / f"requirements/{name}.lock").unlink()
    assert provenance.lock() == ("", "")


def test_a_package_that_a_platform_needs_not_may_be_missing():
    text = "colorama==0.4.6 ; sys_platform == 'win32' \\\njax==0.10.2 ; python_version < '3.12' \\\njax==0.12.0 \\\n"
    assert provenance.pinned(text) == {"colorama": {"0.4.6", None}, "jax": {"0.10.2", "0.12.0", None}}


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("echo '0, 0, 0'", 0.0),
        ("printf '1000000, 20, 0\\n500000, 0, 3\\n'", 1.500023),
        ("echo 'N/A, 0, 0'", None),
        ("echo 'Field is not a valid field to query.'; exit 2", None),
    ],
)
def test_throttling_is_what_the_driver_counts(tmp_path, monkeypatch, said, seconds):
    tool = program(tmp_path / "nvidia-smi", f"#!/bin/sh\n{said}\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    device = SimpleNamespace(platform="gpu")
    mesh: Any = SimpleNamespace(devices=SimpleNamespace(flat=[device]))
    assert device_benchmark.throttled_s(mesh) == seconds
    later_s = device_benchmark.throttled_s(mesh, since_s=seconds)
    assert later_s == (None if seconds is None else 0.0)
    device.platform = "cpu"
    assert device_benchmark.throttled_s(mesh) is None
    device.platform = "gpu"
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device_benchmark.throttled_s(mesh) is None


def test_what_may_change_a_program_is_recorded(monkeypatch):
    """And neither where a machine keeps things, nor what Terraform knows."""
    given = {
        "NCCL_TOPO_FILE": "rings.xml",
        "TF_XLA_FLAGS": "--tf_xla_auto_jit=2",
        "CUDA_LAUNCH_BLOCKING": "1",
    }
    others = (
        "TF_VAR_token",
        "TF_CLI_CONFIG_FILE",
        "CUDA_VERSION",
        "NVIDIA_REQUIRE_CUDA",
        "NCCL_DEBUG_FILE",
        "HOME",
    )
    for name in others:
        monkeypatch.setenv(name, "secret")
    before = provenance.environment().keys()
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    found = provenance.environment()
    assert {name: found[name] for name in found.keys() - before} == given
    assert not {*others} & found.keys()


def test_numbers_of_another_kind_are_refused_and_other_settings_of_jax_are_named():
    ours = meshes.changed_settings()  # of the tests
    with meshes.setting("jax_softmax_custom_jvp", value=True), meshes.setting("jax_enable_x64", value=True):
        given = {"jax_enable_x64": "True", "jax_softmax_custom_jvp": "True"}
        assert meshes.changed_settings() == ours | given
        with pytest.raises(UsageError, match="unset JAX_ENABLE_X64"):
            meshes.prepare("cpu")
    assert meshes.changed_settings() == ours


def test_a_recipe_that_sets_a_variable_of_xla_is_refused(monkeypatch, tmp_path):
    """It could remove it again before the log is written."""

    def load(name: str) -> Recipe[Any, Any, Any]:
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        return recipes.load(name)

    monkeypatch.setattr(preflight, "recipes", SimpleNamespace(load=load))
    with pytest.raises(UsageError, match="recipe smoke sets XLA_FLAGS"):
        preflight.prepare(RunConfig("smoke-cpu", tmp_path / "out"))
