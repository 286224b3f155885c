"""`speedrun validate`: every claim of a record, checked offline."""

import sys
from pathlib import Path

import click
import msgspec

from speedrun.cli.options import data_option, example, json_option
from speedrun.console import clean
from speedrun.errors import UsageError
from speedrun.ledger.validate import Report, find_check, validate

_COLOURS = {"ok": "green", "failed": "red", "warning": "yellow", "skipped": "bright_black"}


@click.command(
    epilog=example("speedrun validate records/smoke-cpu/2026-11-21-first", "speedrun validate --explain V104")
)
@click.argument("records", metavar="RECORD...", type=click.Path(path_type=Path), nargs=-1)
@click.option("--strict", is_flag=True, help="Let warnings fail, too.")
@click.option("--explain", metavar="ID", help="Say what one check wants, why, and what to do, and stop.")
@click.option(
    "--replay",
    is_flag=True,
    help="Ask V601 to V605, too: run the record's source, score its final state. EXECUTES CODE FROM THE RECORD.",
)
@click.option(
    "--checkpoints",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="With --replay: of the record's first run. Default: the run is made again.",
)
@data_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    records: tuple[Path, ...],
    strict: bool,
    explain: str | None,
    replay: bool,
    checkpoints: Path | None,
    data: Path | None,
    as_json: bool,
) -> None:
    """Check every claim of the records in the folders RECORD.

    Reads only: no network, no accelerator, and without --replay nothing in a record is executed. Exits with 0 if
    all records are good, else with 1.
    """
    if explain is not None:
        _explain(explain, as_json=as_json)
        return
    if not records:
        raise UsageError("no record given; name the folder that holds its manifest.json")
    for record in records:
        need_record(record)
    reports = {str(record): validate(record, strict=strict) for record in records}
    if replay:
        from speedrun.referee import examined

        echo = sys.stderr if as_json else sys.stdout
        reports = {
            path: examined(Path(path), report, checkpoints=checkpoints, data=data, echo=echo)
            for path, report in reports.items()
        }
    exit_code = max(report.exit_code for report in reports.values())
    if as_json and len(reports) == 1:
        click.echo(msgspec.json.encode(*map(_facts, reports.values())))
    elif as_json:
        named = {path: _facts(report) for path, report in reports.items()}
        click.echo(msgspec.json.encode({"exit_code": exit_code, "records": named}))
    else:
        for path, report in reports.items():
            if len(reports) > 1:
                click.echo(clean(path))
            _show(report)
    ctx.exit(exit_code)


def need_record(folder: Path) -> None:
    """Refuses a folder that is no record, with the one that may have been meant.

    Raises:
        UsageError: if it is there and holds no manifest.
    """
    if folder.is_dir() and not (folder / "manifest.json").exists():
        inside = sorted(path.parent for path in folder.glob("*/manifest.json"))
        hint = f"did you mean {inside[0]}?" if inside else "name the folder that 'speedrun run' printed"
        raise UsageError(f"{folder} holds no manifest.json, so it is no record; {hint}")


def _explain(id: str, *, as_json: bool) -> None:
    check = find_check(id)
    facts = {
        "id": check.id,
        "severity": check.severity,
        "title": check.title,
        "why": check.why,
        "fix": check.hint,
    }
    if as_json:
        click.echo(msgspec.json.encode(facts))
    else:
        click.echo(f"{check.id}  {check.title} ({check.severity})\nwhy   {check.why}\nfix   {check.hint}")


def _show(report: Report) -> None:
    for result in report.results:
        status = click.style(f"{result.status:<8}", fg=_COLOURS[result.status])
        click.echo(f"{status} {result.check.id}  {result.check.title}")
        for message in result.messages:
            click.echo(f"               {message}")
        if result.status in ("failed", "warning"):
            click.echo(f"               fix: {result.check.hint}")
    counts = [(len(report.having(status)), status) for status in ("ok", "failed", "warning", "skipped")]
    verdict = "refused" if report.exit_code else "good"
    click.echo(f"{verdict}: {', '.join(f'{count} {status}' for count, status in counts if count)}")


def _facts(report: Report) -> dict[str, object]:
    results = [
        {"id": result.check.id, "status": result.status, "messages": result.messages}
        for result in report.results
    ]
    return {"exit_code": report.exit_code, "results": results}
