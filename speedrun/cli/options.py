"""Options that several commands share, so that one name means one thing everywhere.

No heavy imports: the group itself needs this file.
"""

from collections.abc import Callable
from pathlib import Path

import click

Decorator = Callable[[Callable[..., object]], Callable[..., object]]

_JSON = "speedrun.json"


def example(*lines: str) -> str:
    """The end of a command's help: what to type. Every command has one."""
    return "\n".join(["\b", "Example:", *(f"  {line}" for line in lines)])


def _note_json(ctx: click.Context, _: click.Parameter, value: bool) -> bool:  # noqa: FBT001 -- click's signature
    ctx.meta[_JSON] = value
    return value


def wants_json(ctx: click.Context) -> bool:
    """Whether the command that was invoked got --json: then an error is JSON, too."""
    return ctx.meta.get(_JSON, False)


#: `--json`, as the argument `as_json`. Eager, so that an error in any other option already knows.
json_option: Decorator = click.option(
    "--json",
    "as_json",
    is_flag=True,
    is_eager=True,
    callback=_note_json,
    help="Print one JSON object on stdout.",
)

#: `--data DIR`, as the argument `data`; None means the track's own folder.
data_option: Decorator = click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of shards. Default: the track's, in $SPEEDRUN_DATA or ./data.",
)


def track_option(default: str = "smoke-cpu") -> Decorator:
    """`--track NAME`, as the argument `track`."""
    return click.option(
        "--track", default=default, show_default=True, metavar="NAME", help="Rules to run under."
    )
