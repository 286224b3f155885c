"""`speedrun validate`: every claim of a record, checked offline."""

import re
import secrets
import sys
from itertools import pairwise
from pathlib import Path
from typing import Literal

import click
import msgspec

from speedrun.cli.options import data_option, example, json_option, unsafe_option
from speedrun.ground.console import clean
from speedrun.ground.errors import UsageError
from speedrun.ledger.validate import Report, find_check, validate

Which = Literal["some", "all"]

_COLOURS = {"ok": "green", "failed": "red", "warning": "yellow", "skipped": "bright_black"}


class _WithReplay(click.Command):
    """`--replay` alone asks some runs; click would take the record for its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spells it out."""
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
@click.option("--strict", is_flag=True, help="Let warnings fail, too.")
@click.option("--explain", metavar="ID", help="Say what one check wants, why, and what to do, and stop.")
@click.option(
    "--replay",
    type=click.Choice(["some", "all"]),
    metavar="[=all]",
    help="Ask V601 to V606, too: have the record's source lower its programs, train and score them. Of two runs, or "
    "with =all of every one. EXECUTES CODE FROM THE RECORD, kept apart.",
)
@click.option(
    "--nonce",
    metavar="HEX",
    help="With --replay: what chooses runs, stretches and positions. Default: random, and printed.",
)
@click.option(
    "--checkpoints",
    type=click.Path(path_type=Path),
    metavar="DIR",
    multiple=True,
    help="With --replay: of one of its runs; may be given again. Without them a run is made again.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show the checks that passed or were skipped, too.")
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
    replay: Which | None,
    nonce: str | None,
    checkpoints: tuple[Path, ...],
    verbose: bool,
    unsafe: bool,
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
        from speedrun.referee.questions import Asked, examined

        echo = sys.stderr if as_json else sys.stdout
        asked = Asked(replay, _nonce(nonce), checkpoints, data, unsafe)
        reports = {path: examined(Path(path), report, asked, echo) for path, report in reports.items()}
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
            _show(report, verbose=verbose)
    ctx.exit(exit_code)


def _nonce(given: str | None) -> str:
    """What nobody knew before, unless it is asked again."""
    if given is None:
        return secrets.token_hex(8)
    if not re.fullmatch(r"[0-9a-f]{8,64}", given):
        raise UsageError(
            f"--nonce {given!r}; need 8 to 64 hex digits, as an earlier examination printed them"
        )
    return given


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


def _show(report: Report, *, verbose: bool) -> None:
    """Problems last, where a person looks; what an examination found in any case."""
    order = [
        *report.having("skipped"),
        *report.having("ok"),
        *report.having("warning"),
        *report.having("failed"),
    ]
    for result in order:
        was_examined = result.check.id.startswith("V6") and result.status == "ok"
        if not (verbose or was_examined or result.status in ("warning", "failed")):
            continue
        status = click.style(f"{result.status:<8}", fg=_COLOURS[result.status])
        click.echo(f"{status} {result.check.id}  {result.check.title}")
        for message in result.messages:
            click.echo(f"               {message}")
        if result.status in ("failed", "warning"):
            click.echo(f"               fix: {result.check.hint}")
    click.echo(report.verdict + ("" if verbose else " (-v shows all)"))


def _facts(report: Report) -> dict[str, object]:
    results = [
        {"id": result.check.id, "status": result.status, "messages": result.messages}
        for result in report.results
    ]
    return {"exit_code": report.exit_code, "results": results}
