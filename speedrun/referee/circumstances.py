"""Compares what a record names with this machine, before anything of the record is executed."""

from collections.abc import Iterator
from pathlib import Path

from speedrun.ground import provenance, runlog
from speedrun.ground.console import clean
from speedrun.ground.errors import UsageError
from speedrun.ledger.format import BATCH
from speedrun.ledger.record import Record, load
from speedrun.ledger.reproduction import Point, point
from speedrun.ledger.run import READS_OLDER
from speedrun.ledger.validate import validate

_LOG = "speedrun/ground/runlog.py"


def read(folder: Path) -> Record:
    """Read a record that can be run again: complete, of a known track, with a finished run that has a loss and a time.

    Raises:
        UsageError: if it is not; says why, and what to do.
    """
    record = load(folder)
    runs, problem = record.finished, ""
    if not record.whole or (BATCH in record.raw and record.declaration is None):
        problem = "cannot be read as a record"
    elif record.track is None:
        problem = (
            f"ran under {record.lead.start.track}, which this version does not know; get the newest speedrun"
        )
    elif not runs:
        problem = "no run finished, so there is no result to reproduce"
    elif any(run.vals[-1].tokens <= 0 or run.train_time_s <= 0 for run in runs):
        problem = "a finished run scored no tokens or took no time, so there is nothing to compare with"
    if problem:
        raise UsageError(f"{folder}: {clean(problem)}; 'speedrun validate {folder}' says what is wrong")
    return record


def require_our_logs(record: Record) -> None:
    """Refuse a record whose source writes logs that this version cannot read: it would run for nothing.

    Raises:
        UsageError: naming the commit that can.
    """
    if f"\nFORMAT = {runlog.FORMAT}\n" not in record.source_files.get(_LOG, ""):
        raise UsageError(
            f"{record.root}: its source writes an older format of logs; nothing was executed; commit {READS_OLDER} has "
            "a speedrun that reads them, and runs it again"
        )


def points(record: Record) -> Iterator[Point]:
    """Compare checks, packages and lock files. The record's own source and flags are used in any case."""
    failed = ", ".join(result.check.id for result in validate(record.root).having("failed"))
    here = f"{failed} failed" if failed else "all pass"
    yield point("checks", "all pass", here, lost="the record's own claims")
    theirs, software = record.lead.preflight, provenance.software()
    for name in {**theirs.software, **software}:
        if theirs.platform == "cpu" and provenance.FOR_GPUS.fullmatch(name):
            continue  # a compiler that CPUs do not use
        on_bits = name in ("python", "numpy", "optax")
        lost = "equal bits" if on_bits else "equal bits and equal times"
        yield point(name, theirs.software.get(name, "none"), software.get(name, "none"), lost=lost)
    ours, lost = provenance.lock(), "the same packages"
    if theirs.commit:
        lost += f"; commit {theirs.commit[:12]} installs them"
    locks = (f"{theirs.lock} {theirs.lock_sha256[:16]}", f"{ours.name} {ours.sha256[:16]}")
    yield point("lock", *(lock.strip() or "none" for lock in locks), lost=lost)
