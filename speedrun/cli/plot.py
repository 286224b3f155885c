"""`speedrun plot`: draw records."""

from collections.abc import Sequence
from pathlib import Path

import click

from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.board.progress_plot import pareto, results
from speedrun.board.record_plot import KINDS, Kind, plot
from speedrun.board.standings import LeftOut, Row, judge
from speedrun.cli import options as cli
from speedrun.record.reader import load


@cli.new_command(
    "speedrun plot records/smoke-cpu/2026-11-25-first",
    "speedrun plot runs/first --kind all",
    "speedrun plot runs/first runs/second --kind pareto --out runs",
)
@click.argument("records", type=cli.PATH, metavar="RECORD...", nargs=-1, required=True)
@cli.option(
    "--kind",
    click.Choice([*KINDS, "all", "pareto"]),
    "Loss against train time, loss against tokens, a histogram of step times, all three, or the mean loss against mean "
    "train time of several records in one picture.",
    "loss",
)
@cli.option(
    "--out DIR",
    cli.PATH,
    "Where to write one picture of several records; others go into RECORD/plots. Default: this folder.",
)
def command(*, records: tuple[Path, ...], kind: str, out: Path | None) -> cli.Answer:
    """Draw records as SVG and PNG. An SVG follows the light or dark mode of whoever looks at it."""
    if kind == "pareto":
        found = pareto(_rows(records), out or Path())
    else:
        kinds: list[Kind] = [known for known in KINDS if kind in (known, "all")]
        found = [path for record in records for path in plot(record, kinds)]
    paths = [str(path) for path in found]
    return cli.Answer({"plots": paths}, paths)


def _rows(records: Sequence[Path]) -> list[Row]:
    """Return the results of the records that have one, with a warning for the others.

    Raises:
        UsageError: if none has.
    """
    rows = {record: judge(load(record), record.resolve().name) for record in records}
    shown = results(row for row in rows.values() if isinstance(row, Row))
    for record, row in rows.items():
        if row not in shown:
            why = row.why if isinstance(row, LeftOut) else f"{row.standing}: {', '.join(row.failed)}"
            click.echo(clean(f"warning: {record} is left out, {why}"), err=True)
    if not shown:
        raise UsageError("no record with a result; 'speedrun validate RECORD' says why")
    return shown
