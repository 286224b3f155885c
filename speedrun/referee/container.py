"""Reproduce a record inside a container: which image, what is mounted. `scripts/docker_run.sh` runs it."""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from speedrun.data import inventory
from speedrun.ground import children
from speedrun.ground.console import clean
from speedrun.ground.errors import SpeedrunError, UsageError
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
    recorded = record.lead.preflight.software.get("image")
    target = "gpu" if record.lead.preflight.platform == "gpu" else "cpu"
    local = f"speedrun:{target}"
    if wanted is not None:
        if not _is_here(wanted):
            raise UsageError(f"image {wanted} is not here; 'docker image ls' lists those that are")
        return wanted
    if recorded is not None:
        named = _recorded(clean(recorded), local)
        say(
            f"warning: {named} is the image that the record chose, so the verdict is its author's word; "
            f"--image {local} asks one of yours"
        )
        return named
    if not _is_here(local):
        say(f"building {local} from this checkout, as the record names no image")
        _build(local, target)
    return local


def _recorded(named: str, local: str) -> str:
    """Return the image that a record names, after pulling it if it was published."""
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


def data_for(record: Record, data: Path | None) -> Path | None:
    """Return the folder of shards to mount; None if the record's source makes them."""
    rules = record.rules
    return data if data is not None or rules.synthetic is not None else inventory.data_folder(rules, None)


def inner_words(
    num_runs: int | None, by: str, data: Path | None, *, same_seeds: bool, as_json: bool
) -> list[str]:
    """Return the command for the container."""
    words = ["reproduce", _RECORD, "--out", _OUT, "--unsafe-here"]  # the container isolates it
    words += ["--runs", str(num_runs)] if num_runs is not None else []
    words += ["--by", by] if by else []
    words += ["--data", _DATA] if data is not None else []
    return words + ["--same-seeds"] * same_seeds + ["--json"] * as_json


def reproduced(image: str, record: Path, out: Path, data: Path | None, words: Sequence[str]) -> int:
    """Run the command in the image, with record and data mounted read-only, and return its exit code.

    Raises:
        UsageError: a folder that cannot be mounted.
        SpeedrunError: the container did not start.
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
    """Run a program, forwarding signals, and return its exit code."""
    return children.wait_for(subprocess.Popen(argv, process_group=0))
