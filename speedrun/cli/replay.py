"""`speedrun replay`: run the source that a record carries, and compare every loss. Executes code from the record."""

import sys
import tempfile
from pathlib import Path

import click
import msgspec

from speedrun.cli.options import data_option, example, json_option, out_option, unsafe_option
from speedrun.referee.rerun import Rerun
from speedrun.referee.sandbox import protections


@click.command(epilog=example("speedrun replay records/smoke-cpu/2026-11-21-first"))
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--run", "run_id", metavar="ID", help="Which run of the record. Default: the first.")
@unsafe_option
@data_option
@out_option("Keep the new run here. Default: discard it.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    record: Path,
    run_id: str | None,
    unsafe: bool,
    data: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Unpack the source of RECORD, run it again, compare all losses. EXECUTES CODE FROM THE RECORD.

    Exits with 0 if every loss is equal to the last bit, else with 1. Equality is promised only for the same software on
    the same kind of machine.
    """
    rerun = Rerun(record, run_id, unsafe=unsafe)
    echo = sys.stderr if as_json else sys.stdout
    print(protections(unsafe=unsafe), file=echo, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        found = rerun.replay(out or Path(scratch, "record"), data=data, echo=echo)
    if as_json:
        facts = {
            "run": rerun.old.folder,
            "losses": found.num_losses,
            "equal": found.num_equal,
            "largest_difference": found.largest_difference,
        }
        click.echo(msgspec.json.encode(facts))
    else:
        click.echo(
            f"replay  {found.num_equal} of {found.num_losses} losses equal, "
            f"largest difference {found.largest_difference:.3g}"
        )
    ctx.exit(0 if found.equal else 1)
