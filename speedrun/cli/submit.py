"""`speedrun submit`: prepare a record for a pull request; sends nothing."""

import os
from pathlib import Path
from typing import NoReturn

import click
import msgspec

from speedrun.board import submission
from speedrun.board.leaks import Leak
from speedrun.board.submission import Submission
from speedrun.cli.options import example, json_option, out_option
from speedrun.ground.console import clean
from speedrun.ground.errors import SpeedrunError
from speedrun.ledger.record import load, need_record
from speedrun.ledger.validate import Report, examine


@click.command(
    epilog=example(
        "speedrun submit runs/first --dry-run",
        "speedrun submit runs/first --name wider-head --out submissions",
    )
)
@click.argument("record", type=click.Path(path_type=Path))
@out_option("Where to write. Default: the folder that holds the record.")
@click.option(
    "--name", metavar="WORDS", help="What changed, in a few words, for the folder's name. Default: the title."
)
@click.option("--dry-run", is_flag=True, help="Show everything and write nothing.")
@click.option("--missed", is_flag=True, help="Submit a record that missed its target.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    record: Path,
    out: Path | None,
    name: str | None,
    dry_run: bool,
    missed: bool,
    as_json: bool,
) -> None:
    """Validate RECORD strictly, scan it for secrets, pack it, and write the text of its pull request.

    Prints the commands that send it and runs none of them; type them in the root of a checkout. Exits with 1 and writes
    nothing if a check fails or warns, if the record missed its target and --missed is not given, or if a file seems to
    hold a secret.
    """
    need_record(record)
    loaded = load(record)
    report = examine(loaded, strict=True)
    submission.require_acceptable(loaded, report, missed=missed)
    out = Path(os.path.relpath(record.resolve().parent)) if out is None else out
    submission.require_outside(record, out)
    called = submission.name_of(loaded, name)
    ready, archive = submission.prepare(loaded, report, name=called, out=out)
    if any(finding.secret for finding in ready.findings):
        _refuse(ctx, record, ready.findings, as_json=as_json)
    if not dry_run:
        submission.write(ready, archive)
    if as_json:
        click.echo(msgspec.json.encode({**msgspec.to_builtins(ready), "written": not dry_run}))
    else:
        _show(ready, report, written=not dry_run)


def _refuse(ctx: click.Context, record: Path, found: tuple[Leak, ...], *, as_json: bool) -> NoReturn:
    """Name file, line and kind, never the secret. A log cannot be edited, so the secret itself must be revoked."""
    error = (
        f"{record} seems to hold secrets ({sum(one.secret for one in found)}), so nothing was written; revoke them "
        "where they were issued, then remove them from what people wrote, or run again without them"
    )
    if as_json:
        click.echo(msgspec.json.encode({"error": error, "exit_code": 1, "findings": found}))
    else:
        click.echo("\n".join(map(_line, found)))
        click.echo(f"error: {error}", err=True)
    ctx.exit(SpeedrunError.exit_code)


def _line(finding: Leak) -> str:
    status = "secret " if finding.secret else "warning"
    return f"{status} {clean(finding.path)}:{finding.line}  {clean(finding.kind)}"


def _show(ready: Submission, report: Report, *, written: bool) -> None:
    passed, skipped = len(report.having("ok")), len(report.having("skipped"))
    click.echo(f"checks  {passed} passed, {skipped} not applicable; no secrets found")
    for finding in ready.findings:
        click.echo(_line(finding))
    done = "" if written else "  (not written)"
    click.echo(f"archive {ready.archive}  {ready.archive_bytes:,} bytes, sha256 {ready.archive_sha256}{done}")
    click.echo(f"text    {ready.text_path}{done}")
    click.echo("\nTo send it, type in the root of a checkout:\n")
    for line in ready.commands:
        click.echo(f"    {line}")
    click.echo(
        "\nOr open the pull request in a browser with that text. Then tick the promises that you make."
    )
