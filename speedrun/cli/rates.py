"""`speedrun bench loader`, `prep` and `target`: what this machine reaches, and what it is."""

from contextlib import nullcontext
from pathlib import Path

import click
import msgspec

from speedrun.cli.data import column_option, source_option
from speedrun.cli.options import Integer, example, json_option
from speedrun.cli.program import show
from speedrun.ground.errors import UsageError


@click.command(epilog=example("speedrun bench loader", "speedrun bench loader --data data/fineweb10B"))
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of shards. Default: two of 100 million tokens, made for this and removed.",
)
@json_option
def loader(*, data: Path | None, as_json: bool) -> None:
    """Batches from shards, against what eight H100 consume: tokens per second, waiting, the first batch."""
    from speedrun.bench import loading

    if data is None:
        click.echo("writes two shards of 100 million tokens, and removes them", err=True)
    with nullcontext(loading.folder_shards(data)) if data else loading.synthetic_shards() as shards:
        found = loading.measure(shards)
    show(found, as_json=as_json)


@click.command(epilog=example("speedrun bench prep --source rows.jsonl.gz --tokenizer r50k_base.tiktoken"))
@source_option
@click.option("--tokenizer", "name", default="gpt2", show_default=True, help="gpt2, or its .tiktoken file.")
@click.option("--workers", type=Integer(2), default=2, show_default=True, help="Threads that tokenize.")
@column_option
@json_option
def prep(*, sources: tuple[str, ...], name: str, workers: int, column: str, as_json: bool) -> None:
    """Text to shards on several threads, against one; equal bytes or an error."""
    if not sources:
        raise UsageError("no --source; text is needed; name a file or a folder")
    from speedrun.bench import preparing
    from speedrun.data import tokenizer
    from speedrun.data.sources import open_source

    choice, source = tokenizer.choose(name), open_source(sources, column=column)
    show(preparing.compare(source, choice, column=column, num_workers=workers), as_json=as_json)


@click.command(epilog=example("speedrun bench target"))
@json_option
def target(*, as_json: bool) -> None:
    """Print how XLA describes this GPU, to compile for it elsewhere (`speedrun/ground/devices.py`)."""
    from speedrun.bench.machine import described

    text = described()
    click.echo(msgspec.json.encode({"target": text}) if as_json else text)


COMMANDS = (loader, prep, target)
