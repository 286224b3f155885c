"""`speedrun watch`: a page of runs, while they train or afterwards."""

import shlex
import socket
from pathlib import Path

import click

from speedrun.base import console
from speedrun.base.errors import UsageError
from speedrun.base.serving import stoppable
from speedrun.cli import options as cli
from speedrun.model import watch_feed, watch_server

_RUNS = Path("runs")


@cli.new_command(
    "speedrun watch",
    "speedrun watch runs/first runs/second --ghost best",
    "speedrun run --track smoke-cpu --watch",
    cls=click.Command,
)
@click.argument("runs", nargs=-1, type=cli.PATH, metavar="[RUN]...")
@cli.port_option(watch_server.PORT)
@cli.option(
    "--ghost RECORD|best",
    str,
    "Draw this record beside the runs; 'best': the fastest qualified one of the track in records/.",
)
def command(*, runs: tuple[Path, ...], port: int, ghost: str | None) -> None:
    """Show runs on a page until Ctrl-C or SIGTERM: loss, step times, memory, events.

    Logs are only read. Default: the newest folder below runs/. A folder that does not exist yet is waited for.
    """
    folders = runs or (_newest(),)
    for folder in folders:
        watch_feed.check(folder)
    # Outside: pages still get the last lines.
    with stoppable() as stopped, watch_server.watching(folders, port, ghost) as url:
        used = url.rstrip("/").rpartition(":")[2]
        click.echo(console.clean(f"watch   {shlex.join(map(str, folders))}"))
        click.echo(f"page    {url}   Ctrl-C ends it")
        click.echo(f"remote  ssh -L {used}:127.0.0.1:{used} {socket.gethostname()}   then open it there")
        stopped()


def _newest() -> Path:
    """Return the folder below runs/ that was made last."""
    folders = [path for path in _RUNS.glob("*") if path.is_dir() and not path.name.endswith(".checkpoints")]
    if not folders:
        raise UsageError(f"there is nothing below {_RUNS}/ to watch; name the folder of a run")
    return max(folders, key=lambda path: path.stat().st_mtime_ns)
