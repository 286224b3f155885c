"""`speedrun validate`: check every claim of a record, offline."""

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click

from speedrun.base.console import clean
from speedrun.base.errors import UsageError
from speedrun.cli import options as cli
from speedrun.record.reader import need_record
from speedrun.record.validate import Report, find_check, validate

if TYPE_CHECKING:
    from speedrun.record.examine.replay import Which

_COLOURS = {"ok": "green", "failed": "red", "warning": "yellow", "skipped": "bright_black"}


class _WithReplay(cli.Command):
    """Reads a bare `--replay` as `--replay=some`; click would take the record for its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell the option out."""
        if any(pair == ("--replay", "all") for pair in pairwise(args)) and not Path("all").exists():
            raise UsageError("--replay all; write --replay=all")
        return super().parse_args(ctx, ["--replay=some" if word == "--replay" else word for word in args])


@cli.new_command(
    "speedrun validate records/smoke-cpu/2026-11-25-first",
    "speedrun validate --explain V104",
    cls=_WithReplay,
)
@click.argument("records", metavar="RECORD...", type=cli.PATH, nargs=-1)
@cli.flag("--strict", "Treat warnings as failures.")
@cli.option("--explain ID", str, "Say what one check demands, why, and what to do; then stop.")
@cli.option(
    "--replay [=all]",
    click.Choice(["some", "all"]),
    "Also check V601 to V609 on two runs, =all: on every run. Runs its programs in a sandbox, not its source.",
)
@cli.flag("--relower", "Also check V610: run its source in a sandbox, and see whether it makes its programs.")
@cli.option("--nonce HEX", str, "With --replay: seed of what is drawn. Default: random.")
@cli.option(
    "--checkpoints DIR",
    cli.PATH,
    "With --replay: checkpoints of one run. A run without them is trained again in full.",
    multiple=True,
)
@cli.flag("-v/--verbose", "Also show checks that passed or were skipped.")
@cli.unsafe_option
@cli.data_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    records: tuple[Path, ...],
    strict: bool,
    explain: str | None,
    replay: "Which | None",
    relower: bool,
    nonce: str | None,
    checkpoints: tuple[Path, ...],
    data: Path | None,
    unsafe: bool,
    verbose: bool,
) -> cli.Answer:
    """Check every claim of the records in the folders RECORD.

    Reads only: no network, no accelerator, and nothing of a record's source is executed without --relower. Exits
    with 0 if all records are good, else with 1.
    """
    if explain is not None:
        return _explain(explain)
    if not records:
        raise UsageError("no record given; name the folder that holds its source.txt")
    reports = {str(need_record(record)): validate(record, strict=strict) for record in records}
    if replay or relower:
        from speedrun.record.examine.replay import Options, checked_nonce, examined, relowered

        options = Options(replay or "some", checked_nonce(nonce), checkpoints, data, unsafe)
        echo = sys.stderr if ctx.params["as_json"] else sys.stdout
        for asked, judge in ((replay, examined), (relower, relowered)):
            if asked:
                reports = {path: judge(Path(path), one, options, echo) for path, one in reports.items()}
    exit_code = max(report.exit_code for report in reports.values())
    facts = {path: report.facts() for path, report in reports.items()}
    lines = []
    for path, report in reports.items():
        lines += [clean(path)] if len(reports) > 1 else []
        lines += _lines(report, verbose=verbose)
    told = {"exit_code": exit_code, "records": facts} if len(facts) > 1 else facts.popitem()[1]
    return cli.Answer(told, lines, exit_code)


def _explain(id: str) -> cli.Answer:
    check = find_check(id)
    told = {name: getattr(check, name) for name in ("id", "severity", "title", "why")}
    lines = [f"{check.id}  {check.title} ({check.severity})", f"why   {check.why}", f"fix   {check.hint}"]
    return cli.Answer({**told, "fix": check.hint}, lines)


def _lines(report: Report, *, verbose: bool) -> Iterator[str]:
    for result in report.shown(verbose=verbose):
        status = click.style(f"{result.status:<8}", fg=_COLOURS[result.status])
        fix = [f"fix: {result.check.hint}"] if result.status in ("failed", "warning") else []
        lines = [f"{status} {result.check.id}  {result.check.title}", *result.messages, *fix]
        yield f"\n{' ' * 15}".join(lines)
    yield report.verdict + ("" if verbose else " (-v shows all)")
