"""`speedrun attempt`: all stages from this machine to a record that can be submitted."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import click
import msgspec

from speedrun.cli.options import (
    Integer,
    data_option,
    example,
    json_option,
    parse_settings,
    price_option,
    recipe_option,
    settings_option,
    track_option,
)
from speedrun.cli.run_options import new_folder
from speedrun.doctor import nvidia
from speedrun.ground import signals
from speedrun.ground import track as tracks
from speedrun.ground.errors import UsageError
from speedrun.ground.lock import lock_folder
from speedrun.study.attempt import STAGES, Attempt, Settings


@click.command(
    epilog=example(
        "speedrun attempt --track main-8xh100 --dry-run",
        "speedrun attempt --track main-8xh100 --runs 4 --dollars 2.50",
        "speedrun attempt --track smoke-cpu --runs 6 --again batch",
    )
)
@track_option()
@click.option("--runs", type=Integer(2), metavar="N", help="Of the batch. Default: as many as a rank needs.")
@recipe_option()
@settings_option
@data_option
@click.option("--title", help="What the record is, in a few words.")
@price_option
@click.option("--again", type=click.Choice(STAGES), help="Repeat this stage; a batch gets a new record.")
@click.option("--dry-run", is_flag=True, help="Only report what is left to do and what it costs.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    track: str,
    runs: int | None,
    recipe: str | None,
    settings: tuple[str, ...],
    data: Path | None,
    title: str | None,
    dollars: float,
    again: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run all stages from this machine to a record ready to submit: doctor, data, batch, stats, validate, submit.

    The same command continues after any interruption. Exits with 0 if the batch proves its target and the record is
    packed, with 1 if it does not prove it, else with the exit code of the stage that failed.
    """
    rules = tracks.load(track)
    parse_settings(settings)
    if data is None and not rules.data.is_ours_to_get:
        raise UsageError(f"track {track} takes anybody's shards; {rules.data.get}")
    asked = Settings(
        runs or max(2, rules.rules.min_runs), recipe, settings, None if data is None else str(data), title
    )
    folder = Path("runs") / f"{track}.attempt"
    turn = nullcontext() if dry_run else lock_folder(folder, refuse=UsageError)  # a dry run writes nothing
    with turn, signals.handled_by(signals.stop):
        attempt = Attempt(
            rules,
            asked,
            folder / "state.json",
            new_record=new_folder(track),
            gpus=_gpus(),
            dollars=dollars,
            again=again,
            say=partial(click.echo, err=as_json),
            to_stderr=as_json,
        )
        code = attempt.plan()
        if not code and not dry_run:
            code = attempt.run()
        if as_json:
            facts = {"track": rules.id, "record": attempt.record or None, "exit_code": code}
            click.echo(msgspec.json.encode({**facts, "left": attempt.left}))
        ctx.exit(code)


def _gpus() -> list[str]:
    """Return the names of the GPUs here."""
    try:
        return [gpu.name for gpu in nvidia.gpus()]
    except nvidia.NoAnswerError:
        return []  # the doctor reports it
