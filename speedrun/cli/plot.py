"""`speedrun plot`: the pictures of records."""

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from speedrun.board.progress import pareto, results
from speedrun.board.record_plot import KINDS, Kind, plot
from speedrun.board.standings import LeftOut, Row, row_of
from speedrun.cli.options import example, json_option
from speedrun.ground.console import clean
from speedrun.ground.errors import UsageError


@click.command(
    epilog=example(
        "speedrun plot records/smoke-cpu/2026-11-21-first",
        "speedrun plot runs/first --kind all",
        "speedrun plot runs/first runs/second --kind pareto --out runs",
    )
)
@click.argument("records", type=click.Path(path_type=Path), metavar="RECORD...", nargs=-1, required=True)
@click.option(
    "--kind",
    type=click.Choice([*KINDS, "all", "pareto"]),
    default="loss",
    show_default=True,
    help="Loss against train time, or against tokens; a histogram of steps; all three; "
    "or loss against time of the records together.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path(),
    metavar="DIR",
    help="For pareto; others go into RECORD/plots. Default: this folder.",
)
@json_option
def command(*, records: tuple[Path, ...], kind: str, out: Path, as_json: bool) -> None:
    """Draw records as SVG and PNG: loss with its range over the runs, step times, or time against loss."""
    if kind == "pareto":
        found = pareto(_rows(records), out)
    else:
        kinds: list[Kind] = [known for known in KINDS if kind in (known, "all")]
        found = [path for record in records for path in plot(record, kinds)]
    paths = [str(path) for path in found]
    click.echo(msgspec.json.encode({"plots": paths}) if as_json else "\n".join(paths))


def _rows(records: Sequence[Path]) -> list[Row]:
    """What the records come to, where they come to something.

    Raises:
        UsageError: if none does.
    """
    rows = {record: row_of(record, record.resolve().name) for record in records}
    shown = results(row for row in rows.values() if isinstance(row, Row))
    for record, row in rows.items():
        if row not in shown:
            why = row.why if isinstance(row, LeftOut) else f"{row.standing}: {', '.join(row.failed)}"
            click.echo(clean(f"warning: {record} is left out, {why}"), err=True)
    if not shown:
        raise UsageError("no record with a result; 'speedrun validate RECORD' says why")
    return shown
