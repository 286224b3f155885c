"""`speedrun submit`: prepare a record for a pull request; sends nothing."""

import os
from pathlib import Path

import click
import msgspec

from speedrun.base.console import clean
from speedrun.board import submission
from speedrun.board.leaks import Leak
from speedrun.cli import options as cli
from speedrun.record.reader import load, need_record
from speedrun.record.validate import examine


@cli.new_command("speedrun submit runs/first --dry-run", "speedrun submit runs/first --name wider-head")
@click.argument("record", type=cli.PATH)
@cli.out_option("Where to write. Default: the folder that holds the record.")
@cli.option("--name WORDS", str, "What changed, in a few words, for the folder's name. Default: the title.")
@cli.flag("--dry-run", "Show everything and write nothing.")
@cli.flag("--missed", "Submit a record that missed its target.")
def command(*, record: Path, out: Path | None, name: str | None, dry_run: bool, missed: bool) -> cli.Answer:
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
    ready, archive = submission.prepare(loaded, report, name=submission.name_of(loaded, name), out=out)
    found = [_line(finding) for finding in ready.findings]
    if secrets := sum(finding.secret for finding in ready.findings):
        # A log cannot be edited, so the secret itself must be revoked.
        error = (
            f"{record} seems to hold secrets ({secrets}), so nothing was written; revoke them where they were issued, "
            "then remove them from what people wrote, or run again without them"
        )
        return cli.Answer({"error": error, "exit_code": 1, "findings": ready.findings}, found, error=error)
    if not dry_run:
        submission.write(ready, archive)
    passed, skipped = len(report.having("ok")), len(report.having("skipped"))
    done = "  (not written)" if dry_run else ""
    lines = [
        f"checks  {passed} passed, {skipped} not applicable; no secrets found",
        *found,
        f"archive {ready.archive}  {ready.archive_bytes:,} bytes, sha256 {ready.archive_sha256}{done}",
        f"text    {ready.text_path}{done}",
        "\nTo send it, type in the root of a checkout:\n",
        *(f"    {line}" for line in ready.commands),
        "\nOr open the pull request in a browser with that text. Then tick the promises that you make.",
    ]
    return cli.Answer({**msgspec.to_builtins(ready), "written": not dry_run}, lines)


def _line(finding: Leak) -> str:
    """Name file, line and kind, never the secret."""
    status = "secret " if finding.secret else "warning"
    return f"{status} {clean(finding.path)}:{finding.line}  {clean(finding.kind)}"
