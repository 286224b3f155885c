"""`speedrun launch`: a run or a batch on a cluster, as one small file that the user reads and owns."""

import contextlib
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

from speedrun.cli.job import job_of
from speedrun.cli.options import Integer, Number, example, json_option, track_option
from speedrun.ground import devices as kinds
from speedrun.ground import signals
from speedrun.ground.errors import UsageError, unknown
from speedrun.ground.wholefile import write_whole

#: What each cluster is started with; FILE is put in, or else the text goes to the standard input.
_CLIENTS = {
    "slurm": ("sbatch",),
    "kubernetes": ("kubectl", "create", "--filename=-"),  # `apply` says "unchanged" of a job that is over
    "skypilot": ("sky", "launch", "--cluster", "NAME", "FILE"),  # it asks before it rents
    "ssh": ("bash", "FILE"),
}


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
    run that failed. The file is all there is: read it, change it, keep it.
    """
    if on not in _CLIENTS:
        raise unknown("cluster", on, _CLIENTS)
    job, notes = job_of(on, **asked)
    text = importlib.import_module(f"speedrun.launch.{on}").text(job)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if save is not None:
        if save.exists():
            raise UsageError(f"{save} exists already; need a new file; remove it or pass another --save")
        write_whole(save, text.encode())
        click.echo(f"saved   {save}", err=True)
    if action == "print" and save is None and not as_json:
        click.echo(text, nl=False)
    code = _submitted(on, job.name, text, to_stderr=as_json) if action == "submit" else 0
    if as_json:
        facts = {"on": on, "name": job.name, "time_limit_s": job.time_s, "ranked": job.is_ranked}
        done = {"submitted": action == "submit" and code == 0, "exit_code": code}
        click.echo(msgspec.json.encode(facts | {"notes": notes, "text": text} | done))
    ctx.exit(code)


def _submitted(on: str, name: str, text: str, *, to_stderr: bool) -> int:
    """The exit code of the cluster's own client, which was given the text."""
    for program in {_CLIENTS[on][0], *(["ssh"] if on == "ssh" else [])}:
        if shutil.which(program) is None:
            raise UsageError(
                f"--submit needs {program}, which is not on the PATH; go where it is, or --save FILE and take it there"
            )
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, f"{name}.{'sh' if on == 'ssh' else 'yaml'}")
        write_whole(path, text.encode())
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
