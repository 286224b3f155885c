"""`speedrun plot`: the picture of a record."""

from pathlib import Path

import click
import msgspec

from speedrun.cli.options import example, json_option
from speedrun.ledger.plot import plot


@click.command(epilog=example("speedrun plot records/smoke-cpu/2026-11-21-first"))
@click.argument("record", type=click.Path(path_type=Path))
@json_option
def command(*, record: Path, as_json: bool) -> None:
    """Draw loss against train time into RECORD/plots, as SVG and PNG."""
    paths = [str(path) for path in plot(record)]
    click.echo(msgspec.json.encode({"plots": paths}) if as_json else "\n".join(paths))
