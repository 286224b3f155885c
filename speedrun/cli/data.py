"""`speedrun data`: fetches, makes, lists and checks the shards of a track; trains tokenizers."""

from pathlib import Path
from typing import Any

import click

from speedrun.cli import data_prep
from speedrun.cli.data_prep import output
from speedrun.cli.options import Group, Integer, data_option, example, json_option, track_option
from speedrun.cli.progress import Progress, resumable
from speedrun.data import documents, fetch, gpt2, inventory, overview, synthetic, tokenizer
from speedrun.data.overview import verify as verify_shards
from speedrun.data.sources import open_source
from speedrun.data.vocabulary import RANKS
from speedrun.ground import track as tracks
from speedrun.ground.console import clean
from speedrun.ground.errors import UsageError
from speedrun.ground.lock import lock_folder
from speedrun.ground.wholefile import write_whole


@click.command(cls=Group, epilog=example("speedrun data get --track main-8xh100", "speedrun data list"))
def command() -> None:
    """Fetch, make, list and check shards."""


command.add_command(data_prep.command, "prep")
command.add_command(data_prep.docs, "docs")


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
@data_prep.folder_option
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


@command.command(epilog=example("speedrun data synth --track smoke-cpu"))
@track_option()
@data_prep.folder_option
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
        verified = verify_shards(folder, rules.data, full=full, report=progress.update)
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
@data_prep.source_option
@click.option("--vocab-size", type=Integer(258, 2**16), required=True, help="Ids, with the document token.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A .json file.")
@data_prep.column_option
@data_prep.document_option
@data_prep.revision_option
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
