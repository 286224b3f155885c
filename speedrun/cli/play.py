"""`speedrun play`: serve exported models, which a browser then lets write, or a recipe, which it trains."""

import tempfile
from pathlib import Path

import click

from speedrun.base.errors import UsageError
from speedrun.cli import options as cli


@cli.new_command("speedrun play docs-web", "speedrun play docs-web smoke-web", "speedrun play --recipe smoke")
@click.argument("folders", nargs=-1, metavar="[DIR...]", type=cli.PATH)
@cli.recipe_option(text="Also a page that trains this recipe, made tiny, beside what JAX computed.")
@cli.port_option(3281)
@click.pass_context
def command(ctx: click.Context, *, folders: tuple[Path, ...], recipe: str | None, port: int) -> None:
    """Serve the page of DIR, which 'speedrun export RUN --to web' made, on this machine only.

    The browser computes. With several folders, two models write beside each other, with one seed. With --recipe, JAX
    first trains a tiny preset on the CPU, for some seconds. Ctrl-C or SIGTERM ends it.
    """
    from speedrun.base import signals
    from speedrun.base.serving import serving, stoppable
    from speedrun.model.page_server import answering

    if not folders and recipe is None:
        raise UsageError("got nothing to serve; name a folder that 'export --to web' made, or pass --recipe")
    with tempfile.TemporaryDirectory() as scratch, signals.handled_by(signals.stop):
        if recipe is not None:
            folders = (_trainable(recipe, Path(scratch) / "page"), *folders)
        with stoppable() as stopped, serving(answering(folders), port) as url:
            url += "train.html" if recipe is not None else ""
            cli.show({"url": url}, [f"{url}   Ctrl-C ends it"], as_json=ctx.params["as_json"])
            stopped()


def _trainable(recipe: str, out: Path) -> Path:
    from speedrun import recipes
    from speedrun.base import mesh
    from speedrun.model import page_training

    mesh.prepare("cpu")
    page_training.write(recipes.load(recipe), out)
    return out
