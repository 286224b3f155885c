"""The text of a pull request for a record: facts from its logs, and promises that no program can check.

Text from a record is put into code spans, where it cannot become a mention, a link, a reference or markup.
"""

import re
from statistics import fmean

from speedrun.board.standings import standing_of
from speedrun.ground.console import clean, quantity
from speedrun.ledger.assemble import facts
from speedrun.ledger.record import Record
from speedrun.ledger.summary import summarize
from speedrun.ledger.validate import Report

_LONGEST = 200  #: characters of a stranger's text

#: The rules of RULES.md that no check can verify, as promises of whoever submits.
PROMISES = (
    "Every run that was started for this record is in it, including those that failed.",
    "No seed, no number of steps and no run was chosen by its loss.",
    "No trained weights were loaded, and no training token was read before the clock started.",
    "The validation text was used for scoring and for nothing else.",
    "`changes` names every difference from the parent, and the lines it adds are worth their price.",
    "What I took from others is credited, and its licence allows it.",
)


def literal(text: str) -> str:
    """Return a stranger's text as a code span of one line."""
    shown = clean(text, limit=_LONGEST)
    if not shown.strip():
        return "(empty)"
    # A span may hold shorter runs of backticks than those around it. Markdown strips one space at either end.
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    pad = " " if shown[0] in " `" or shown[-1] in " `" else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def cell(text: str) -> str:
    """Return the same for a table, where a bar ends a cell even inside a code span."""
    return literal(text).replace("|", r"\|")


def title(record: Record, place: str) -> str:
    """Return the title. It holds no text of the record: the subject of a commit can close issues."""
    done = record.finished
    time_s, loss = fmean(run.train_time_s for run in done), fmean(run.val_loss for run in done)
    target = record.rules.target.loss
    missed = f", missed {target:g}" if loss > target else ""
    return f"Record {place}: {time_s:.2f} s at {loss:.4f}, n = {len(done)}{missed}"


def text(record: Record, report: Report, archive: str) -> str:
    """Return the text as Markdown; `archive` is name, size and digest of the archive, as words."""
    summary, lead = summarize(record), record.lead
    test, proof = summary.test, "none: no declared batch is complete"
    if test is not None:
        proof = f"p = {test.p:.2g} by {test.rule}, need less than {test.alpha:g}: {'' if test.passed else 'not '}proven"
    rows = [
        *facts(record, summary),
        ("status", standing_of(record, report)),
        ("test of the mean", proof),
        (
            "settings",
            ", ".join(f"{key}={value}" for key, value in lead.start.overrides.items()) or "the recipe's",
        ),
        ("matmul", quantity(lead.preflight.matmul_gflops * 1e9, "flop/s")),
        ("versions", ", ".join(f"{name} {version}" for name, version in lead.preflight.software.items())),
        ("record id", record.id),
        ("archive", archive),
    ]
    changes = "\n".join(f"- {literal(change)}" for change in record.about.changes)
    ids = {
        status: ", ".join(result.check.id for result in report.having(status)) for status in ("ok", "skipped")
    }
    blocks = [
        literal(record.about.title),
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {cell(value)} |" for name, value in rows)]),
        f"## What changed\n\n{changes or 'Nothing is named.'}",
        "## Rules",
        f"- [x] `speedrun validate --strict` passes: {ids['ok']}\n"
        f"- [x] Not applicable to such a record: {ids['skipped'] or 'none'}\n"
        "- [x] No file holds anything that looks like a secret",
        "To be ticked by whoever submits; no check can verify it:",
        "\n".join(f"- [ ] {promise}" for promise in PROMISES),
    ]
    return "\n\n".join(blocks) + "\n"
