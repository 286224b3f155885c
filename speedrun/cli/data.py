"""The commands `speedrun data`: shards of a track, and tokenizers."""

import os
from pathlib import Path
from typing import Annotated, NamedTuple, TypedDict

import click

from speedrun.base import signals
from speedrun.base import track as tracks
from speedrun.base.atomic_files import lock_folder, write_whole
from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.base.progress import Progress, resumable
from speedrun.base.subprocesses import say
from speedrun.base.track import Track
from speedrun.cli import options as cli
from speedrun.data import fetch, generated, overview, prepare
from speedrun.data import tokenizer as tokenizers
from speedrun.data.documents import HUB, READERS, open_source, texts
from speedrun.data.shards import MAX_TOKENS, Manifest, data_folder
from speedrun.data.vocabulary import RANKS, ranks

FINEWEB = f"{HUB}HuggingFaceFW/fineweb:sample-10BT"
_FINEWEB_TRACK = "main-8xh100"  #: FineWeb's shards go to its folder by default

_Out = Annotated[
    Path | None, "--out DIR", "Output folder. Default: the track's, in $SPEEDRUN_DATA or ./data."
]
_Sources = Annotated[
    tuple[str, ...], "--source NAME", f"File or folder of {', '.join(READERS)}, or hub:OWNER/NAME[:CONFIG]."
]


Shards = TypedDict("Shards", {"track": str, "folder": str, "manifest": Manifest})
Verified = TypedDict(
    "Verified", {"track": str, "folder": str, "full": bool, "shards": list[overview.Verified]}
)
Holdings = TypedDict("Holdings", {"tracks": list[overview.Holding]})
TokenizerFile = TypedDict("TokenizerFile", {"tokenizer": str, "vocab_size": int})


class Reading(NamedTuple):
    """Options for reading a source."""

    column: Annotated[str, "--column NAME", "Field with the text."] = "text"
    document_token: Annotated[str, "Document token of a .json tokenizer."] = tokenizers.END_OF_TEXT
    revision: Annotated[str | None, "--revision COMMIT", "Of a hub: dataset. Default: its newest."] = None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@click.group(epilog=cli.epilog("speedrun data get --track main-8xh100", "speedrun data list"))
def data() -> None:
    """Fetch, make, list and check shards."""


@cli.command(
    "speedrun data get --track main-8xh100 --shards 9",
    "speedrun data get --track main-8xh100 --recipe record92",
    "speedrun data get --track webmini --repo kjj0/finewebedu10B-gpt2 --shards 2",
    of=data,
)
def get(
    *,
    track: cli.Track = _FINEWEB_TRACK,
    shards: Annotated[cli.Count | None, "Training shards. Default: as the track says, or 1."] = None,
    vocabulary: Annotated[bool, "Also get GPT-2's ranks, for recipes that read the bytes of ids."] = False,
    recipe: Annotated[cli.Recipe | None, "Get the ranks if this recipe reads them."] = None,
    repo: Annotated[str | None, "--repo OWNER/NAME", "Dataset, for a track that takes any shards."] = None,
    out: _Out = None,
) -> cli.Answer[Shards]:
    """Fetch missing shards from the Hugging Face hub. HF_ENDPOINT and HF_TOKEN apply."""
    rules = tracks.load(track)
    source = fetch.source_of(rules, repo, shards)
    folder = data_folder(rules, out)
    with resumable(f"get {rules.name}", folder) as progress:
        manifest = fetch.fetch(folder, rules.data, source, progress.update, progress.say)
    if vocabulary or (recipe is not None and _reads_bytes(recipe)):
        try:
            ranks((folder / RANKS).read_bytes())
        except (OSError, ValueError):
            write_whole(folder / RANKS, tokenizers.cached_ranks())
    return _shards(rules, folder, manifest, f"{manifest.source}@{manifest.settings['revision']}")


def _reads_bytes(name: str) -> bool:
    from speedrun import recipes
    from speedrun.science.recipe import no_constants

    return recipes.load(name).constants is not no_constants


@cli.command(
    "speedrun data prep",
    "speedrun data prep --source texts/ --out data/mine --shard-tokens 1000000",
    "speedrun data prep --source book.txt --tokenizer bytes --out data/book --shard-tokens 100000",
    of=data,
)
def prep(
    reading: Reading,
    *,
    source: _Sources = (),
    tokenizer: Annotated[str, "gpt2, bytes, a .tiktoken file of GPT-2, or a .json file."] = "gpt2",
    workers: Annotated[cli.Count | None, "Threads that tokenize. Default: one per core."] = None,
    out: _Out = None,
    prefix: Annotated[str, "Prefix of the shards' names."] = "fineweb",
    shard_tokens: Annotated[int, cli.Integer(1, MAX_TOKENS), "Tokens of a shard."] = 10**8,
    max_tokens: Annotated[cli.Count | None, "Stop after this number of tokens."] = None,
) -> cli.Answer[prepare.Prepared]:
    """Make shards of text, by default of FineWeb's sample of 10 billion tokens.

    If the command is stopped or killed, run it again to continue. The bytes depend neither on interruptions nor on the
    number of workers.
    """
    cut = prepare.Cut(prefix, shard_tokens, max_tokens)
    if source and out is None:
        raise UsageError(f"--source {source[0]} without --out; need a folder for the shards; name one")
    # Local files are checked before the network.
    chosen = tokenizers.load(tokenizer, document_text=reading.document_token)
    folder = data_folder(tracks.load(_FINEWEB_TRACK), out)
    opened = open_source(source or (FINEWEB,), column=reading.column, revision=reading.revision)
    workers = workers or _num_cores()
    with resumable("prep", folder) as progress, lock_folder(folder, progress.say):
        made = prepare.prepare(opened, chosen, cut, folder, num_workers=workers, report=progress.update)
    return cli.Answer(made, made.summary())


@cli.command("speedrun data docs --track docs-cpu", of=data)
def docs(*, track: cli.Track = "docs-cpu", out: _Out = None) -> cli.Answer[Shards]:
    """Make the shards of a track from the documentation of this Python, in half a minute."""
    return _made(track, out)


@cli.command("speedrun data synth --track smoke-cpu", of=data)
def synth(*, track: cli.Track = "smoke-cpu", out: _Out = None) -> cli.Answer[Shards]:
    """Make the synthetic shards of a track: the same bytes everywhere."""
    return _made(track, out)


def _made(track: str, out: Path | None) -> cli.Answer[Shards]:
    rules = tracks.load(track)
    folder = data_folder(rules, out)
    with signals.handled_by(signals.stop), lock_folder(folder, say):
        manifest = generated.make(rules, folder)
    return _shards(rules, folder, manifest, manifest.source)


def _shards(rules: Track, folder: Path, manifest: Manifest, origin: str) -> cli.Answer[Shards]:
    tokens = sum(entry.tokens for entry in manifest.shards.values())
    return cli.Answer(
        {"track": rules.id, "folder": str(folder), "manifest": manifest},
        [f"{folder}  {len(manifest.shards)} shards  {tokens:,} tokens  {origin}"],
    )


@cli.command("speedrun data verify --track smoke-cpu --full", of=data)
def verify(
    *,
    track: cli.Track = "smoke-cpu",
    data: cli.Data = None,
    full: Annotated[bool, "Read every byte: digests, ids, documents."] = False,
) -> cli.Answer[Verified]:
    """Check the shards of a track: headers and sizes, or every byte with --full."""
    rules = tracks.load(track)
    folder = data_folder(rules, data)
    with Progress(f"verify {rules.name}") as progress:
        verified = overview.verify(folder, rules.data, full=full, report=progress.update)
    lines = [f"ok  {folder / shard.name}  {shard}" for shard in verified]
    return cli.Answer(Verified(track=rules.id, folder=str(folder), full=full, shards=verified), lines)


@cli.command("speedrun data list", "speedrun data list --json", of=data)
def list_() -> cli.Answer[Holdings]:
    """List the data of every track."""
    holdings = [overview.holding(tracks.load(name)) for name in tracks.files()]
    lines = [clean(line) for holding in holdings for line in holding.lines()]
    return cli.Answer({"tracks": holdings}, lines)


@cli.command(
    "speedrun data train-bpe --source texts/ --vocab-size 4096 --out mine.json", of=data, silent=True
)
def train_bpe(
    reading: Reading,
    *,
    source: _Sources = (),
    vocab_size: Annotated[int, cli.Integer(258, 2**16), "Number of ids, with the document token."],
    out: Annotated[Path, "--out FILE", "A .json file."],
) -> cli.Answer[TokenizerFile]:
    """Train a byte-level BPE on texts with `tokenizers`; the same texts give the same file."""
    if not source:
        raise UsageError("no --source; need texts to train on; name a file or a folder")
    opened = open_source(source, column=reading.column, revision=reading.revision)
    document = reading.document_token
    size = tokenizers.train_bpe(texts(opened), vocab_size, out, document_text=document)
    facts = TokenizerFile(tokenizer=str(out), vocab_size=size)
    return cli.Answer(facts, [f"{out}  {size:,} ids, document token {document}"])
