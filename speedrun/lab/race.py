"""The ghost of a run: the record it is compared with on the console."""

import sys
from pathlib import Path
from typing import TextIO

from speedrun.base import console
from speedrun.base.console import Printer
from speedrun.base.errors import UsageError
from speedrun.board import ghost as ghosts
from speedrun.board.ghost import Ghost

_RECORDS = Path("records")


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


def live(stream: TextIO, ghost: Ghost | None = None, *, verbose: bool = False) -> Printer:
    """Return the console of a run with this ghost."""
    return Printer(stream, ghost, "" if ghost is None else ghost.legend, verbose=verbose)
