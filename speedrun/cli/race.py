"""Which record a run races on the console; and, as a process, one run of a batch with its ghost.

python -m speedrun.cli.race REQUEST.json
"""

import sys
from pathlib import Path
from typing import TextIO

import click
import msgspec

from speedrun.board import ghost as ghosts
from speedrun.board.ghost import Ghost
from speedrun.cli.live import Live
from speedrun.cli.options import Decorator
from speedrun.ground import console
from speedrun.ground.errors import UsageError
from speedrun.ground.output import told

_RECORDS = Path("records")

#: `--ghost RECORD`, as the argument `ghost` for `find`.
ghost_option: Decorator = click.option(
    "--ghost",
    metavar="RECORD",
    help="Show on the step lines how far ahead of this record the run is, in seconds and loss; 'none': of no one. "
    "Default: the fastest qualified one of the track in records/.",
)


def find(choice: str | None, track: str) -> Ghost | None:
    """The ghost that was asked for, or the track's; a run does without it rather than not at all.

    Args:
        choice: as in `--ghost`.
        track: name and version.
    """
    try:
        folder = ghosts.best(_RECORDS, track) if choice is None else Path(choice)
        return None if choice == "none" or folder is None else ghosts.read(folder, track)
    except UsageError as error:
        click.echo(console.clean(f"warning: no ghost: {error}"), err=True)
        return None


def live(stream: TextIO, ghost: Ghost | None) -> Live:
    """The console of a run, with the legend of its ghost."""
    shown = Live(stream, ghost)
    if ghost is not None:
        shown.say(ghost.legend)
    return shown


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the process is asked to do."""

    config: msgspec.Raw  #: a `prepare.RunConfig`
    ghost: str  #: as in `--ghost`
    track: str  #: name and version


def main(path: Path) -> None:
    """Runs what a request says."""
    from speedrun.training.prepare import RunConfig, decoded
    from speedrun.training.train import train

    request = msgspec.json.decode(path.read_bytes(), type=Request)
    config = decoded(request.config, RunConfig)
    with told(), live(sys.stdout, find(request.ghost, request.track)) as reader:
        train(config, reader)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
