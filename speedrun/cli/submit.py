"""`speedrun submit`: a record made ready for a pull request; sends nothing."""

import os
from pathlib import Path
from statistics import fmean
from typing import NoReturn

import click
import msgspec

from speedrun.board import submission
from speedrun.board.standings import standing_of
from speedrun.board.submission import Finding, Submission
from speedrun.cli.options import example, json_option
from speedrun.ground.console import clean
from speedrun.ground.errors import SpeedrunError, UsageError
from speedrun.ledger.record import Record, load, need_record
from speedrun.ledger.validate import Report, examine


@click.command(
    epilog=example(
        "speedrun submit runs/first --dry-run",
        "speedrun submit runs/first --name wider-head --out submissions",
    )
)
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where to write. Default: beside the record.",
)
@click.option(
    "--name", metavar="WORDS", help="What changed, in a few words, for the folder's name. Default: the title."
)
@click.option("--dry-run", is_flag=True, help="Say everything and write nothing.")
@click.option("--missed", is_flag=True, help="Submit a record that missed its target, as one that did.")
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

    Prints the commands that send it and runs none of them; type them in the root of a checkout. Exits with 1 if a
    check fails or warns, if the record missed its target and --missed is not given, or if a file holds what looks
    like a secret; then nothing is written.
    """
    need_record(record)
    loaded = load(record)
    report = examine(loaded, strict=True)
    if report.exit_code or loaded.manifest is None:
        raise SpeedrunError(_why_refused(report, record))
    _require_target(loaded, report, missed=missed)
    out = Path(os.path.relpath(record.resolve().parent)) if out is None else out
    if out.resolve().is_relative_to(record.resolve()):
        raise UsageError(f"{out} lies in the record, which may hold nothing else; choose an --out beside it")
    called = submission.name_of(record, loaded.manifest, name)
    ready, archive = submission.prepare(loaded, loaded.manifest, report, name=called, out=out)
    if secrets := [finding for finding in ready.findings if finding.secret]:
        _refuse(ctx, record, secrets, ready.findings, as_json=as_json)
    if not dry_run:
        submission.write(ready, archive)
    if as_json:
        click.echo(msgspec.json.encode({**msgspec.to_builtins(ready), "written": not dry_run}))
    else:
        _show(ready, report, written=not dry_run)


def _why_refused(report: Report, record: Path) -> str:
    said = [
        f"{', '.join(result.check.id for result in report.having(status))} {status}"
        for status in ("failed", "warning")
        if report.having(status)
    ]
    return f"{record} is refused: {'; '.join(said)}; 'speedrun validate --strict {record}' says why and what to do"


def _require_target(record: Record, report: Report, *, missed: bool) -> None:
    """Refuses a record that missed its target, unless that is said; and one that did not, if it is.

    Raises:
        SpeedrunError: it missed.
        UsageError: it did not, and --missed was given.
    """
    loss, target = fmean(run.val_loss for run in record.finished), record.rules.target.loss
    is_missed = standing_of(record, report) == "missed"
    if is_missed and not missed:
        raise SpeedrunError(
            f"{record.root} missed its target: mean loss {loss:.4f}, need at most {target:g}; train longer, or pass "
            "--missed to submit it as a run that missed"
        )
    if missed and not is_missed:
        raise UsageError(f"{record.root} reached its target ({loss:.4f}, {target:g}); leave out --missed")


def _refuse(
    ctx: click.Context, record: Path, secrets: list[Finding], found: tuple[Finding, ...], *, as_json: bool
) -> NoReturn:
    """Names file, line and kind, never the secret; the log of a run cannot be edited, so its secret must go first."""
    error = (
        f"{record} looks as if it held secrets ({len(secrets)}), so nothing was written; make them invalid where they "
        "were issued, then take them out of what people wrote, or run again without them"
    )
    if as_json:
        click.echo(msgspec.json.encode({"error": error, "exit_code": 1, "findings": found}))
    else:
        click.echo("\n".join(map(_line, found)))
        click.echo(f"error: {error}", err=True)
    ctx.exit(SpeedrunError.exit_code)


def _line(finding: Finding) -> str:
    status = "secret " if finding.secret else "warning"
    return f"{status} {clean(finding.path)}:{finding.line}  {clean(finding.kind)}"


def _show(ready: Submission, report: Report, *, written: bool) -> None:
    asked, skipped = len(report.having("ok")), len(report.having("skipped"))
    click.echo(f"checks  {asked} passed, {skipped} not asked; no secrets found")
    for finding in ready.findings:
        click.echo(_line(finding))
    done = "" if written else "  (not written)"
    click.echo(f"archive {ready.archive}  {ready.archive_bytes:,} bytes, sha256 {ready.archive_sha256}{done}")
    click.echo(f"text    {ready.text_path}{done}")
    click.echo("\nTo send it, type in the root of a checkout:\n")
    for line in ready.commands:
        click.echo(f"    {line}")
    click.echo("\nOr open the pull request in a browser, with that text; then tick what you promise.")
