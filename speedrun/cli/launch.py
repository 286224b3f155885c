"""`speedrun launch`: a run or a batch on a cluster, as one small file that the user reads and owns."""

import contextlib
import getpass
import importlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import click
import msgspec

from speedrun import clock, signals
from speedrun import devices as kinds
from speedrun import track as tracks
from speedrun.cli.options import Integer, Number, example, json_option, parse_settings, track_option
from speedrun.data.wholefile import write_whole
from speedrun.errors import UsageError, unknown
from speedrun.launch import kubernetes, skypilot
from speedrun.launch.job import Job, clock_time, is_bucket
from speedrun.track import Track

#: What each cluster is started with; FILE is put in, or else the text goes to the standard input.
_CLIENTS = {
    "slurm": ("sbatch",),
    "kubernetes": ("kubectl", "create", "--filename=-"),  # `apply` says "unchanged" of a job that is over
    "skypilot": ("sky", "launch", "--cluster", "NAME", "FILE"),  # it asks before it rents
    "ssh": ("bash", "FILE"),
}
#: Options that one of them alone understands.
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
_END_S = 300  #: of a run: validations, plots, checks
_UNKNOWN_S = 1800  #: to train, where nothing is known
_ROUND_S = 600


@click.command(
    epilog=example(
        "speedrun launch --on slurm --track main-8xh100 --runs 6 --data /shared/fineweb10B",
        "speedrun launch --on kubernetes --claim work --image registry/me/speedrun:1 --save job.yaml",
        "speedrun launch --on skypilot --track main-8xh100 --runs 6 --price 30 --submit",
        "speedrun launch --on ssh --hosts me@node1,me@node2 --track smoke-cpu -- --seed 1",
    )
)
@click.option("--on", required=True, metavar="CLUSTER", help=", ".join(_CLIENTS) + ".")
@click.option("--print", "action", flag_value="print", default=True, help="On stdout. The default.")
@click.option("--submit", "action", flag_value="submit", help="Hand it to the cluster's own client.")
@click.option(
    "--save", type=click.Path(path_type=Path), metavar="FILE", help="A new file for it, instead of stdout."
)
@track_option("main-8xh100")
@click.option("--runs", type=Integer(2), metavar="N", help="A batch of so many. Default: one run.")
@click.option("--nodes", type=Integer(1, 4096), metavar="N", help="Share one run. Default: 1, or all hosts.")
@click.option("--gpus-per-node", type=Integer(0, 64), metavar="N", help="Default: what the track asks for.")
@click.option("--gpu", default="h100", show_default=True, metavar="KIND", help=", ".join(kinds.DEVICES) + ".")
@click.option(
    "--time", "limit", metavar="H:MM:SS", help="At most. Default: as `speedrun plan` expects, twice."
)
@click.option(
    "--data", metavar="DIR", help="Shards on a shared disk. Default: each node makes or fetches them."
)
@click.option("--stage", metavar="DIR", help="On each node's own disk. Default: below /tmp.")
@click.option("--out", metavar="DIR", help="The record is copied into it. Default: ./runs, or the claim's.")
@click.option(
    "--checkout", metavar="DIR", help="This code, installed, on the nodes. Default: where it is here."
)
@click.option("--image", metavar="IMAGE", help="A container that has `speedrun`, instead of the checkout.")
@click.option("--name", metavar="NAME", help="Of the job. Default: the track's.")
@click.option("--partition", metavar="NAME", help="Of SLURM.")
@click.option("--account", metavar="NAME", help="Of SLURM.")
@click.option("--namespace", metavar="NAME", help="Of Kubernetes.")
@click.option("--claim", metavar="NAME", help="Of Kubernetes: a PersistentVolumeClaim for --data and --out.")
@click.option("--cloud", metavar="NAME", help="Of SkyPilot: a cloud, or cloud/region.")
@click.option(
    "--price",
    type=Number(0, min_open=True),
    metavar="X",
    help="Of SkyPilot: most dollars for a node and hour.",
)
@click.option("--hosts", metavar="A,B", help="For ssh: process 0 runs on the first.")
@json_option
@click.argument("words", nargs=-1, metavar="[-- ARGUMENTS OF run OR batch]", type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context, *, on: str, action: str, save: Path | None, as_json: bool, **asked: Any
) -> None:
    """Print a file that runs a track on a cluster, or submit it.

    Each node is looked at first, and has the shards on its own disk; the record is copied out at the end, also of a
    run that failed. Nothing is installed on the cluster, and nothing stays behind but the file and the record.
    """
    if on not in _CLIENTS:
        raise unknown("cluster", on, _CLIENTS)
    for option, owner in _OWN.items():
        if asked[option] is not None and owner != on:
            raise UsageError(f"--{option} is for {owner}, got --on {on}; leave it out")
    job, notes = _job(on, **asked)
    text = importlib.import_module(f"speedrun.launch.{on}").text(job)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if save is not None:
        if save.exists():
            raise UsageError(f"{save} exists already; need a new file; remove it or pass another --save")
        write_whole(save, text.encode())
        click.echo(f"saved   {save}", err=True)
    if as_json:
        facts = {"on": on, "name": job.name, "time_limit_s": job.time_s, "ranked": job.is_ranked}
        click.echo(
            msgspec.json.encode(facts | {"notes": notes, "text": text, "submitted": action == "submit"})
        )
    elif action == "print" and save is None:
        click.echo(text, nl=False)
    if action == "submit":
        ctx.exit(_submitted(on, job.name, text, to_stderr=as_json))


def _job(
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
    """The job, and what its user may not expect."""
    rules = tracks.load(track)
    kinds.load(others["gpu"])
    host_names = tuple(filter(None, (hosts or "").split(",")))
    num_nodes = nodes or len(host_names) or 1
    gpus = gpus_per_node
    if gpus is None:
        gpus = rules.rules.num_devices if rules.rules.platform == "gpu" else 0
    _check(on, rules, runs, num_nodes, gpus, host_names, others)
    given = _parsed(rules, runs, num_nodes, gpus, words)
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
    if on == "ssh" and nodes != len(hosts):
        raise UsageError(
            f"--hosts names {len(hosts)} hosts, got --nodes {nodes}; need --hosts A,B,... and no --nodes"
        )
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
    if not others["data"] and not track.data.get.startswith("speedrun "):
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
    ):
        raise UsageError(f"--time {limit!r}; need H:MM:SS, as in 2:30:00")
    hours, minutes, seconds = map(int, parts)
    return hours * 3600 + minutes * 60 + seconds


def _expected_s(track: Track, given: dict[str, Any], gpus: int, gpu: str, runs: int) -> tuple[int, str]:
    """A limit that a healthy run keeps, and what it follows from."""
    rules = track.rules
    train_s, why = float(_UNKNOWN_S), f"half an hour a run, for nobody knows how long {track.id} takes here"
    if rules.platform == "gpu":
        # JAX is imported only now: an error above should not wait for it.
        from speedrun import plan, recipes

        recipe = recipes.load(given["recipe"] or track.recipe).override(parse_settings(given["settings"]))
        devices = next(n for n in (8, 4, 2, 1) if n <= gpus)
        train_s = 2 * plan.plan(recipe, gpu, devices, given["microbatches"] or 8).total_s
        why = f"twice what speedrun plan expects of {devices} {gpu}, and what the track grants for compiling"
    whole_s = _SETUP_S + rules.untimed_cap_s + runs * (train_s + _END_S)
    return int(-(-whole_s // _ROUND_S)) * _ROUND_S, why


def _notes(job: Job, runs: int | None) -> list[str]:
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


def _submitted(on: str, name: str, text: str, *, to_stderr: bool) -> int:
    """The exit code of the cluster's own client, which was given the text."""
    for program in {_CLIENTS[on][0], *(["ssh"] if on == "ssh" else [])}:
        if shutil.which(program) is None:
            raise UsageError(
                f"--submit needs {program}, which is not on the PATH; go where it is, or --save FILE and take it there"
            )
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, f"{name}.{'sh' if on == 'ssh' else 'yaml'}")
        path.write_text(text)
        argv = [{"FILE": str(path), "NAME": name}.get(word) or word for word in _CLIENTS[on]]
        reads = "FILE" not in _CLIENTS[on]
        child = Popen(
            argv, stdin=PIPE if reads else None, stdout=sys.stderr if to_stderr else None, text=True
        )
        with _told_of_sigterm(child):
            child.communicate(text if reads else None)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


@contextlib.contextmanager
def _told_of_sigterm(child: Popen[str]) -> Iterator[None]:
    """A terminal's Ctrl-C reaches the client by itself; it may ask something there, so it stays in our group."""

    def forward(number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            child.send_signal(number)

    with signals.handled_by(forward):
        yield
