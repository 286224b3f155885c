"""Checks and defaults for the options of `speedrun launch`."""

import getpass
from pathlib import Path
from typing import Any

from speedrun.ground import clock
from speedrun.ground.errors import UsageError
from speedrun.ground.plugins import own_file
from speedrun.ground.sourcefile import RECIPES, ROOT
from speedrun.ground.track import Track
from speedrun.launch import kubernetes, skypilot
from speedrun.launch.job import Job, is_bucket

#: Options that only one cluster understands.
_OWNERS = {
    "partition": "slurm",
    "account": "slurm",
    "namespace": "kubernetes",
    "claim": "kubernetes",
    "cloud": "skypilot",
    "price": "skypilot",
    "hosts": "ssh",
}
_MOST_DIGITS = 4  #: of hours; a year has 8,766


def check(
    on: str,
    track: Track,
    runs: int | None,
    nodes: int,
    gpus: int,
    hosts: tuple[str, ...],
    options: dict[str, Any],
) -> None:
    """Raise UsageError for options that contradict each other, the track, or the cluster `on`.

    `gpus` are those of each node, `runs` is None for a single run, `options` are fields of `Job`, None if left out.
    """
    for name, value in {**options, "hosts": ",".join(hosts) or None}.items():
        if value == "":
            raise UsageError(f"--{name} is empty; pass something, or leave it out")
        if value is not None and _OWNERS.get(name, on) != on:
            raise UsageError(f"--{name} is for {_OWNERS[name]}, got --on {on}; leave it out")
    is_gpu = track.rules.platform == "gpu"
    if runs is not None and nodes > 1:
        raise UsageError(f"--runs {runs} on {nodes} nodes; a batch runs on one: leave out --runs, or --nodes")
    if track.rules.platform == "cpu" and gpus:
        raise UsageError(f"--gpus-per-node {gpus}; {track.id} runs on CPUs; leave it out")
    if is_gpu and not gpus:
        raise UsageError(f"--gpus-per-node 0; {track.id} needs GPUs; leave it out, or choose another track")
    if options["image"] and options["checkout"]:
        raise UsageError("--image and --checkout; speedrun is in one of them; leave the other out")
    if on == "ssh":
        _check_hosts(nodes, hosts, options)
    if on == "kubernetes" and not options["image"]:
        raise UsageError("--image missing; pods are made of one: need a container that has speedrun")
    if on == "kubernetes" and not options["claim"]:
        raise UsageError(
            "--claim missing; a pod's disk is deleted: need a PersistentVolumeClaim for the record"
        )
    if not options["data"] and not track.data.is_ours_to_get:
        raise UsageError(f"--data missing; {track.id} brings no shards: {track.data.get}")


def _check_hosts(nodes: int, hosts: tuple[str, ...], options: dict[str, Any]) -> None:
    if nodes != len(hosts):
        raise UsageError(
            f"--hosts names {len(hosts)} hosts, got --nodes {nodes}; need --hosts A,B,... and no --nodes"
        )
    if len(set(hosts)) < len(hosts):
        raise UsageError(f"--hosts {','.join(hosts)} repeats a host; each has one process; name it once")
    if options["image"]:
        raise UsageError("--image with --on ssh; hosts run the checkout; leave it out")


def places(on: str, track: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `Job` for names and folders, with defaults for those that were left out.

    Raises:
        UsageError: for a folder that the cluster cannot use.
    """
    defaults = {
        "name": track,
        "checkout": str(ROOT),
        "stage": f"/tmp/speedrun-{getpass.getuser()}",
        "out": str(Path("runs").absolute()),
    }
    if on == "kubernetes":  # names of finished jobs stay taken there
        stamp = "".join(char for char in clock.now().utc if char.isdigit())[2:14]
        out = f"{kubernetes.SHARED}/records"
        defaults |= {"name": f"{track}-{stamp}", "stage": kubernetes.STAGE, "out": out}
    if on == "skypilot":
        defaults |= {"stage": skypilot.STAGE, "out": skypilot.RECORDS}
    if options["image"] or not (ROOT / "scripts").is_dir():  # an installed wheel is no checkout
        del defaults["checkout"]
    if not options["image"] and not (options["checkout"] or "checkout" in defaults):
        raise UsageError(
            "--checkout missing; this speedrun is installed from a wheel: need a checkout or an --image"
        )
    found = defaults | {key: value for key, value in options.items() if value is not None}
    for key in ("data", "out"):
        place = found.get(key, "")
        if on == "kubernetes" and place and not Path(place).is_relative_to(kubernetes.SHARED):
            raise UsageError(
                f"--{key} {place}; the claim is mounted at {kubernetes.SHARED}: need a path below it"
            )
        if on != "skypilot" and is_bucket(place):
            raise UsageError(f"--{key} {place}; only skypilot mounts buckets; need a path that begins with /")
    if Path(found.get("data", "")).is_relative_to(found["stage"]):
        raise UsageError(f"--data lies below --stage {found['stage']}, which is cleared; need two folders")
    return found


def recipe_words(recipe: str | None, image: str | None) -> tuple[str, ...]:
    """Return the option that names the file of a recipe outside the package, as nodes see it; empty for other recipes.

    Raises:
        UsageError: for such a recipe and a container, which does not hold the file.
    """
    path = own_file(recipe)
    if path is None:
        return ()
    if image:
        raise UsageError(
            f"--recipe {path} is not in image {image}; build it into one, in {RECIPES}, and give its name"
        )
    return ("--recipe", str(path))


def seconds(limit: str) -> int:
    """Parse H:MM:SS.

    Raises:
        UsageError: for another form, or zero.
    """
    parts = limit.split(":")
    is_good = len(parts) == 3 and all(part.isascii() and part.isdigit() for part in parts)
    if not is_good or not any(map(int, parts)) or max(map(len, parts)) > _MOST_DIGITS:
        raise UsageError(f"--time {limit!r}; need H:MM:SS, as in 2:30:00")
    hours, minutes, seconds = map(int, parts)
    return hours * 3600 + minutes * 60 + seconds


def ranking_note(job: Job, runs: int | None) -> str:
    """Return why the record of a job would have no rank, on a track that ranks; else an empty text."""
    rules, track = job.track.rules, job.track.id
    if not rules.ranked:
        return ""
    if not job.is_ranked:
        return f"{track} ranks one node of {rules.num_devices} GPUs; a run on {job.nodes} of {job.gpus} is not ranked"
    if runs is None or runs < rules.min_runs:
        return f"a rank on {track} needs a batch; add --runs {rules.min_runs} or more"
    return ""
