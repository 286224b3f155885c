"""The ghost of a run: the record it is compared with on the console. As a module, trains one run with a ghost.

python -m speedrun.study.race REQUEST.json
"""

import sys
from pathlib import Path
from typing import TextIO

import msgspec

from speedrun.board import ghost as ghosts
from speedrun.board.ghost import Ghost
from speedrun.ground import console
from speedrun.ground.errors import UsageError
from speedrun.ground.live import Live
from speedrun.ground.output import reported

_RECORDS = Path("records")


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of a batch."""

    config: msgspec.Raw  #: a `prepare.RunConfig`
    ghost: str | None  #: as in `--ghost`
    track: str  #: name and version


def find(choice: str | None, track: str) -> Ghost | None:
    """Return the chosen ghost; where it cannot be read, warn and return None, because a run needs no ghost.

    `choice` is the folder of a record, or 'best': the fastest qualified record of the track in `records/`.
    """
    try:
        folder = ghosts.best(_RECORDS, track) if choice == "best" else choice and Path(choice)
        return ghosts.read(folder, track) if folder else None
    except UsageError as error:
        sys.stderr.write(console.clean(f"warning: no ghost: {error}") + "\n")
        return None


def live(stream: TextIO, ghost: Ghost | None, *, verbose: bool = False) -> Live:
    """Return the console of a run with this ghost."""
    return Live(stream, ghost, "" if ghost is None else ghost.legend, verbose=verbose)


def main(path: Path) -> None:
    """Train as the request in a file says."""
    from speedrun.training.prepare import RunConfig, decoded
    from speedrun.training.train import train

    request = msgspec.json.decode(path.read_bytes(), type=Request)
    config = decoded(request.config, RunConfig)
    with reported(), live(sys.stdout, find(request.ghost, request.track)) as reader:
        train(config, reader)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
