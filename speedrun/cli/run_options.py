"""Options of the commands that train: `run`, `batch` and `sweep`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from speedrun.cli.options import (
    Decorator,
    Integer,
    attention_option,
    data_option,
    devices_option,
    microbatches_option,
    recipe_option,
    track_option,
)
from speedrun.ground import clock
from speedrun.training.meet import HEARTBEAT_S, MEET_S

#: `--ghost RECORD`, as the argument `ghost` for `race.find`.
ghost_option: Decorator = click.option(
    "--ghost",
    metavar="RECORD",
    help="Show on the step lines how far ahead of this record the run is, in seconds and loss; 'none': no record. "
    "Default: the fastest qualified record of the track in records/.",
)

#: `--wandb PROJECT`, as the argument `wandb` for `relay.relayed`.
wandb_option: Decorator = click.option(
    "--wandb", metavar="PROJECT", help="Send the log to wandb from a child process. It cannot stop the run."
)


def _combined(*options: Decorator) -> Decorator:
    """Return a decorator that adds all options."""

    def add(command: Callable[..., object]) -> Callable[..., object]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


#: The options that `config_of` reads.
config_options = _combined(
    track_option(),
    recipe_option,
    devices_option,
    attention_option,
    microbatches_option,
    data_option,
    click.option(
        "--out",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="A new folder. Default: below runs/, with date, track and a number.",
    ),
)
#: The options of a run in several processes.
process_options = _combined(
    click.option(
        "--local-processes",
        type=Integer(1),
        metavar="N",
        help="Start N processes on this machine that share its devices, to try out what a cluster does.",
    ),
    click.option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Of process 0, if several share the run. SLURM and Open MPI need no such options.",
    ),
    click.option("--processes", type=Integer(1), metavar="N", help="How many share the run."),
    click.option("--process", type=Integer(0), metavar="I", help="The number of this process."),
    click.option(
        "--heartbeat",
        type=Integer(5),
        default=HEARTBEAT_S,
        show_default=True,
        metavar="SECONDS",
        help="A process that is silent for so long is lost, and the run ends.",
    ),
    click.option(
        "--meet-within",
        type=Integer(1),
        default=MEET_S,
        show_default=True,
        metavar="SECONDS",
        help="Time for all processes to connect.",
    ),
)
#: The arguments of `process_options`.
PROCESS_ARGUMENTS = ("local_processes", "coordinator", "processes", "process", "heartbeat", "meet_within")


def config_of(given: dict[str, Any], overrides: dict[str, str], out: Path) -> dict[str, Any]:
    """Return the fields of a `prepare.RunConfig` that the options of a command say."""
    same = {key: given[key] for key in ("track", "recipe", "data", "microbatches", "attention")}
    return {**same, "out": out, "overrides": overrides, "num_devices": given["devices"]}


def new_folder(name: str) -> Path:
    """Return the first of today's folders below `runs/` that does not exist: `runs/<date>-<name>-<n>`."""
    candidates = (Path("runs") / f"{clock.now().utc[:10]}-{name}-{i}" for i in range(1, 10_000))
    return next(path for path in candidates if not path.exists())
