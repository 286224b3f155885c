"""The container: what would be typed to an engine, which is not here."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typed import program

from speedrun.base import provenance

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "docker_run.sh"
IMAGE = "sha256:" + "1" * 64
COMMITTED = "records/smoke-cpu/2026-11-29-first"


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A `docker` that writes down its words and has the images that it is told of. All calls."""
    log, images = tmp_path / "calls", tmp_path / "images"
    program(
        tmp_path / "bin" / "docker",
        f"""#!/usr/bin/env bash
printf '%s\\0' "$@" >>{log}; printf '\\n' >>{log}
case "$1 $2" in
  "image inspect")
    if grep -qxF -- "${{@: -1}}" {images}; then echo {IMAGE}; exit; fi
    echo "Error: No such image: ${{@: -1}}" >&2 && exit 1 ;;
esac
exit 0
""",
    )
    images.write_text("")
    program(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\nexit 9\n")
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


def test_untrusted_code_runs_alone_with_gpus_and_mounts_and_no_secret(docker, tmp_path, monkeypatch):
    """As docs/containers.md reproduces a record. The image must be there."""
    done = command(str(SCRIPT), "doctor")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H100\n")
    docker("speedrun:gpu")
    for name in provenance.VARIABLES:
        monkeypatch.setenv(name, "1 2")
    monkeypatch.setenv("HF_TOKEN", "secret")
    folders = [f"{ROOT}/{COMMITTED}:/record:ro", f"{tmp_path}:/out"]
    mounts = [word for folder in folders for word in ("--mount", folder)]
    words = ["reproduce", "/record", "--out", "/out", "--unsafe-here", "--set", "a=b c"]
    done = command(str(SCRIPT), "--alone", *mounts, *words)
    assert done.returncode == 0, done.stderr
    call = docker()[-1]
    assert call[call.index("--") + 1 :] == ["speedrun:gpu", *words]
    given = {"--gpus": "all", "--network": "none", "--user": f"{os.getuid()}:{os.getgid()}"}
    assert {option: call[call.index(option) + 1] for option in given} == given
    handed = [word for before, word in itertools.pairwise(call) if before == "--env"]
    assert handed == [f"SPEEDRUN_IMAGE={IMAGE}", *provenance.VARIABLES], "just what a record holds"
    volumes = [word for before, word in itertools.pairwise(call) if before == "--volume"]
    assert [mount for mount in volumes if ".git/" not in mount] == folders


def test_a_run_knows_the_image_around_it(monkeypatch):
    monkeypatch.setenv("SPEEDRUN_IMAGE", f"example.org/a/b@{IMAGE}")
    assert provenance.software()["image"] == f"example.org/a/b@{IMAGE}"
    monkeypatch.setenv("SPEEDRUN_IMAGE", "mine:latest")
    assert "image" not in provenance.software(), "a tag can be moved"
