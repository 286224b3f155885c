"""`speedrun play`: serve exported models, which a browser then lets write."""

import contextlib
import threading
from pathlib import Path

import click
import msgspec

from speedrun.cli.options import Integer, example, json_option


@click.command(
    epilog=example("speedrun play docs-web", "speedrun play docs-web smoke-web --port 0"),
)
@click.argument("folders", nargs=-1, required=True, metavar="DIR...", type=click.Path(path_type=Path))
@click.option(
    "--port", type=Integer(0), default=3281, show_default=True, metavar="N", help="0: any that is free."
)
@json_option
def command(*, folders: tuple[Path, ...], port: int, as_json: bool) -> None:
    """Serve the page of DIR, which 'speedrun export RUN --to web' made, on this machine only.

    The browser computes. With several folders, two models write beside each other, with one seed. Ctrl-C ends it.
    """
    from speedrun.ground.serving import serving
    from speedrun.web.serve import answering

    with serving(answering(folders), port) as url:
        click.echo(msgspec.json.encode({"url": url}) if as_json else f"{url}   Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
