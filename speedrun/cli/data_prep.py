"""`speedrun data prep` and `data docs`: shards from text."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from speedrun.cli.options import Integer, example, json_option, out_option, track_option
from speedrun.cli.progress import resumable
from speedrun.data import inventory, prep, python_docs, tokenizer
from speedrun.data.gpt2 import END_OF_TEXT
from speedrun.data.sources import HUB, open_source
from speedrun.data.text_files import READERS
from speedrun.data.writing import MAX_TOKENS
from speedrun.ground import signals
from speedrun.ground import track as tracks
from speedrun.ground.errors import UsageError
from speedrun.ground.lock import lock_folder

FINEWEB = f"{HUB}HuggingFaceFW/fineweb:sample-10BT"
_FINEWEB_TRACK = "main-8xh100"  #: whose folder FineWeb's shards go to by default

_SOURCE_HELP = f"File or folder of {', '.join(READERS)}, or hub:OWNER/NAME[:CONFIG]. Repeatable."
_TOKENIZER_HELP = "gpt2, bytes, a .tiktoken file of GPT-2, or a .json file."
_DOCUMENT_HELP = "Token that opens a document, in a .json tokenizer."
folder_option = out_option("Output folder. Default: the track's, in $SPEEDRUN_DATA or ./data.")
source_option = click.option("--source", "sources", multiple=True, metavar="NAME", help=_SOURCE_HELP)
column_option = click.option("--column", default="text", show_default=True, help="Field that is the text.")
revision_option = click.option("--revision", help="Commit of a hub: dataset. Default: its newest.")
document_option = click.option(
    "--document-token", "document_text", default=END_OF_TEXT, show_default=True, help=_DOCUMENT_HELP
)


def _num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@click.command(
    epilog=example(
        "speedrun data prep",
        "speedrun data prep --source texts/ --out data/mine --shard-tokens 1000000",
        "speedrun data prep --source book.txt --tokenizer bytes --out data/book --shard-tokens 100000",
    )
)
@source_option
@click.option("--tokenizer", "name", default="gpt2", show_default=True, metavar="NAME", help=_TOKENIZER_HELP)
@click.option(
    "--workers", type=Integer(1), default=_num_cores, help="Threads that tokenize. Default: one a core."
)
@folder_option
@click.option("--prefix", default="fineweb", show_default=True, help="First word of the shards' names.")
@click.option(
    "--shard-tokens", type=Integer(1, MAX_TOKENS), default=10**8, show_default=True, help="Of each shard."
)
@click.option("--max-tokens", type=Integer(1), help="Stop after so many tokens.")
@column_option
@document_option
@revision_option
@json_option
def command(*, sources: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Make shards of text; without --source, of FineWeb's sample of 10 billion tokens.

    A stopped or killed command continues after its last whole shard when it is run again. The bytes do not depend
    on that, nor on the number of workers.
    """
    cut = prep.Cut(given["prefix"], given["shard_tokens"], given["max_tokens"])
    if sources and given["out"] is None:
        raise UsageError(f"--source {sources[0]} without --out; the shards need a folder; name one")
    # Local files are checked before the network.
    choice = tokenizer.choose(given["name"], document_text=given["document_text"])
    folder = inventory.data_folder(tracks.load(_FINEWEB_TRACK), given["out"])
    column, workers = given["column"], given["workers"]
    source = open_source(sources or (FINEWEB,), column=column, revision=given["revision"])
    with resumable("prep", folder) as progress, lock_folder(folder, progress.say):
        made = prep.prepare(
            source, choice, cut, folder, column=column, num_workers=workers, report=progress.update
        )
    output(made.facts(), made.summary(), as_json=as_json)


@click.command(epilog=example("speedrun data docs --track docs-cpu"))
@track_option("docs-cpu")
@folder_option
@json_option
def docs(*, track: str, out: Path | None, as_json: bool) -> None:
    """Make the shards of a track from the documentation of this Python; half a minute."""
    rules = tracks.load(track)
    folder = inventory.data_folder(rules, out)
    with signals.handled_by(signals.stop), lock_folder(folder, partial(click.echo, err=True)):
        made = python_docs.make(rules, folder)
    output(made.facts(), made.summary(), as_json=as_json)


def output(facts: object, lines: list[str], *, as_json: bool) -> None:
    """Print one JSON object, or lines."""
    click.echo(msgspec.json.encode(facts) if as_json else "\n".join(lines))
