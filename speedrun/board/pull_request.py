"""The text of a pull request for a record: facts from its logs, and what no program can check.

Every word of a record is a stranger's. In a code span none of them is a mention, a link, a reference or markup.
"""

import re
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from speedrun.board.standings import standing_of
from speedrun.ground.console import clean, quantity
from speedrun.ledger.assemble import derive_summary
from speedrun.ledger.format import Manifest
from speedrun.ledger.record import Record
from speedrun.ledger.validate import Report

_LONGEST = 200  #: characters of a stranger's text

#: RULES.md in the words of whoever submits: what no check can see.
PROMISES = (
    "Every run that was begun for this record is in it, also those that failed.",
    "No seed, no number of steps and no run was chosen by its loss.",
    "Nothing that was learned before was loaded, and no training token was read before the clock.",
    "The validation text was scored and used for nothing else.",
    "`changes` names all that differs from the parent, and the lines it adds are worth their price.",
    "What I took from others is credited, and its licence allows it.",
)


def literal(text: str) -> str:
    """A stranger's text as Markdown that shows its very characters: one line, a code span."""
    shown = clean(text, limit=_LONGEST)
    if not shown.strip():
        return "(empty)"
    # A span may hold shorter rows of backticks than the ones around it, and loses one space at either end.
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    pad = " " if shown[0] in " `" or shown[-1] in " `" else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def cell(text: str) -> str:
    """The same in a table, where a bar ends a cell even inside a code span."""
    return literal(text).replace("|", r"\|")


def title(record: Record, place: str) -> str:
    """One line of our own words; a subject may close issues, so no stranger's text is in it."""
    done = record.finished
    time_s, loss = fmean(run.train_time_s for run in done), fmean(run.val_loss for run in done)
    target = record.rules.target.loss
    missed = f", missed {target:g}" if loss > target else ""
    return f"Record {place}: {time_s:.2f} s at {loss:.4f}, n = {len(done)}{missed}"


def text(record: Record, manifest: Manifest, report: Report, archive: Sequence[str]) -> str:
    """The whole text, as Markdown.

    Args:
        record: with at least one finished run of a known track.
        manifest: of the record.
        report: of all checks.
        archive: name, bytes and digest of what was packed, as words.
    """
    changes = "\n".join(f"- {literal(change)}" for change in manifest.about.changes)
    ids = {
        status: ", ".join(result.check.id for result in report.having(status)) for status in ("ok", "skipped")
    }
    blocks = [
        literal(manifest.about.title),
        _table([*_results(record, manifest, report), *_facts(manifest), ("archive", ", ".join(archive))]),
        f"## What changed\n\n{changes or 'Nothing is named.'}",
        "## Rules",
        f"- [x] `speedrun validate --strict` passes: {ids['ok']}\n"
        f"- [x] Not asked of such a record: {ids['skipped'] or 'none'}\n"
        "- [x] No file holds anything that looks like a secret",
        "For whoever submits to tick; no check can see it:",
        "\n".join(f"- [ ] {promise}" for promise in PROMISES),
    ]
    return "\n\n".join(blocks) + "\n"


def _results(record: Record, manifest: Manifest, report: Report) -> list[tuple[str, str]]:
    """What was measured, computed again from the logs."""
    done, rules = record.finished, record.rules
    summary = derive_summary(record.runs, rules, record.declaration)
    test, broken = summary.test, summary.num_runs - summary.num_finished
    proof = "none: no declared batch that has come to its test"
    if test is not None:
        proof = f"p = {test.p:.2g} by {test.rule}, need less than {test.alpha:g}: {'' if test.passed else 'not '}proven"
    return [
        ("track", cell(rules.id)),
        ("status", standing_of(record, report)),
        ("runs", f"n = {len(done)} finished of {manifest.batch.declared_runs} declared; {broken} broke off"),
        ("validation loss", _spread([run.val_loss for run in done], "nats per token", 4)),
        ("target", f"{rules.target.loss:g}, {'reached' if summary.target_reached else 'not reached'}"),
        ("test of the mean", proof),
        ("train time", _spread([run.train_time_s for run in done], "s", 2)),
        ("cold wall time", _spread([run.end.cold_wall_s for run in done], "s", 1)),
        ("steps, tokens", f"{summary.num_steps:,}, {summary.num_tokens:,}"),
    ]


def _spread(numbers: Sequence[float], unit: str, digits: int) -> str:
    sd = f" (sd {stdev(numbers):.{digits}f})" if len(numbers) > 1 else " (one run, no sd)"
    return f"{fmean(numbers):.{digits}f} {unit}{sd}"


def _facts(manifest: Manifest) -> list[tuple[str, str]]:
    """What it ran on and what ran: the record's own words, which the checks compare with its logs."""
    hardware, recipe, about = manifest.hardware, manifest.recipe, manifest.about
    matmul = quantity(hardware.matmul_gflops * 1e9, "flop/s")
    changed = "".join(f", {cell(f'{key}={value}')}" for key, value in recipe.overrides.items())
    return [
        ("hardware", f"{hardware.num_devices} x {cell(hardware.device_kind)}, matmul {matmul}"),
        ("versions", cell(", ".join(f"{name} {version}" for name, version in manifest.software.items()))),
        ("recipe", f"{cell(recipe.name)}, revision {recipe.revision}{changed}"),
        ("source", f"{manifest.source.lines:,} lines, {cell(manifest.source.sha256)}"),
        ("parent", cell(about.parent_record) if about.parent_record else "none"),
        ("authors", cell(", ".join(about.authors)) if about.authors else "not named"),
        ("record id", cell(manifest.record_id)),
    ]


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
