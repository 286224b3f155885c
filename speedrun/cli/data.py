"""`speedrun data`: makes and checks the shards of a track."""

from pathlib import Path

import click
import msgspec

from speedrun import track as tracks
from speedrun.cli import data_prep
from speedrun.cli.options import Group, data_option, example, json_option, track_option
from speedrun.data import inventory, synthetic
from speedrun.errors import UsageError


@click.command(cls=Group, epilog=example("speedrun data synth", "speedrun data verify --full"))
def command() -> None:
    """Make and check shards."""


command.add_command(data_prep.command, "prep")
command.add_command(data_prep.train_bpe, "train-bpe")
command.add_command(data_prep.docs, "docs")


@command.command(epilog=example("speedrun data synth --track smoke-cpu"))
@track_option()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where to. Default: the track's folder, in $SPEEDRUN_DATA or ./data.",
)
@json_option
def synth(*, track: str, out: Path | None, as_json: bool) -> None:
    """Make the synthetic shards of a track: the same bytes everywhere."""
    rules = tracks.load(track)
    if rules.synthetic is None:
        raise UsageError(
            f"track {track!r} is not synthetic; it needs real shards; get them: {rules.data.get}"
        )
    folder = inventory.data_folder(rules, out)
    manifest = synthetic.write(rules, folder)
    if as_json:
        _print_json({"track": rules.id, "folder": str(folder), "manifest": manifest})
        return
    for name, entry in manifest.shards.items():
        click.echo(f"{folder / name}  {entry.tokens:,} tokens  {entry.documents:,} documents")


@command.command(epilog=example("speedrun data verify --track smoke-cpu --full"))
@track_option()
@data_option
@click.option("--full", is_flag=True, help="Read every byte: digests, ids, documents.")
@json_option
def verify(*, track: str, data: Path | None, full: bool, as_json: bool) -> None:
    """Check the shards of a track: headers and sizes at once, every byte with --full."""
    rules = tracks.load(track)
    folder = inventory.data_folder(rules, data)
    verified = inventory.verify(folder, rules.data, full=full)
    if as_json:
        passed = [shard._asdict() for shard in verified]
        _print_json({"track": rules.id, "folder": str(folder), "full": full, "shards": passed})
        return
    for shard in verified:
        click.echo(f"ok  {folder / shard.name}  {shard.tokens:,} tokens  {shard.sha256 or ''}".rstrip())


def _print_json(value: object) -> None:
    click.echo(msgspec.json.encode(value))
