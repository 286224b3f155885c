"""`speedrun launch`: a run or a batch on a cluster, as one small file that the user reads and owns."""

import importlib
from pathlib import Path
from typing import Any

import click
import msgspec

from speedrun.cli.job import job_of
from speedrun.cli.options import Integer, Number, example, json_option, track_option
from speedrun.ground import devices as kinds
from speedrun.ground.errors import UsageError, unknown
from speedrun.ground.wholefile import write_whole
from speedrun.launch.submit import CLIENTS, submit


@click.command(
    epilog=example(
        "speedrun launch --on slurm --track main-8xh100 --runs 6 --data /shared/fineweb10B",
        "speedrun launch --on kubernetes --claim work --image registry/me/speedrun:1 --save job.yaml",
        "speedrun launch --on skypilot --track main-8xh100 --runs 6 --price 30 --submit",
        "speedrun launch --on ssh --hosts me@node1,me@node2 --track smoke-cpu -- --seed 1",
    )
)
@click.option("--on", required=True, metavar="CLUSTER", help=", ".join(CLIENTS) + ".")
@click.option("--print", "action", flag_value="print", default=True, help="To stdout. The default.")
@click.option("--submit", "action", flag_value="submit", help="Hand it to the cluster's own client.")
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write it to a new file instead of stdout.",
)
@track_option("main-8xh100")
@click.option("--runs", type=Integer(2), metavar="N", help="Run a batch of N runs. Default: one run.")
@click.option(
    "--nodes", type=Integer(1, 4096), metavar="N", help="Nodes that share the run. Default: 1, or all hosts."
)
@click.option("--gpus-per-node", type=Integer(0, 64), metavar="N", help="Default: what the track needs.")
@click.option("--gpu", default="h100", show_default=True, metavar="KIND", help=", ".join(kinds.DEVICES) + ".")
@click.option(
    "--time", "limit", metavar="H:MM:SS", help="Time limit. Default: twice what `speedrun plan` predicts."
)
@click.option(
    "--data", metavar="DIR", help="Shards on a shared disk. Default: each node makes or fetches them."
)
@click.option("--stage", metavar="DIR", help="Folder on each node's own disk. Default: below /tmp.")
@click.option("--out", metavar="DIR", help="Where the record is copied to. Default: ./runs, or the claim.")
@click.option(
    "--checkout", metavar="DIR", help="Installed checkout on the nodes. Default: the path of this one."
)
@click.option("--image", metavar="IMAGE", help="Container image with `speedrun`, instead of the checkout.")
@click.option("--name", metavar="NAME", help="Name of the job. Default: the track.")
@click.option("--partition", metavar="NAME", help="SLURM.")
@click.option("--account", metavar="NAME", help="SLURM.")
@click.option("--namespace", metavar="NAME", help="Kubernetes.")
@click.option("--claim", metavar="NAME", help="Kubernetes: PersistentVolumeClaim for --data and --out.")
@click.option("--cloud", metavar="NAME", help="SkyPilot: a cloud, or cloud/region.")
@click.option(
    "--price",
    type=Number(0, min_open=True),
    metavar="X",
    help="SkyPilot: most dollars per node and hour.",
)
@click.option("--hosts", metavar="A,B", help="ssh: the hosts; process 0 runs on the first.")
@json_option
@click.argument("words", nargs=-1, metavar="[-- ARGUMENTS OF run OR batch]", type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context, *, on: str, action: str, save: Path | None, as_json: bool, **asked: Any
) -> None:
    """Print a file that runs a track on a cluster, or submit it.

    Each node is checked first and gets the shards on its own disk. The record is copied out at the end, also that of
    a failed run. The file is yours: read it, change it, keep it.
    """
    if on not in CLIENTS:
        raise unknown("cluster", on, CLIENTS)
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
    code = submit(on, job.name, text, to_stderr=as_json) if action == "submit" else 0
    if as_json:
        facts = {"on": on, "name": job.name, "time_limit_s": job.time_s, "ranked": job.is_ranked}
        done = {"submitted": action == "submit" and code == 0, "exit_code": code}
        click.echo(msgspec.json.encode(facts | {"notes": notes, "text": text} | done))
    ctx.exit(code)
