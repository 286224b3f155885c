"""`speedrun replay`: runs the source that a record carries, and compares every loss. Executes code from the record."""

import sys
import tempfile
from pathlib import Path

import click
import msgspec

from speedrun.cli.options import data_option, example, json_option, unsafe_option
from speedrun.referee.rerun import Rerun
from speedrun.referee.sandbox import protections


@click.command(epilog=example("speedrun replay records/smoke-cpu/2026-11-21-first"))
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--run", "run_id", metavar="ID", help="Which run of the record. Default: the first.")
@unsafe_option
@data_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep the new run here. Default: thrown away.",
)
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

    Exits with 0 if every loss is equal to the last bit, else with 1. Equality is promised only for the same
    software on the same kind of machine.
    """
    again = Rerun(record, run_id, unsafe=unsafe)
    old, echo = again.old, sys.stderr if as_json else sys.stdout
    print(protections(unsafe=unsafe), file=echo, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        target = out or Path(scratch) / "record"
        new = again.run(target, seed=old.file.seed, data=data, echo=echo)
    losses = [step.loss for step in new.steps]
    pairs = list(zip([step.loss for step in old.steps], losses, strict=False))
    num_equal = sum(a == b for a, b in pairs)
    largest = max((abs(a - b) for a, b in pairs), default=0.0)
    equal = num_equal == len(old.steps) == len(losses)
    if as_json:
        facts = {
            "run": old.file.run_id,
            "losses": len(old.steps),
            "equal": num_equal,
            "largest_difference": largest,
        }
        click.echo(msgspec.json.encode(facts))
    else:
        click.echo(f"replay  {num_equal} of {len(old.steps)} losses equal, largest difference {largest:.3g}")
    ctx.exit(0 if equal else 1)
