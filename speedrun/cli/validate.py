"""`speedrun validate`: check every claim of a record, offline."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from speedrun.cli.options import data_option, example, json_option, unsafe_option
from speedrun.ground.console import clean
from speedrun.ground.errors import UsageError
from speedrun.ledger.record import need_record
from speedrun.ledger.validate import Report, find_check, validate

if TYPE_CHECKING:
    from speedrun.referee.questions import Which

_COLOURS = {"ok": "green", "failed": "red", "warning": "yellow", "skipped": "bright_black"}


class _WithReplay(click.Command):
    """Reads a bare `--replay` as `--replay=some`; click would take the record for its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell the option out."""
        if any(pair == ("--replay", "all") for pair in pairwise(args)) and not Path("all").exists():
            raise UsageError("--replay all; write --replay=all")
        return super().parse_args(ctx, ["--replay=some" if word == "--replay" else word for word in args])


@click.command(
    cls=_WithReplay,
    epilog=example(
        "speedrun validate records/smoke-cpu/2026-11-21-first", "speedrun validate --explain V104"
    ),
)
@click.argument("records", metavar="RECORD...", type=click.Path(path_type=Path), nargs=-1)
@click.option("--strict", is_flag=True, help="Treat warnings as failures.")
@click.option("--explain", metavar="ID", help="Say what one check demands, why, and what to do; then stop.")
@click.option(
    "--replay",
    type=click.Choice(["some", "all"]),
    metavar="[=all]",
    help="Also check V601 to V608 on two runs, =all: on every run. Runs its programs in a sandbox, not its source.",
)
@click.option("--nonce", metavar="HEX", help="With --replay: seed of what is drawn. Default: random.")
@click.option(
    "--checkpoints",
    type=click.Path(path_type=Path),
    metavar="DIR",
    multiple=True,
    help="With --replay: checkpoints of one run; may be repeated. A run without them is trained again in full.",
)
@click.option("-v", "--verbose", is_flag=True, help="Also show checks that passed or were skipped.")
@unsafe_option
@data_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    records: tuple[Path, ...],
    strict: bool,
    explain: str | None,
    replay: "Which | None",
    nonce: str | None,
    checkpoints: tuple[Path, ...],
    verbose: bool,
    unsafe: bool,
    data: Path | None,
    as_json: bool,
) -> None:
    """Check every claim of the records in the folders RECORD.

    Reads only: no network, no accelerator, and nothing of a record's source is executed. Exits with 0 if
    all records are good, else with 1.
    """
    if explain is not None:
        return _explain(explain, as_json=as_json)
    if not records:
        raise UsageError("no record given; name the folder that holds its source.txt")
    reports = {str(need_record(record)): validate(record, strict=strict) for record in records}
    if replay:
        from speedrun.referee.questions import Options, checked_nonce, examined

        options = Options(replay, checked_nonce(nonce), checkpoints, data, unsafe)
        echo = sys.stderr if as_json else sys.stdout
        reports = {path: examined(Path(path), report, options, echo) for path, report in reports.items()}
    exit_code = max(report.exit_code for report in reports.values())
    if as_json:
        facts = {path: report.facts() for path, report in reports.items()}
        shown = {"exit_code": exit_code, "records": facts} if len(facts) > 1 else facts.popitem()[1]
        click.echo(msgspec.json.encode(shown))
    else:
        for path, report in reports.items():
            if len(reports) > 1:
                click.echo(clean(path))
            _show(report, verbose=verbose)
    ctx.exit(exit_code)


def _explain(id: str, *, as_json: bool) -> None:
    check = find_check(id)
    facts = {"id": check.id, "severity": check.severity, "title": check.title, "why": check.why}
    if as_json:
        click.echo(msgspec.json.encode({**facts, "fix": check.hint}))
    else:
        click.echo(f"{check.id}  {check.title} ({check.severity})\nwhy   {check.why}\nfix   {check.hint}")


def _show(report: Report, *, verbose: bool) -> None:
    for result in report.shown(verbose=verbose):
        status = click.style(f"{result.status:<8}", fg=_COLOURS[result.status])
        fix = [f"fix: {result.check.hint}"] if result.status in ("failed", "warning") else []
        lines = [f"{status} {result.check.id}  {result.check.title}", *result.messages, *fix]
        click.echo(f"\n{' ' * 15}".join(lines))
    click.echo(report.verdict + ("" if verbose else " (-v shows all)"))
