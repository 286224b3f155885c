"""`speedrun reproduce`: run a record again and say whether its result holds. Executes code from the record."""

import sys
from functools import partial
from pathlib import Path

import click
import msgspec

from speedrun.cli.options import Integer, data_option, example, json_option, out_option, unsafe_option
from speedrun.cli.progress import Progress
from speedrun.ground.children import locked
from speedrun.ground.console import clean
from speedrun.ground.errors import UsageError
from speedrun.ledger.reproduction import REPRODUCTION
from speedrun.referee import circumstances, container, reproduce
from speedrun.referee.rerun import Rerun
from speedrun.referee.sandbox import protections

_RECORD = "records/smoke-cpu/2026-11-21-six-seeds"


@click.command(
    epilog=example(
        f"speedrun reproduce {_RECORD} --runs 1",
        f"speedrun reproduce {_RECORD} --same-seeds --runs 1",
        f"speedrun reproduce {_RECORD} --docker",
    )
)
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--runs", type=Integer(1), metavar="N", help="Number of runs. Default: as many as the record has."
)
@click.option(
    "--same-seeds", is_flag=True, help="Use the record's seeds, to compare bits. Default: fresh ones."
)
@click.option("--by", default="", metavar="NAME", help="Your name, for the result.")
@data_option
@out_option(
    "For runs and reproduction.json; the same command continues there. Default: a folder below runs/."
)
@click.option("--into-record", is_flag=True, help="Also put reproduction.json into the record.")
@click.option("--docker", "in_docker", is_flag=True, help="Run in the container image that the record names.")
@click.option("--image", metavar="NAME", help="With --docker: use another image; differences are reported.")
@unsafe_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    record: Path,
    runs: int | None,
    same_seeds: bool,
    by: str,
    data: Path | None,
    out: Path | None,
    into_record: bool,
    in_docker: bool,
    image: str | None,
    unsafe: bool,
    as_json: bool,
) -> None:
    """Run RECORD again from its own source, and say whether its result holds. EXECUTES CODE FROM THE RECORD.

    First compares what the record names (source, track, data, packages, lock, flags) with this machine, and says which
    promise each difference costs. The verdict is within, faster, slower, loss mismatch or not the same hardware. Exits
    with 0 if it is within or faster, else with 1; with 2 or 3, before anything runs, if the record or the data cannot
    be used.
    """
    if image is not None and not in_docker:
        raise UsageError("--image names a container image; it needs --docker as well")
    found = circumstances.read(record)
    folder = out or Path("runs") / f"reproduction-{found.id[:12]}{'-same-seeds' * same_seeds}"
    if in_docker:
        chosen = container.image_for(found, image, partial(click.echo, err=True))
        shards = container.data_for(found, data)
        words = container.inner_words(runs, by, shards, same_seeds=same_seeds, as_json=as_json)
        exit_code = container.reproduced(chosen, record, folder, shards, words)
    else:
        # Refuses what may not be executed.
        rerun = Rerun(record, found.finished[0].folder, unsafe=unsafe)
        with Progress("data") as progress:
            points = circumstances.points(found, data, progress.update)
        for line in (*reproduce.differences(points), protections(unsafe=unsafe)):
            click.echo(line, err=True)
        repetition = reproduce.planned(folder, found, runs, same_seeds=same_seeds)
        with locked(folder / reproduce.PLAN):
            result = repetition.run(rerun, data, points, by, sys.stderr)
        if as_json:
            click.echo(msgspec.json.encode(result))
        else:
            lines = reproduce.table(result, found)
            click.echo("\n".join([*lines, f"wrote    {clean(str(folder / REPRODUCTION))}"]))
        exit_code = 0 if result.verdict in ("within", "faster") else 1
    if into_record and (folder / REPRODUCTION).exists():
        path = reproduce.put_into_record(folder, record)
        click.echo(f"wrote {clean(str(path))}", err=True)
    ctx.exit(exit_code)
