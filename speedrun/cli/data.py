"""`speedrun data`: fetches, makes, lists and checks the shards of a track."""

from pathlib import Path

import click
import msgspec

from speedrun.cli import data_prep
from speedrun.cli.options import Group, Integer, data_option, example, json_option, track_option
from speedrun.cli.progress import Progress
from speedrun.data import inventory, overview, synthetic
from speedrun.data.verify import verify as verify_shards
from speedrun.ground import signals
from speedrun.ground import track as tracks
from speedrun.ground.console import clean, quantity
from speedrun.ground.errors import Terminated, UsageError
from speedrun.ground.track import Hub, Track

#: `--out DIR`, as the argument `out`.
_out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where to. Default: the track's folder, in $SPEEDRUN_DATA or ./data.",
)


@click.command(cls=Group, epilog=example("speedrun data get --track main-8xh100", "speedrun data list"))
def command() -> None:
    """Fetch, make, list and check shards."""


command.add_command(data_prep.command, "prep")
command.add_command(data_prep.train_bpe, "train-bpe")
command.add_command(data_prep.docs, "docs")


@command.command(
    epilog=example(
        "speedrun data get --track main-8xh100 --shards 9",
        "speedrun data get --track webmini --repo kjj0/finewebedu10B-gpt2 --shards 2",
    )
)
@track_option("main-8xh100")
@click.option(
    "--shards", type=Integer(1), metavar="N", help="Training shards. Default: as the track says, or 1."
)
@click.option("--repo", metavar="OWNER/NAME", help="Dataset repository, on a track that takes any shards.")
@_out_option
@json_option
def get(*, track: str, shards: int | None, repo: str | None, out: Path | None, as_json: bool) -> None:
    """Fetch ready-made shards from the Hugging Face hub; what is there stays. HF_ENDPOINT and HF_TOKEN count."""
    from speedrun.data import fetch

    rules = tracks.load(track)
    source = _source(rules, repo)
    source = source if shards is None else msgspec.structs.replace(source, train_shards=shards)
    folder = inventory.data_folder(rules, out)
    try:
        with signals.handled_by(signals.stop), Progress(f"get {rules.name}") as progress:
            manifest = fetch.fetch(folder, rules.data, source, progress)
    except (KeyboardInterrupt, Terminated):
        click.echo(f"stopped; the shards in {folder} are whole; the same command goes on", err=True)
        raise
    if as_json:
        _print_json({"track": rules.id, "folder": str(folder), "manifest": manifest})
        return
    tokens = sum(entry.tokens for entry in manifest.shards.values())
    revision = manifest.settings["revision"]
    click.echo(f"{folder}  {len(manifest.shards)} shards  {tokens:,} tokens  {manifest.source}@{revision}")


def _source(rules: Track, repo: str | None) -> Hub:
    """Where the shards of a track are to be had."""
    if rules.synthetic is not None:
        raise UsageError(f"track {rules.name!r} is synthetic; its shards are made: {rules.data.get}")
    if rules.data.hub is None:
        if repo is None:
            raise UsageError(f"track {rules.name!r} takes any shards; need --repo OWNER/NAME to fetch some")
        return Hub(repo=repo, revision="main", train_shards=1)
    if repo not in (rules.data.hub.repo, None):
        raise UsageError(
            f"--repo {repo}: track {rules.name!r} is about {rules.data.hub.repo}; use a track that takes any shards"
        )
    return rules.data.hub


@command.command(epilog=example("speedrun data synth --track smoke-cpu"))
@track_option()
@_out_option
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
    with Progress(f"verify {rules.name}") as progress:
        verified = verify_shards(folder, rules.data, full=full, report=progress.update)
    if as_json:
        passed = [shard._asdict() for shard in verified]
        _print_json({"track": rules.id, "folder": str(folder), "full": full, "shards": passed})
        return
    for shard in verified:
        facts = [f"{shard.tokens:,} tokens", *_density(shard.bytes_per_token), shard.sha256 or ""]
        click.echo(f"ok  {folder / shard.name}  {'  '.join(facts)}".rstrip())


@command.command("list", epilog=example("speedrun data list", "speedrun data list --json"))
@json_option
def list_(*, as_json: bool) -> None:
    """Say what is there of the data of every track."""
    holdings = [overview.holding(tracks.load(name)) for name in tracks.names()]
    if as_json:
        _print_json({"tracks": [holding._asdict() for holding in holdings]})
        return
    for holding in holdings:
        of = "" if holding.expected is None else f" of {holding.expected}"
        facts = [
            f"{holding.shards}{of} shards",
            f"{quantity(holding.tokens, 'tokens')}",
            *([] if holding.documents is None else [f"{holding.documents:,} documents"]),
            *_density(holding.bytes_per_token),
            quantity(holding.size_bytes, "B"),
            *([] if holding.source is None else [f"from {holding.source}"]),
        ]
        click.echo(
            f"{holding.track:<16} {'complete' if holding.complete else 'incomplete':<10} {holding.folder}"
        )
        click.echo(clean(f"{'':<16} {' | '.join(facts) if holding.shards else holding.problem}"))
        if holding.shards and holding.problem:
            click.echo(clean(f"{'':<16} {holding.problem}"))


def _density(bytes_per_token: float | None) -> list[str]:
    """The fact, where it is known."""
    return [] if bytes_per_token is None else [f"{bytes_per_token:.2f} bytes a token"]


def _print_json(value: object) -> None:
    click.echo(msgspec.json.encode(value))
