"""The container: what its file says, what stays outside, what would be typed; and its steps, without an engine."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import click
import pytest
from dockerfile import Root, context, fresh_root, is_in_context, settings, stages
from record_forge import SOFTWARE, change, forge, install_track

from speedrun import cli
from speedrun.ground import provenance, runlog, track
from speedrun.ground.clock import Stopwatch

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
STAGES = stages(DOCKERFILE)
SCRIPT = ROOT / "scripts" / "docker_run.sh"
IMAGE = "sha256:" + "1" * 64
COMMITTED = "records/smoke-cpu/2026-11-21-first"


# --- the file -----------------------------------------------------------------------------------------------


def test_the_linter_has_nothing_to_say():
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("needs hadolint: scripts/install.sh dev")
    done = subprocess.run([linter, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_both_targets_are_pinned_locked_and_not_root(target: str):
    stage = STAGES[target]
    assert re.fullmatch(r"python:3\.\d+-slim-bookworm@sha256:[0-9a-f]{64} AS base", stage[0].text)
    assert [step.text for step in stage if step.name == "USER"] == ["1000:1000"]
    assert [step.text for step in stage if step.name == "ENTRYPOINT"] == ['["speedrun"]']
    (health,) = [step.text for step in stage if step.name == "HEALTHCHECK"]
    assert health.endswith('CMD ["speedrun", "doctor"]')
    (volumes,) = [json.loads(step.text) for step in stage if step.name == "VOLUME"]
    assert set(volumes) == {"/workspace/data", "/workspace/records", "/workspace/runs", "/cache"}
    assert settings(stage)["PIP_NO_CACHE_DIR"] == "1"
    installs = [
        part for step in stage if step.name == "RUN" for part in step.text.split("&&") if "install -" in part
    ]
    for part in (part for part in installs if "pip" in part):
        assert "--require-hashes" in part or "--no-deps --no-build-isolation" in part
    locks = re.findall(r"requirements/([a-z0-9$A-Z]+)\.lock", " ".join(installs))
    assert locks == (["run"] if target == "cpu" else ["run", "cuda$CUDA"])
    assert all((ROOT / "requirements" / f"{lock.replace('$CUDA', '12')}.lock").exists() for lock in locks)


def test_a_stranger_finds_no_more_in_the_context_than_what_runs():
    sent = list(context(ROOT))
    assert {path.split("/")[0] for path in sent} == {
        "speedrun", "requirements", "pyproject.toml", "README.md", "LICENSE", ".gitignore",
    }  # fmt: skip
    assert not [path for path in sent if "__pycache__" in path or path.endswith(".pyc")]
    ignored = (ROOT / ".dockerignore").read_text()
    for path in (
        ".git/config",
        ".env",
        "data/smoke/x.bin",
        "runs/a/metrics.jsonl",
        ".venv/bin/python",
        "speedrun/__pycache__/a",
    ):
        assert not is_in_context(path, ignored), path
    for needed in ("speedrun/tracks/smoke-cpu.toml", "requirements/run.lock"):
        assert needed in sent
    readme = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]
    assert readme in sent, "the package cannot be built without it"


def test_the_commands_of_the_page_can_be_given():
    lines = re.findall(
        r"^(speedrun .*|scripts/.*|docker .*)$", (ROOT / "docs" / "containers.md").read_text(), re.MULTILINE
    )
    ours = [shlex.split(line)[1:] for line in lines if not line.startswith("docker ")]
    assert len(ours) == 5
    for name, *words in ours:
        command = cli.command.get_command(click.Context(cli.command), name)
        assert command is not None
        command.make_context(name, words)  # reads every option; raises what a user would be told
    assert [line for line in lines if line.startswith("docker ")] == re.findall(
        r"^#   (docker build .*? \.)", DOCKERFILE, re.M
    )


# --- what would be typed ------------------------------------------------------------------------------------


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A `docker` that writes down its words, has the images that it is told of, and ends with a code. All calls."""
    fake, log, images = tmp_path / "bin" / "docker", tmp_path / "calls", tmp_path / "images"
    fake.parent.mkdir()
    fake.write_text(
        f"""#!/usr/bin/env bash
printf '%s\\0' "$@" >>{log}; printf '\\n' >>{log}
case "$1 $2" in
  "image inspect")
    [[ -e {images}.down ]] && echo "Cannot connect to the Docker daemon" >&2 && exit 1
    if grep -qxF -- "${{@: -1}}" {images}; then echo {IMAGE}; exit; fi
    echo "Error: No such image: ${{@: -1}}" >&2 && exit 1 ;;
  "pull --") grep -qxF -- "published $3" {images}; exit ;;
  "build "*) echo speedrun:cpu >>{images} ;;
  "run "*) [[ -e {images}.broken ]] && exit 125 ;;
esac
exit 0
"""
    )
    fake.chmod(0o755)
    images.write_text("")
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in provenance.VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def calls(*have: str) -> list[list[str]]:
        images.write_text("".join(f"{image}\n" for image in have))
        return [line.split("\0")[:-1] for line in log.read_text().splitlines()] if log.exists() else []

    return calls


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*words], capture_output=True, text=True, check=False)


def volumes_of(call: list[str]) -> list[str]:
    return [word for before, word in itertools.pairwise(call) if before == "--volume"]


def test_the_script_hands_on_what_it_is_given(docker, tmp_path, monkeypatch):
    docker("speedrun:cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / "shards"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_x=1 2")
    monkeypatch.setenv("HF_TOKEN", "secret")
    done = command(str(SCRIPT), "run", "--track", "smoke-cpu", "--set", "a=b c")
    assert done.returncode == 0, done.stderr
    call = docker()[-1]
    assert call[0] == "run"
    assert call[call.index("--") + 1 :] == ["speedrun:cpu", "run", "--track", "smoke-cpu", "--set", "a=b c"]
    for option, value in (
        ("--shm-size", "16g"),
        ("--ulimit", "memlock=-1"),
        ("--user", f"{os.getuid()}:{os.getgid()}"),
    ):
        assert call[call.index(option) + 1] == value
    assert {"stack=67108864", "--no-healthcheck", "--rm"} <= set(call)
    assert f"SPEEDRUN_IMAGE={IMAGE}" in call
    assert "XLA_FLAGS" in call
    assert "HF_TOKEN" not in " ".join(call)
    assert "--gpus" not in call
    mounts = volumes_of(call)
    assert f"{tmp_path / 'shards'}:/workspace/data" in mounts
    assert f"{tmp_path / 'cache' / 'speedrun-docker'}:/cache" in mounts
    assert {f"{ROOT}/{name}:/workspace/{name}" for name in ("records", "runs")} <= set(mounts)
    assert not [mount for mount in mounts if ".git/config" in mount]


def test_gpus_go_in_where_there_are_some(docker, tmp_path):
    docker("speedrun:gpu")
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H100\n")
    assert command(str(SCRIPT), "--alone", "doctor").returncode == 0
    call = docker()[-1]
    assert call[call.index("--gpus") + 1] == "all"
    assert call[-2:] == ["speedrun:gpu", "doctor"]


def test_an_image_that_is_not_there_is_one_line(docker):
    done = command(str(SCRIPT), "doctor")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "make it: docker build --target cpu --tag speedrun:cpu ." in done.stderr
    assert [call[0] for call in docker()] == ["image"]


def test_the_script_hands_on_just_what_a_record_holds():
    (names,) = re.findall(r"^variables=\((.*?)\)", SCRIPT.read_text(), re.DOTALL | re.MULTILINE)
    assert tuple(names.split()) == provenance.VARIABLES


def test_a_record_is_reproduced_alone_in_its_container(docker, tmp_path):
    docker("speedrun:cpu")
    out = tmp_path / "out"
    words = ["--same-seeds", "--runs", "1", "--by", "A. Referee", "--out", str(out)]
    done = command("speedrun", "reproduce", f"{ROOT}/{COMMITTED}", "--docker", *words)
    assert done.returncode == 0, done.stderr
    call = docker()[-1]
    inner = call[call.index("--") + 1 :]
    assert inner == [
        "speedrun:cpu", "reproduce", "/record", "--out", "/out", "--unsafe-here", "--runs", "1", "--by", "A. Referee",
        "--same-seeds",
    ]  # fmt: skip
    assert call[call.index("--network") + 1] == "none"
    mounts = [mount for mount in volumes_of(call) if ".git/" not in mount]
    assert mounts == [f"{ROOT}/{COMMITTED}:/record:ro", f"{out}:/out"]
    assert f"SPEEDRUN_IMAGE={IMAGE}" in call


def test_a_local_image_is_built_where_the_record_names_none(docker, tmp_path):
    done = command("speedrun", "reproduce", f"{ROOT}/{COMMITTED}", "--docker", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    build = next(call for call in docker() if call[0] == "build")
    assert build == ["build", "--target", "cpu", "--tag", "speedrun:cpu", str(ROOT)]


def test_a_container_that_does_not_start_is_told(docker, tmp_path):
    docker("speedrun:cpu")
    (tmp_path / "images.broken").write_text("")
    done = command("speedrun", "reproduce", f"{ROOT}/{COMMITTED}", "--docker", "--out", str(tmp_path / "out"))
    assert (done.returncode, "the container ended with exit code 125" in done.stderr) == (1, True), (
        done.stderr
    )


@pytest.fixture
def made_in(tmp_path, monkeypatch):
    """The words of `docker run` for a record that was made in an image; the error where there are none."""
    from speedrun.ground.errors import UsageError
    from speedrun.ledger.record import load
    from speedrun.referee import container

    install_track(tmp_path)
    monkeypatch.setattr(track, "TRACKS_DIR", tmp_path)
    numbers = itertools.count()

    def choose(image: str | None, wanted: str | None = None) -> str:
        software = SOFTWARE | ({"image": image} if image else {})
        edit = change(runlog.Preflight, software=software)
        record = load(forge(tmp_path / f"record-{next(numbers)}", edit_log=edit))
        try:
            return container.image_for(record, wanted, partial(click.echo, err=True))
        except UsageError as error:
            return f"error: {error}"

    return choose


def test_the_image_of_the_record_is_the_one(docker, made_in, capfd):
    docker("speedrun:cpu")
    assert made_in(None) == "speedrun:cpu"
    assert made_in(IMAGE) == (
        f"error: image {IMAGE} is not here and cannot be pulled; "
        "'docker load' it, or name another: --image speedrun:cpu"
    )
    assert made_in(IMAGE, "speedrun:cpu") == "speedrun:cpu"
    assert not capfd.readouterr().err
    docker(IMAGE)
    assert made_in(IMAGE) == IMAGE
    assert (
        "so the verdict is its author's word; --image speedrun:cpu asks one of yours"
        in capfd.readouterr().err
    )
    published = f"example.org/speedrun@{IMAGE}"
    assert "cannot be pulled" in made_in(published)
    docker(f"published {published}")
    assert made_in(published) == published
    assert "image mine is not here" in made_in(None, "mine")


def test_an_engine_that_does_not_answer_is_one_line(docker, made_in, tmp_path, monkeypatch):
    (tmp_path / "images.down").write_text("")
    assert made_in(None) == (
        "error: docker says: Cannot connect to the Docker daemon; start its engine, or leave --docker out"
    )
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no docker on the PATH" in made_in(None)


@pytest.mark.parametrize("named", [IMAGE, f"example.org/a/b@{IMAGE}"])
def test_a_run_knows_the_image_around_it(monkeypatch, named):
    monkeypatch.setenv("SPEEDRUN_IMAGE", named)
    assert provenance.software()["image"] == named
    monkeypatch.setenv("SPEEDRUN_IMAGE", "mine:latest")
    assert "image" not in provenance.software(), "a tag can be moved"


# --- its steps, without an engine ---------------------------------------------------------------------------

#: A Python like that of the base image, that needs nothing beside its own folder.
BASE_PYTHON = os.environ.get("SPEEDRUN_BASE_PYTHON", "")


@pytest.mark.compile
@pytest.mark.skipif(
    not (BASE_PYTHON and os.geteuid() == 0 and shutil.which("debootstrap")),
    reason="needs root, debootstrap, and SPEEDRUN_BASE_PYTHON, a folder with bin/python",
)
def test_every_step_of_the_cpu_target_runs_in_a_fresh_root(tmp_path):
    """Then doctor and a short run inside, as a user who is not root. Prints seconds and sizes: pytest -s."""
    folder, watch = tmp_path / "root", Stopwatch()
    fresh_root(folder, Path(BASE_PYTHON))
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    root = Root(folder, ROOT, pip)
    tell(f"root: {watch.seconds:.0f} s, {megabytes(folder)} MB")
    for step in STAGES["cpu"]:
        watch = Stopwatch()
        done = root.execute(step)
        if done is not None:
            tell(f"{step.name} {step.text[:60]}: {watch.seconds:.0f} s, {megabytes(folder)} MB")
            assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        ["speedrun", "doctor"],
        ["speedrun", "data", "synth", "--track", "smoke-cpu"],
        ["speedrun", "run", "--track", "smoke-cpu", "--out", "runs/a", "--set", "stages.0.num_steps=20"],
        ["speedrun", "validate", "runs/a"],
    ):
        watch = Stopwatch()
        done = root.run(words)
        tell(
            f"$ {' '.join(words)}: {watch.seconds:.0f} s, exit code {done.returncode}\n{done.stdout[-1500:]}"
        )
        assert done.returncode == (1 if words[1] == "run" else 0), done.stdout + done.stderr
    assert not [path for path in (folder / "cache").rglob("*pip*") if path.is_dir()], "no cache is left"


def tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def megabytes(folder: Path) -> int:
    done = subprocess.run(["du", "-smx", str(folder)], capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0])
