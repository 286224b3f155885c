"""Reproduce a record inside a container: which image, what is mounted. `scripts/docker_run.sh` runs it."""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from speedrun.data import inventory
from speedrun.ground import children
from speedrun.ground.console import clean
from speedrun.ground.errors import SpeedrunError, UsageError, translate_os_errors
from speedrun.ground.exit_codes import EXIT_CODES, meaning
from speedrun.ledger.history import ROOT
from speedrun.ledger.record import Record

SCRIPT = ROOT / "scripts" / "docker_run.sh"
_ANSWER_S = 60.0
#: Paths inside the container.
_RECORD, _OUT, _DATA = "/record", "/out", "/shards"


def image_for(record: Record, wanted: str | None, say: Callable[[str], object]) -> str:
    """Choose the image: the wanted one, else the one that the record names, else the local one for its platform.

    A missing local image is built from this checkout. An image that a record names is never replaced.

    Args:
        record: to be run again.
        wanted: a local image, or None.
        say: takes a line of progress, or a warning.

    Raises:
        UsageError: no docker, or no such image.
    """
    if shutil.which("docker") is None:
        raise UsageError("there is no docker on the PATH; install Docker Engine, or leave --docker out")
    recorded = record.lead.preflight
    target = "gpu" if recorded.platform == "gpu" else "cpu"
    local, image = f"speedrun:{target}", wanted or clean(recorded.software.get("image", ""))
    if not image:
        if not _is_here(local):
            say(f"building {local} from this checkout, as the record names no image")
            _build(local, target)
        return local
    if not _is_here(image) and not (wanted is None and _was_pulled(image)):
        raise UsageError(
            f"image {image} is not here and cannot be pulled; 'docker load' it, or name another: --image {local}"
        )
    if wanted is None:
        say(
            f"warning: {image} is the image that the record chose, so the verdict is its author's word; "
            f"--image {local} asks one of yours"
        )
    return image


def _was_pulled(image: str) -> bool:
    """Pull an image that was published: its name holds a digest."""
    argv = ["docker", "pull", "--", image]
    return "@" in image and not subprocess.run(argv, stdout=subprocess.DEVNULL, check=False).returncode


def _is_here(image: str) -> bool:
    """Whether docker has the image.

    Raises:
        UsageError: if docker does not answer.
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
    argv = ["docker", "build", "--target", target, "--tag", tag, str(ROOT)]
    if code := _waited_for(argv):
        raise UsageError(
            f"docker build ended with exit code {code}, see above; build {tag} by hand, or leave --docker out"
        )


def reproduced(image: str, record: Record, out: Path, data: Path | None, words: Sequence[str]) -> int:
    """Reproduce a record in the image, which isolates it, and return the exit code.

    Args:
        image: see `image_for`.
        record: its folder is mounted read-only, as the data is.
        out: of the runs.
        data: folder of shards; None: the track's own, or shards that are made inside.
        words: further options of `speedrun reproduce`.

    Raises:
        UsageError: a folder that cannot be mounted.
        SpeedrunError: the container did not start.
    """
    mounts = {record.root: f"{_RECORD}:ro", out: _OUT}
    inner = ["reproduce", _RECORD, "--out", _OUT, "--unsafe-here", *words]
    if data is not None or record.rules.synthetic is None:
        mounts[inventory.data_folder(record.rules, data)] = f"{_DATA}:ro"
        inner += ["--data", _DATA]
    argv = [str(SCRIPT), "--image", image, "--alone"]
    for folder, place in mounts.items():
        if ":" in str(folder.absolute()):
            raise UsageError(f"{folder} holds a colon, which docker takes for the end of a path; move it")
        argv += ["--mount", f"{folder.absolute()}:{place}"]
    with translate_os_errors(out, UsageError):
        out.mkdir(parents=True, exist_ok=True)
    code = _waited_for([*argv, *inner])
    if code not in EXIT_CODES:
        raise SpeedrunError(
            f"the container ended with {meaning(code)}, see above; 'docker run' itself says 125 to 127"
        )
    return code


def _waited_for(argv: Sequence[str]) -> int:
    """Run a program, forwarding signals, and return its exit code."""
    return children.wait_for(subprocess.Popen(argv, process_group=0))
