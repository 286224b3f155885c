"""What a user asks `speedrun launch` for, made a job that can be: with defaults, and with what to know of it."""

import getpass
import importlib
from pathlib import Path
from typing import Any

import click

from speedrun.cli.options import parse_settings
from speedrun.ground import clock
from speedrun.ground import devices as kinds
from speedrun.ground import track as tracks
from speedrun.ground.errors import UsageError
from speedrun.ground.track import Track
from speedrun.launch import kubernetes, skypilot
from speedrun.launch.job import Job, clock_time, is_bucket

#: Options that one cluster alone understands.
_OWN = {
    "partition": "slurm",
    "account": "slurm",
    "namespace": "kubernetes",
    "claim": "kubernetes",
    "cloud": "skypilot",
    "price": "skypilot",
    "hosts": "ssh",
}
#: What launch says itself to `run` and `batch`.
_TAKEN = ("track", "data", "out", "runs", "resume", "local_processes", "coordinator", "processes", "process")
_CHECKOUT = Path(__file__).parent.parent.parent

_SETUP_S = 900  #: to look at a machine, install, copy shards
_UNKNOWN_S = 1800  #: for a run, where nothing is known
_ROUND_S = 600
_MOST_DIGITS = 4  #: of hours; a year has 8,766


def job_of(
    on: str,
    *,
    track: str,
    runs: int | None,
    nodes: int | None,
    gpus_per_node: int | None,
    limit: str | None,
    words: tuple[str, ...],
    hosts: str | None,
    **others: Any,
) -> tuple[Job, list[str]]:
    """The job, and notes on what its user may not expect.

    Args:
        on: the cluster.
        track: by name.
        runs: of a batch; None: one run.
        nodes: None: one, or as many as there are hosts.
        gpus_per_node: None: what the track asks for.
        limit: H:MM:SS; None: what the budget says, and more.
        words: for `speedrun run` or `speedrun batch`.
        hosts: with commas between them.
        others: fields of `Job`; None: left out.

    Raises:
        UsageError: for what cannot be.
    """
    for option, owner in _OWN.items():
        if (hosts if option == "hosts" else others[option]) is not None and owner != on:
            raise UsageError(f"--{option} is for {owner}, got --on {on}; leave it out")
    for option, value in others.items():
        if value == "":
            raise UsageError(f"--{option} is empty; pass something, or leave it out")
    rules = tracks.load(track)
    kinds.load(others["gpu"])
    host_names = tuple(filter(None, (hosts or "").split(",")))
    num_nodes = nodes or len(host_names) or 1
    gpus = gpus_per_node
    if gpus is None:
        gpus = rules.rules.num_devices if rules.rules.platform == "gpu" else 0
    _check(on, rules, runs, num_nodes, gpus, host_names, others)
    given = _parsed(rules, runs, num_nodes, gpus, words)
    if gpus:
        _check_division(rules, given, num_nodes, gpus)
    devices = num_nodes * gpus
    base = ["speedrun", "run" if runs is None else "batch", "--track", track]
    base += [] if runs is None else ["--runs", str(runs)]
    base += ["--devices", str(devices)] if devices not in (0, rules.rules.num_devices) else []
    time_s, why = _seconds(limit), ""
    if time_s is None:
        time_s, why = _expected_s(rules, given, gpus, others["gpu"], runs or 1)
    job = Job(
        track=rules,
        nodes=num_nodes,
        gpus=gpus,
        words=(*base, *words),
        time_s=time_s,
        hosts=host_names,
        **_places(on, track, others),
    )
    return job, [
        *_notes(job, runs),
        *([f"{clock_time(time_s)} at most: {why}; --time sets another"] if why else []),
    ]


def _check(
    on: str,
    track: Track,
    runs: int | None,
    nodes: int,
    gpus: int,
    hosts: tuple[str, ...],
    others: dict[str, Any],
) -> None:
    """Refuses what cannot be, before anything is asked of a cluster."""
    platform = track.rules.platform
    if runs is not None and nodes > 1:
        raise UsageError(f"--runs {runs} on {nodes} nodes; a batch runs on one: leave out --runs, or --nodes")
    if platform == "cpu" and gpus:
        raise UsageError(f"--gpus-per-node {gpus}; {track.id} runs on CPUs; leave it out")
    if platform == "gpu" and not gpus:
        raise UsageError(f"--gpus-per-node 0; {track.id} needs GPUs; leave it out, or choose another track")
    if others["image"] and others["checkout"]:
        raise UsageError("--image and --checkout; speedrun is in one of them; leave the other out")
    if on == "ssh" and nodes != len(hosts):
        raise UsageError(
            f"--hosts names {len(hosts)} hosts, got --nodes {nodes}; need --hosts A,B,... and no --nodes"
        )
    if len(set(hosts)) < len(hosts):
        raise UsageError(f"--hosts {','.join(hosts)} names one twice; each has one process; name it once")
    if on == "ssh" and others["image"]:
        raise UsageError(
            "--image on hosts that are reached by ssh; what runs there is the checkout; leave it out"
        )
    if on == "kubernetes":
        if not others["image"]:
            raise UsageError("--image missing; pods are made of one: need a container that has speedrun")
        if not others["claim"]:
            raise UsageError(
                "--claim missing; a pod's disk goes with it: need a PersistentVolumeClaim for the record"
            )
    if not others["data"] and not track.data.is_ours_to_get:
        raise UsageError(f"--data missing; {track.id} brings no shards: {track.data.get}")


def _parsed(track: Track, runs: int | None, nodes: int, gpus: int, words: tuple[str, ...]) -> dict[str, Any]:
    """What stands after `--`, read by the command that will get it: a typing error is told now, not after the queue."""
    name = "run" if runs is None else "batch"
    command = importlib.import_module(f"speedrun.cli.{name}").command
    with command.make_context(f"speedrun {name}", list(words)) as ctx:
        for param in command.params:
            is_given = ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
            if is_given and (param.name in _TAKEN or (param.name == "devices" and gpus)):
                option = "--gpus-per-node" if param.name == "devices" else f"--{param.name.replace('_', '-')}"
                raise UsageError(
                    f"{param.opts[0]} stands after --; launch says that itself; see its own {option}"
                )
        if nodes > 1 and ctx.params.get("checkpoint_every"):
            raise UsageError(
                "--checkpoint-every on several nodes; each has a disk of its own; need --nodes 1"
            )
        parse_settings(ctx.params["settings"])
        return ctx.params


def _check_division(track: Track, given: dict[str, Any], nodes: int, gpus: int) -> None:
    """Lets the program say now, and not after the queue, whether so many GPUs can share its batches."""
    # JAX is imported only now: an error above should not wait for it.
    from jax.sharding import AbstractMesh

    from speedrun.ground.mesh import DATA, REPLICA
    from speedrun.science import recipes
    from speedrun.science.params import SHARDS
    from speedrun.training.program import Program

    recipe = recipes.load(given["recipe"] or track.recipe).override(parse_settings(given["settings"]))
    replicas = given.get("replicas") or nodes
    if nodes * gpus % replicas:
        raise UsageError(f"--replicas {replicas}; {nodes} nodes of {gpus} GPUs cannot be shared by so many")
    mesh = AbstractMesh((replicas, nodes * gpus // replicas), (REPLICA, DATA))  # of devices that are not here
    Program(recipe, mesh, given["microbatches"] or max(SHARDS, mesh.size))  # pyright: ignore[reportArgumentType]


def _places(on: str, track: str, others: dict[str, Any]) -> dict[str, Any]:
    """Names and folders, with what stands for those that were left out."""
    stamp = clock.now().utc
    defaults = {
        "name": track,
        "checkout": str(_CHECKOUT),
        "stage": f"/tmp/speedrun-{getpass.getuser()}",
        "out": str(Path("runs").absolute()),
    }
    if on == "kubernetes":  # where names of jobs that are over stay taken
        name = f"{track}-{''.join(c for c in stamp if c.isdigit())[2:14]}"
        defaults |= {"name": name, "stage": kubernetes.STAGE, "out": f"{kubernetes.SHARED}/records"}
    if on == "skypilot":
        defaults |= {"stage": skypilot.STAGE, "out": skypilot.RECORDS}
    if others["image"]:
        del defaults["checkout"]
    found = defaults | {key: value for key, value in others.items() if value is not None}
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


def _seconds(limit: str | None) -> int | None:
    if limit is None:
        return None
    parts = limit.split(":")
    if (
        len(parts) != 3
        or not all(part.isascii() and part.isdigit() for part in parts)
        or not any(map(int, parts))
        or max(map(len, parts)) > _MOST_DIGITS
    ):
        raise UsageError(f"--time {limit!r}; need H:MM:SS, as in 2:30:00")
    hours, minutes, seconds = map(int, parts)
    return hours * 3600 + minutes * 60 + seconds


def _expected_s(track: Track, given: dict[str, Any], gpus: int, gpu: str, runs: int) -> tuple[int, str]:
    """A limit that a healthy run keeps, and what it follows from."""
    # JAX is imported only now: an error above should not wait for it.
    from speedrun.predict import plan
    from speedrun.science import recipes
    from speedrun.study import budget

    recipe = recipes.load(given["recipe"] or track.recipe).override(parse_settings(given["settings"]))
    planned = None
    if gpus:
        devices = next(n for n in (8, 4, 2, 1) if n <= gpus)
        planned = plan.plan(recipe, gpu, devices, given["microbatches"] or 8)
        if refused := plan.refusal(recipe, planned):
            raise UsageError(refused)
    run_s = budget.budget(track, recipe, runs, _CHECKOUT / "records", planned, dollars=None).run_s
    whole_s = _SETUP_S + track.rules.untimed_cap_s + 2 * runs * (run_s or _UNKNOWN_S / 2)
    why = "twice what 'speedrun plan' expects" if run_s else f"{_UNKNOWN_S // 60} minutes a run, a guess"
    return int(-(-whole_s // _ROUND_S)) * _ROUND_S, f"{why}, and what {track.id} grants for compiling"


def _notes(job: Job, runs: int | None) -> list[str]:
    """Why a record of it would have no rank, on a track that ranks."""
    rules, track = job.track.rules, job.track.id
    if not rules.ranked:
        return []
    if not job.is_ranked:
        return [
            f"{track} ranks one node of {rules.num_devices} GPUs; a run on {job.nodes} of {job.gpus} is not ranked"
        ]
    if runs is None or runs < rules.min_runs:
        return [f"a rank on {track} takes a batch; for one add --runs {rules.min_runs} or more"]
    return []
