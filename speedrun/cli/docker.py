"""The same command inside a container: which image, and what is mounted. `scripts/docker_run.sh` does the rest."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import click

from speedrun.ground import children
from speedrun.ground import track as tracks
from speedrun.ground.console import clean
from speedrun.ground.errors import EXIT_CODES, SpeedrunError, UsageError, meaning
from speedrun.ledger.format import Manifest
from speedrun.ledger.history import ROOT

SCRIPT = ROOT / "scripts" / "docker_run.sh"
_ANSWER_S = 60.0
#: Where the container sees what the command names.
_RECORD, _OUT, _DATA = "/record", "/out", "/shards"


def image_for(manifest: Manifest, wanted: str | None) -> str:
    """The image to run in: the wanted one, else the one that the record names, else the local one for its platform.

    A local one that is not there is built from this checkout; one that a record names is never replaced silently.

    Raises:
        UsageError: no docker, or the image is not to be had.
    """
    if shutil.which("docker") is None:
        raise UsageError("there is no docker on the PATH; install Docker Engine, or leave --docker out")
    recorded = manifest.software.get("image")
    target = "gpu" if manifest.hardware.platform == "gpu" else "cpu"
    local = f"speedrun:{target}"
    if wanted is not None:
        if not _is_here(wanted):
            raise UsageError(f"image {wanted} is not here; 'docker image ls' lists those that are")
        return wanted
    if recorded is not None:
        named = _recorded(clean(recorded), local)
        click.echo(
            f"warning: {named} is the image that the record chose, so the verdict is its author's word; "
            f"--image {local} asks one of yours",
            err=True,
        )
        return named
    if not _is_here(local):
        _build(local, target)
    return local


def _recorded(named: str, local: str) -> str:
    """The image that a record names: here, or where it was published."""
    if _is_here(named):
        return named
    published = "@" in named
    if (
        published
        and subprocess.run(["docker", "pull", "--", named], stdout=subprocess.DEVNULL, check=False).returncode
        == 0
    ):
        return named
    why = "cannot be pulled" if published else "is not here and was never published"
    raise UsageError(
        f"the record was made in image {named}, which {why}; 'docker load' it, or name another: --image {local}"
    )


def _is_here(image: str) -> bool:
    """Whether the engine has the image.

    Raises:
        UsageError: if the engine does not answer.
    """
    argv = ["docker", "image", "inspect", "--format", "{{.Id}}", "--", image]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"docker does not answer: {clean(str(error))}; start its engine") from None
    if done.returncode and "no such image" not in done.stderr.lower():
        said = clean((done.stderr.strip().splitlines() or ["nothing"])[-1])
        raise UsageError(f"docker says: {said}; start its engine, or leave --docker out")
    return done.returncode == 0


def _build(tag: str, target: str) -> None:
    click.echo(f"building {tag} from this checkout, as the record names no image", err=True)
    argv = ["docker", "build", "--target", target, "--tag", tag, str(ROOT)]
    if code := _waited_for(argv):
        raise UsageError(
            f"docker build ended with exit code {code}, see above; build {tag} by hand, or leave --docker out"
        )


def data_for(manifest: Manifest, data: Path | None) -> Path | None:
    """The folder of shards to mount; None where the record's own source makes them."""
    from speedrun.data import inventory

    rules = tracks.load(manifest.track.id.rpartition("@")[0])
    return data if data is not None or rules.synthetic is not None else inventory.data_folder(rules, None)


def inner_words(
    num_runs: int | None, by: str, data: Path | None, *, same_seeds: bool, as_json: bool
) -> list[str]:
    """The command as the container gets it."""
    words = ["reproduce", _RECORD, "--out", _OUT, "--unsafe-here"]  # the container is its world
    words += ["--runs", str(num_runs)] if num_runs is not None else []
    words += ["--by", by] if by else []
    words += ["--data", _DATA] if data is not None else []
    return words + ["--same-seeds"] * same_seeds + ["--json"] * as_json


def reproduced(image: str, record: Path, out: Path, data: Path | None, words: Sequence[str]) -> int:
    """Runs the command in the image, with the record and the data mounted read-only; its exit code.

    Raises:
        UsageError: a folder that cannot be mounted.
        SpeedrunError: the container did not come to run the command.
    """
    mounts = [(record, f"{_RECORD}:ro"), (out, _OUT), *([(data, f"{_DATA}:ro")] if data is not None else [])]
    argv = [str(SCRIPT), "--image", image, "--alone"]
    for folder, place in mounts:
        argv += ["--mount", f"{_mountable(folder)}:{place}"]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror}; choose an --out that can be written") from None
    code = _waited_for([*argv, *words])
    if code not in EXIT_CODES:
        raise SpeedrunError(
            f"the container ended with {meaning(code)}, see above; 'docker run' itself says 125 to 127"
        )
    return code


def _mountable(folder: Path) -> Path:
    path = folder.absolute()
    if ":" in str(path):
        raise UsageError(f"{path} holds a colon, which docker takes for the end of a path; move it")
    return path


def _waited_for(argv: Sequence[str]) -> int:
    """The exit code of a program to which signals go on."""
    return children.wait_for(subprocess.Popen(argv, process_group=0))
