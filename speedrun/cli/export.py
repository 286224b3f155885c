"""`speedrun export`: write a record in the formats of other tools."""

from pathlib import Path

import click
import msgspec

from speedrun.cli.options import example, json_option, out_option
from speedrun.exchange.exports import FORMS, export
from speedrun.ledger.record import load


@click.command(
    epilog=example(
        "speedrun export records/smoke-cpu/2026-11-21-first --to classic",
        "speedrun export RECORD --to tensorboard --out events",
    )
)
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--to", "form", type=click.Choice(list(FORMS)), required=True, help="The format.")
@out_option("New folder. Default: RECORD's name and the format.")
@json_option
def command(*, record: Path, form: str, out: Path | None, as_json: bool) -> None:
    """Write the curves of RECORD as text logs, CSV, offline wandb runs or TensorBoard events.

    The files contain nothing about this machine, and nothing is sent. The record is not changed.
    """
    folder = out if out is not None else Path(f"{record.resolve().name}-{form}")
    paths = [str(path) for path in export(load(record), form, folder)]
    click.echo(msgspec.json.encode({"files": paths}) if as_json else "\n".join(paths))
