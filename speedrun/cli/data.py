"""`speedrun data`: fetches, makes, lists and checks the shards of a track; trains tokenizers."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from speedrun.cli.options import Group, Integer, data_option, example, json_option, out_option, track_option
from speedrun.cli.progress import Progress, resumable
from speedrun.data import documents, fetch, gpt2, inventory, overview, prep, python_docs, synthetic, tokenizer
from speedrun.data.sources import HUB, open_source
from speedrun.data.text_files import READERS
from speedrun.data.vocabulary import RANKS
from speedrun.data.writing import MAX_TOKENS
from speedrun.ground import signals
from speedrun.ground import track as tracks
from speedrun.ground.console import clean
from speedrun.ground.errors import UsageError
from speedrun.ground.lock import lock_folder
from speedrun.ground.wholefile import write_whole

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
    "--document-token", "document_text", default=gpt2.END_OF_TEXT, show_default=True, help=_DOCUMENT_HELP
)


def _num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@click.command(cls=Group, epilog=example("speedrun data get --track main-8xh100", "speedrun data list"))
def command() -> None:
    """Fetch, make, list and check shards."""


@command.command(
    epilog=example(
        "speedrun data get --track main-8xh100 --shards 9",
        "speedrun data get --track webmini --repo kjj0/finewebedu10B-gpt2 --shards 2",
    )
)
@track_option("main-8xh100")
@click.option("--shards", type=Integer(1), help="Training shards. Default: as the track says, or 1.")
@click.option(
    "--vocabulary", is_flag=True, help="Also GPT-2's ranks, for recipes that read the bytes of ids."
)
@click.option("--repo", metavar="OWNER/NAME", help="Dataset repository, on a track that takes any shards.")
@folder_option
@json_option
def get(
    *, track: str, shards: int | None, vocabulary: bool, repo: str | None, out: Path | None, as_json: bool
) -> None:
    """Fetch ready-made shards from the Hugging Face hub; what is there stays. HF_ENDPOINT and HF_TOKEN apply."""
    rules = tracks.load(track)
    source, folder = fetch.source_of(rules, repo, shards), inventory.data_folder(rules, out)
    with resumable(f"get {rules.name}", folder) as progress:
        manifest = fetch.fetch(folder, rules.data, source, progress)
    if vocabulary:
        write_whole(folder / RANKS, gpt2.cached_ranks())
    tokens = sum(entry.tokens for entry in manifest.shards.values())
    place = f"{manifest.source}@{manifest.settings['revision']}"
    output(
        {"track": rules.id, "folder": str(folder), "manifest": manifest},
        [f"{folder}  {len(manifest.shards)} shards  {tokens:,} tokens  {place}"],
        as_json=as_json,
    )


@command.command(
    "prep",
    epilog=example(
        "speedrun data prep",
        "speedrun data prep --source texts/ --out data/mine --shard-tokens 1000000",
        "speedrun data prep --source book.txt --tokenizer bytes --out data/book --shard-tokens 100000",
    ),
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
def prep_(*, sources: tuple[str, ...], as_json: bool, **given: Any) -> None:
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


@command.command(epilog=example("speedrun data docs --track docs-cpu"))
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


@command.command(epilog=example("speedrun data synth --track smoke-cpu"))
@track_option()
@folder_option
@json_option
def synth(*, track: str, out: Path | None, as_json: bool) -> None:
    """Make the synthetic shards of a track: the same bytes everywhere."""
    rules = tracks.load(track)
    if rules.synthetic is None:
        raise UsageError(
            f"track {track!r} is not synthetic; it needs real shards; get them: {rules.data.get}"
        )
    folder = inventory.data_folder(rules, out)
    with lock_folder(folder):
        manifest = synthetic.write(rules, folder)
    lines = [
        f"{folder / name}  {entry.tokens:,} tokens  {entry.documents:,} documents"
        for name, entry in manifest.shards.items()
    ]
    output({"track": rules.id, "folder": str(folder), "manifest": manifest}, lines, as_json=as_json)


@command.command(epilog=example("speedrun data verify --track smoke-cpu --full"))
@track_option()
@data_option
@click.option("--full", is_flag=True, help="Read every byte: digests, ids, documents.")
@json_option
def verify(*, track: str, data: Path | None, full: bool, as_json: bool) -> None:
    """Check the shards of a track: headers and sizes at once, every byte with --full."""
    rules = tracks.load(track)
    folder = inventory.data_folder(rules, data)
    with Progress(f"verify {rules.name}") as progress:
        verified = overview.verify(folder, rules.data, full=full, report=progress.update)
    facts = {"track": rules.id, "folder": str(folder), "full": full}
    lines = [f"ok  {folder / shard.name}  {shard}" for shard in verified]
    output({**facts, "shards": [shard._asdict() for shard in verified]}, lines, as_json=as_json)


@command.command("list", epilog=example("speedrun data list", "speedrun data list --json"))
@json_option
def list_(*, as_json: bool) -> None:
    """List what is there of the data of every track."""
    holdings = [overview.holding(tracks.load(name)) for name in tracks.names()]
    lines = [clean(line) for holding in holdings for line in holding.lines()]
    output({"tracks": [holding._asdict() for holding in holdings]}, lines, as_json=as_json)


@command.command(
    "train-bpe", epilog=example("speedrun data train-bpe --source texts/ --vocab-size 4096 --out mine.json")
)
@source_option
@click.option("--vocab-size", type=Integer(258, 2**16), required=True, help="Ids, with the document token.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A .json file.")
@column_option
@document_option
@revision_option
@json_option
def train_bpe(*, sources: tuple[str, ...], out: Path, column: str, as_json: bool, **given: Any) -> None:
    """Train a byte-level BPE on texts, through `tokenizers`: the same texts give the same file."""
    if not sources:
        raise UsageError("no --source; texts are needed to train on; name a file or a folder")
    source = open_source(sources, column=column, revision=given["revision"])
    texts, document = documents.texts(source, column), given["document_text"]
    size = tokenizer.train_bpe(texts, given["vocab_size"], out, document_text=document)
    facts = {"tokenizer": str(out), "vocab_size": size}
    output(facts, [f"{out}  {size:,} ids, document token {document}"], as_json=as_json)


def output(facts: object, lines: list[str], *, as_json: bool) -> None:
    """Print one JSON object, or lines."""
    click.echo(msgspec.json.encode(facts) if as_json else "\n".join(lines))
