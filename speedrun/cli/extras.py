"""Options of what a single run does beside training: its page, its samples, and weights that it starts from."""

from pathlib import Path
from typing import Any

import click

from speedrun.cli.options import Integer
from speedrun.cli.run_options import combined
from speedrun.ground import track as tracks
from speedrun.ground.errors import UsageError
from speedrun.watch import PORT

#: The options that `extras_of` reads.
extra_options = combined(
    click.option(
        "--watch", is_flag=True, help="Serve a page of the run from a child process. It cannot stop the run."
    ),
    click.option(
        "--watch-port",
        type=Integer(1, 65_535),
        show_default=str(PORT),
        metavar="N",
        help="Of that page, on this machine only.",
    ),
    click.option(
        "--sample-every",
        type=Integer(1),
        metavar="N",
        help="Let the checkpoints of each N steps write a text, beside the record; a child process does it. "
        "Without --checkpoint-every, it makes them.",
    ),
    click.option(
        "--sample-prompt",
        "sample_prompts",
        multiple=True,
        metavar="TEXT",
        help="What these texts begin with; repeatable. Default: the start of a document.",
    ),
    click.option(
        "--init-from",
        type=click.Path(path_type=Path),
        metavar="SOURCE",
        help="Start from the weights of an exported folder or a GPT-2, as 'speedrun eval' takes them. Never ranked.",
    ),
)
#: Those that a resumed run takes, too.
EXTRA_ARGUMENTS = ("ghost", "wandb", "watch", "watch_port", "sample_every", "sample_prompts")


def extras_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `study.extras.Extras` that the options say; raise UsageError for a port of no page."""
    port = given["watch_port"]
    if port is not None and not given["watch"]:
        raise UsageError(f"--watch-port {port} has no effect; it needs --watch; leave it out, or add that")
    same = {name: given[name] for name in ("ghost", "sample_every", "sample_prompts", "init_from")}
    return same | {"watch_port": (port or PORT) if given["watch"] else None}


def checkpoint_steps(track: str, given: dict[str, Any]) -> int:
    """Return the steps between checkpoints, 0 for none; raise UsageError if samples could not be made of them."""
    every, sample_every, prompts = (
        given[name] for name in ("checkpoint_every", "sample_every", "sample_prompts")
    )
    if prompts and sample_every is None:
        raise UsageError("--sample-prompt has no effect; it needs --sample-every; leave it out, or add that")
    if prompts and tracks.load(track).synthetic is not None:
        raise UsageError(
            f"ids of {track} stand for no text, got --sample-prompt {prompts[0][:40]!r}; leave it out"
        )
    if sample_every is not None and sample_every % (every or 1):
        raise UsageError(
            f"--sample-every {sample_every} of checkpoints of each {every} steps; need a multiple"
        )
    return every or sample_every or 0
