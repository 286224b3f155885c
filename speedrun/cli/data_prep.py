"""`speedrun data prep` and its kin: from text to shards, and a tokenizer of one's own."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

import click
import msgspec

from speedrun.cli.options import Integer, example, json_option, track_option
from speedrun.data import documents, inventory, prep, python_docs, tokenizer
from speedrun.data.gpt2 import END_OF_TEXT
from speedrun.data.sources import HUB, open_source
from speedrun.data.text_files import READERS
from speedrun.ground import signals
from speedrun.ground import track as tracks
from speedrun.ground.clock import Stopwatch
from speedrun.ground.console import clean, duration, quantity
from speedrun.ground.errors import Terminated, UsageError
from speedrun.ground.lock import alone_in
from speedrun.ground.track import Track

if TYPE_CHECKING:
    from rich.progress import Progress

FINEWEB = f"{HUB}HuggingFaceFW/fineweb:sample-10BT"
#: Whose folder FineWeb's shards go to, when no other is named.
_FINEWEB_TRACK = "main-8xh100"
#: Between two lines of progress in a file.
_LINE_EVERY_S = 10.0

source_option = click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="NAME",
    help=f"File or folder of {', '.join(READERS)}, or hub:OWNER/NAME[:CONFIG]. Repeatable.",
)
column_option = click.option("--column", default="text", show_default=True, help="Field that is the text.")
document_token_option = click.option(
    "--document-token",
    "document_text",
    default=END_OF_TEXT,
    show_default=True,
    metavar="TEXT",
    help="Opens a document, in a .json tokenizer.",
)
workers_option = click.option(
    "--workers", type=Integer(1), help="Threads that tokenize. Default: one a core."
)


@click.command(
    epilog=example(
        "speedrun data prep",
        "speedrun data prep --source texts/ --out data/mine --shard-tokens 1000000",
        "speedrun data prep --source book.txt --tokenizer bytes --out data/book --shard-tokens 100000",
    )
)
@source_option
@click.option(
    "--tokenizer",
    "tokenizer_name",
    default="gpt2",
    show_default=True,
    metavar="NAME",
    help="gpt2, bytes, a .tiktoken file of GPT-2, or a .json file.",
)
@click.option("--engine", default="auto", show_default=True, help="auto, tiktoken or gigatoken, for gpt2.")
@workers_option
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Where to. Needed with --source.")
@click.option("--prefix", default="fineweb", show_default=True, help="First word of the shards' names.")
@click.option(
    "--shard-tokens",
    type=Integer(1),
    default=prep.Cut().shard_tokens,
    show_default=True,
    help="Of each shard.",
)
@click.option("--max-shards", type=Integer(1), help="Stop after so many, validation included.")
@click.option("--max-tokens", type=Integer(1), help="Stop after so many tokens.")
@click.option(
    "--scored-tokens",
    type=Integer(1),
    default=prep.SCORED_TOKENS,
    show_default=True,
    help="Of validation: their bytes are counted, for bits per byte.",
)
@column_option
@document_token_option
@click.option("--revision", metavar="COMMIT", help="Of a hub: dataset. Default: its newest.")
@json_option
def command(
    *,
    sources: tuple[str, ...],
    tokenizer_name: str,
    engine: str,
    workers: int | None,
    out: Path | None,
    prefix: str,
    shard_tokens: int,
    max_shards: int | None,
    max_tokens: int | None,
    scored_tokens: int,
    column: str,
    document_text: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """Make shards of text; without --source, of FineWeb's sample of 10 billion tokens.

    A command that was stopped or killed goes on after its last whole shard when it is given again. The bytes do
    not depend on that, nor on the number of workers.
    """
    limits = [limit for limit in (max_tokens, max_shards and max_shards * shard_tokens) if limit]
    cut = prep.Cut(prefix, shard_tokens, min(limits, default=None), scored_tokens)
    # The file that may be missing comes before the network that may be.
    choice = tokenizer.choose(tokenizer_name, engine=engine, document_text=document_text)
    folder = _folder(sources, out)
    source = open_source(sources or (FINEWEB,), column=column, revision=revision)
    _say_engine(choice)
    with shown(folder) as progress, alone_in(folder, progress.say):
        made = prep.prepare(
            source, choice, cut, folder, column=column, num_workers=workers or num_cores(), tell=progress
        )
    report(made, as_json=as_json)


def _folder(sources: tuple[str, ...], out: Path | None) -> Path:
    if sources and out is None:
        raise UsageError(f"--source {sources[0]} without --out; the shards need a folder; name one")
    return inventory.data_folder(tracks.load(_FINEWEB_TRACK), out)


def _say_engine(choice: tokenizer.Choice) -> None:
    """Which of two engines runs must be seen: nothing falls back silently."""
    words = {
        "tiktoken": "tiktoken, the reference",
        "gigatoken": "gigatoken, which first has to agree with tiktoken on awkward texts",
    }
    if choice.engine:
        click.echo(f"tokens  {choice.name} by {words[choice.engine]}", err=True)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@click.command(epilog=example("speedrun data train-bpe --source texts/ --vocab-size 4096 --out mine.json"))
@source_option
@click.option(
    "--vocab-size", type=Integer(258, 2**16), required=True, help="Ids, the document token included."
)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", required=True, help="A .json file.")
@column_option
@document_token_option
@click.option("--revision", metavar="COMMIT", help="Of a hub: dataset. Default: its newest.")
@json_option
def train_bpe(
    *,
    sources: tuple[str, ...],
    vocab_size: int,
    out: Path,
    column: str,
    document_text: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """Train a byte-level BPE on texts, through `tokenizers`: the same texts give the same file."""
    if not sources:
        raise UsageError("no --source; texts are needed to train on; name a file or a folder")
    if out.suffix != ".json":
        raise UsageError(f"--out {out}; need a name that ends in .json, by which --tokenizer knows the file")
    source = open_source(sources, column=column, revision=revision)
    size = tokenizer.train_bpe(documents.texts(source, column), vocab_size, out, document_text=document_text)
    if as_json:
        click.echo(msgspec.json.encode({"tokenizer": str(out), "vocab_size": size}))
        return
    click.echo(f"{out}  {size:,} ids, document token {document_text}")


@click.command(epilog=example("speedrun data docs --track docs-cpu"))
@track_option("docs-cpu")
@workers_option
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Default: the track's folder.")
@json_option
def docs(*, track: str, workers: int | None, out: Path | None, as_json: bool) -> None:
    """Make the shards of a track of the documentation that this Python brings along; half a minute."""
    rules = tracks.load(track)
    folder = inventory.data_folder(rules, out)
    with signals.handled_by(signals.stop):
        made = python_docs.make(
            rules, folder, num_workers=workers or num_cores(), say=partial(click.echo, err=True)
        )
    report(made, as_json=as_json)


# --- what is shown ----------------------------------------------------------------------------------------


@contextmanager
def shown(folder: Path) -> Iterator["Shown"]:
    """Shows progress inside the block; signals end it with a word on how to go on."""
    with signals.handled_by(signals.stop), Shown(sys.stderr) as progress:
        try:
            yield progress
        except (KeyboardInterrupt, Terminated):
            click.echo(
                f"stopped {folder}: whole shards are kept; the same command goes on after them", err=True
            )
            raise


class Shown:
    """Progress of a preparation on a stream: a bar on a terminal, else a line now and then."""

    def __init__(self, stream: TextIO) -> None:
        """Shows nothing yet."""
        self._stream, self._since = stream, Stopwatch()
        self._bar: Progress | None = None
        self._task: Any = None

    def __call__(self, done: prep.Progress) -> None:
        """Shows how far the work is."""
        rate = quantity((done.tokens - done.began_tokens) / max(1e-9, done.seconds), "tok/s")
        words = f"{done.num_shards} shards  {done.tokens:,} tokens  {rate}"
        share = done.read_bytes / done.total_bytes if done.total_bytes else None
        if share is not None:
            pace = (done.read_bytes - done.began_bytes) / max(1e-9, done.seconds)
            eta = duration((done.total_bytes - done.read_bytes) / pace) if pace > 0 else "?"
            words += f"  {share:.0%}  eta {eta}"
        if self._bar is not None:
            self._bar.update(self._task, completed=share or 0.0, facts=words)
        elif self._since.seconds >= _LINE_EVERY_S:
            self._since = Stopwatch()
            self.say(f"prep    {words}")

    def say(self, line: str) -> None:
        """A line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(clean(line), markup=False)
            return
        self._stream.write(clean(line) + "\n")
        self._stream.flush()

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            console = Console(file=self._stream, highlight=False, soft_wrap=True)
            columns = (TextColumn("prep"), BarColumn(), TextColumn("{task.fields[facts]}"))
            self._bar = Progress(*columns, console=console, transient=True, refresh_per_second=4)
            self._task = self._bar.add_task("prep", total=1.0, facts="")
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def report(made: prep.Prepared, *, as_json: bool) -> None:
    """What there is now."""
    entries = list(made.manifest.shards.values())
    tokens, num_documents = sum(e.tokens for e in entries), sum(e.documents for e in entries)
    text_bytes = _sum([e.text_bytes for e in entries])
    source_tokens = _sum([e.source_tokens for e in entries])
    if as_json:
        facts = {
            "folder": str(made.folder),
            "tokens": tokens,
            "documents": num_documents,
            "text_bytes": text_bytes,
            "source_tokens": source_tokens,
            "found_shards": made.found_shards,
            "start_s": made.start_s,
            "seconds": made.seconds,
            "manifest": made.manifest,
        }
        click.echo(msgspec.json.encode(facts))
        return
    found = f" ({made.found_shards} were there)" if made.found_shards else ""
    density = inventory.bytes_per_token(entries)
    shown_density = "" if density is None else f"  {density:.2f} bytes a token"
    click.echo(
        f"made    {made.folder}: {len(entries)} shards{found}  {tokens:,} tokens  "
        f"{num_documents:,} documents{shown_density}"
    )
    if source_tokens is not None:
        # A last document that was cut off by a limit is counted whole by the source.
        got = tokens - num_documents
        click.echo(
            f"count   the source says {source_tokens:,} tokens, here are {got:,}: {got - source_tokens:+,}"
        )
    if len(entries) == 1:
        click.echo(
            f"note    all of it is in the validation shard, {tokens:,} tokens; to train, take fewer --shard-tokens"
        )


def _sum(numbers: list[int | None]) -> int | None:
    """None if one of them is not known."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def ensure_docs(rules: Track, data: Path | None) -> None:
    """Makes the data of a track of Python's documentation the first time; those of synthetic ones `prepare` makes."""
    if data is not None:
        return
    folder = inventory.data_folder(rules, None)
    if (made := python_docs.ensure(rules, folder, say=partial(click.echo, err=True))) is not None:
        tokens = sum(entry.tokens for entry in made.manifest.shards.values())
        click.echo(
            f"made  {len(made.manifest.shards)} shards of Python's documentation in {folder}: {tokens:,} tokens",
            err=True,
        )
