"""`speedrun data`: fetches, makes, lists and checks the shards of a track; trains tokenizers."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from speedrun.base import signals
from speedrun.base import track as tracks
from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.base.track import Track
from speedrun.base.wholefile import lock_folder, write_whole
from speedrun.cli import options as cli
from speedrun.cli.progress import Progress, resumable
from speedrun.data import fetch, generated, overview, prepare, shards, tokenizer
from speedrun.data.documents import HUB, READERS, open_source, texts
from speedrun.data.shards import MAX_TOKENS, Manifest
from speedrun.data.vocabulary import RANKS

FINEWEB = f"{HUB}HuggingFaceFW/fineweb:sample-10BT"
_FINEWEB_TRACK = "main-8xh100"  #: whose folder FineWeb's shards go to by default

_folder_option = cli.out_option("Output folder. Default: the track's, in $SPEEDRUN_DATA or ./data.")
_source_option = cli.option(
    "--source NAME",
    str,
    f"File or folder of {', '.join(READERS)}, or hub:OWNER/NAME[:CONFIG].",
    name="sources",
    multiple=True,
)
#: How a source is read.
_reading_options = cli.combined(
    cli.option("--column NAME", str, "Field that is the text.", "text"),
    cli.option(
        "--document-token TEXT",
        str,
        "Token that opens a document, in a .json tokenizer.",
        tokenizer.END_OF_TEXT,
        name="document_text",
    ),
    cli.option("--revision COMMIT", str, "Of a hub: dataset. Default: its newest."),
)


def _num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cli.new_command("speedrun data get --track main-8xh100", "speedrun data list", cls=cli.Group)
def data() -> None:
    """Fetch, make, list and check shards."""


@cli.new_command(
    "speedrun data get --track main-8xh100 --shards 9",
    "speedrun data get --track webmini --repo kjj0/finewebedu10B-gpt2 --shards 2",
    of=data,
)
@cli.track_option("main-8xh100")
@cli.option("--shards N", cli.COUNT, "Training shards. Default: as the track says, or 1.")
@cli.flag("--vocabulary", "Also GPT-2's ranks, for recipes that read the bytes of ids.")
@cli.option("--repo OWNER/NAME", str, "Dataset repository, on a track that takes any shards.")
@_folder_option
def get(*, track: str, vocabulary: bool, out: Path | None, **given: Any) -> cli.Answer:
    """Fetch ready-made shards from the Hugging Face hub; what is there stays. HF_ENDPOINT and HF_TOKEN apply."""
    rules = tracks.load(track)
    source = fetch.source_of(rules, given["repo"], given["shards"])
    folder = shards.data_folder(rules, out)
    with resumable(f"get {rules.name}", folder) as progress:
        manifest = fetch.fetch(folder, rules.data, source, progress)
    if vocabulary:
        write_whole(folder / RANKS, tokenizer.cached_ranks())
    return _shards(rules, folder, manifest, f"{manifest.source}@{manifest.settings['revision']}")


@cli.new_command(
    "speedrun data prep",
    "speedrun data prep --source texts/ --out data/mine --shard-tokens 1000000",
    "speedrun data prep --source book.txt --tokenizer bytes --out data/book --shard-tokens 100000",
    of=data,
    name="prep",
)
@_source_option
@cli.option("--tokenizer NAME", str, "gpt2, bytes, a .tiktoken file of GPT-2, or a .json file.", "gpt2")
@cli.option("--workers N", cli.COUNT, "Threads that tokenize. Default: one a core.")
@_folder_option
@cli.option("--prefix WORD", str, "First word of the shards' names.", "fineweb")
@cli.option("--shard-tokens N", cli.Integer(1, MAX_TOKENS), "Of each shard.", 10**8)
@cli.option("--max-tokens N", cli.COUNT, "Stop after so many tokens.")
@_reading_options
def prep_(*, sources: tuple[str, ...], **given: Any) -> cli.Answer:
    """Make shards of text; without --source, of FineWeb's sample of 10 billion tokens.

    A stopped or killed command continues after its last whole shard when it is run again. The bytes do not depend
    on that, nor on the number of workers.
    """
    cut = prepare.Cut(given["prefix"], given["shard_tokens"], given["max_tokens"])
    if sources and given["out"] is None:
        raise UsageError(f"--source {sources[0]} without --out; the shards need a folder; name one")
    # Local files are checked before the network.
    chosen = tokenizer.load(given["tokenizer"], document_text=given["document_text"])
    folder = shards.data_folder(tracks.load(_FINEWEB_TRACK), given["out"])
    source = open_source(sources or (FINEWEB,), column=given["column"], revision=given["revision"])
    workers = given["workers"] or _num_cores()
    with resumable("prep", folder) as progress, lock_folder(folder, progress.say):
        made = prepare.prepare(source, chosen, cut, folder, num_workers=workers, report=progress.update)
    return cli.Answer(made.facts(), made.summary())


@cli.new_command("speedrun data docs --track docs-cpu", of=data)
@cli.track_option("docs-cpu")
@_folder_option
def docs(*, track: str, out: Path | None) -> cli.Answer:
    """Make the shards of a track from the documentation of this Python; half a minute."""
    return _made(track, out)


@cli.new_command("speedrun data synth --track smoke-cpu", of=data)
@cli.track_option()
@_folder_option
def synth(*, track: str, out: Path | None) -> cli.Answer:
    """Make the synthetic shards of a track: the same bytes everywhere."""
    return _made(track, out)


def _made(track: str, out: Path | None) -> cli.Answer:
    rules = tracks.load(track)
    folder = shards.data_folder(rules, out)
    with signals.handled_by(signals.stop), lock_folder(folder, partial(click.echo, err=True)):
        manifest = generated.make(rules, folder)
    return _shards(rules, folder, manifest, manifest.source)


def _shards(rules: Track, folder: Path, manifest: Manifest, origin: str) -> cli.Answer:
    """Return what a folder of shards holds, and where they come from."""
    tokens = sum(entry.tokens for entry in manifest.shards.values())
    return cli.Answer(
        {"track": rules.id, "folder": str(folder), "manifest": manifest},
        [f"{folder}  {len(manifest.shards)} shards  {tokens:,} tokens  {origin}"],
    )


@cli.new_command("speedrun data verify --track smoke-cpu --full", of=data)
@cli.track_option()
@cli.data_option
@cli.flag("--full", "Read every byte: digests, ids, documents.")
def verify(*, track: str, data: Path | None, full: bool) -> cli.Answer:
    """Check the shards of a track: headers and sizes at once, every byte with --full."""
    rules = tracks.load(track)
    folder = shards.data_folder(rules, data)
    with Progress(f"verify {rules.name}") as progress:
        verified = overview.verify(folder, rules.data, full=full, report=progress.update)
    facts = {"track": rules.id, "folder": str(folder), "full": full}
    lines = [f"ok  {folder / shard.name}  {shard}" for shard in verified]
    return cli.Answer({**facts, "shards": [shard._asdict() for shard in verified]}, lines)


@cli.new_command("speedrun data list", "speedrun data list --json", of=data, name="list")
def list_() -> cli.Answer:
    """List what is there of the data of every track."""
    holdings = [overview.holding(tracks.load(name)) for name in tracks.names()]
    lines = [clean(line) for holding in holdings for line in holding.lines()]
    return cli.Answer({"tracks": [holding._asdict() for holding in holdings]}, lines)


@cli.new_command("speedrun data train-bpe --source texts/ --vocab-size 4096 --out mine.json", of=data)
@_source_option
@cli.option("--vocab-size N", cli.Integer(258, 2**16), "Ids, with the document token.", required=True)
@cli.option("--out FILE", cli.PATH, "A .json file.", required=True)
@_reading_options
def train_bpe(*, sources: tuple[str, ...], out: Path, **given: Any) -> cli.Answer:
    """Train a byte-level BPE on texts, through `tokenizers`: the same texts give the same file."""
    if not sources:
        raise UsageError("no --source; texts are needed to train on; name a file or a folder")
    source = open_source(sources, column=given["column"], revision=given["revision"])
    document = given["document_text"]
    size = tokenizer.train_bpe(texts(source), given["vocab_size"], out, document_text=document)
    facts = {"tokenizer": str(out), "vocab_size": size}
    return cli.Answer(facts, [f"{out}  {size:,} ids, document token {document}"])
