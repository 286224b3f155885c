"""Compares what a record names with this machine, before anything of the record is executed."""

from collections.abc import Callable, Iterator
from pathlib import Path

from speedrun.ground import provenance, runlog
from speedrun.ground.console import clean
from speedrun.ground.errors import DataError, UsageError
from speedrun.ledger import decoding, history
from speedrun.ledger.record import Record, load
from speedrun.ledger.reproduction import REPRODUCTION, Point, point
from speedrun.ledger.validate import validate

_BITS = "equal bits"
_TIMES = "equal bits and equal times"


def read(folder: Path) -> Record:
    """Read a record that can be run again: complete, of a known track, with a finished run that has a loss and a time.

    Raises:
        UsageError: if it is not; says why, and what to do.
    """
    record = load(folder)
    for path, raw in record.raw.items():
        # An earlier reproduction has no say in this one.
        if path.endswith(".json") and path != REPRODUCTION and (problem := decoding.newer(raw)):
            raise UsageError(f"{folder / path}: {clean(problem)}")
    if not record.whole:
        raise UsageError(
            f"{folder}: cannot be read as a record; 'speedrun validate {folder}' says what is wrong"
        )
    if record.track is None:
        raise UsageError(
            f"{folder}: ran under {clean(record.lead.start.track)}, in a version that is not known here; "
            "get the newest speedrun, or the one that made the record"
        )
    if not record.finished:
        raise UsageError(
            f"{folder}: no run finished, so there is no result to reproduce; choose another record"
        )
    if any(run.vals[-1].tokens <= 0 or run.train_time_s <= 0 for run in record.finished):
        raise UsageError(
            f"{folder}: a finished run scored no tokens or took no time, so there is nothing to compare with; "
            f"'speedrun validate {folder}' says what is wrong"
        )
    if {run.start.source_sha256 for run in record.runs} != {record.source_sha256} or not record.source_files:
        raise UsageError(
            f"{folder}/source.txt is not the source that the runs name, its sha256 is {record.source_sha256[:16]}; "
            f"nothing was executed; 'speedrun validate {folder}' says what is wrong"
        )
    return record


def points(record: Record, data: Path | None, report: Callable[[int, int], None]) -> tuple[Point, ...]:
    """Compare what can be compared before anything runs.

    Args:
        record: to be run again.
        data: folder of shards; None: the track's own.
        report: called with the bytes of data that were read and those there are.

    Raises:
        DataError: if a shard is missing or another one.
    """
    read = _data(record, data, report)
    return (
        _checks(record),
        _tree(record),
        *_packages(record),
        _lock(record),
        point("flags", _flags(record), f"{_flags(record)}, passed on", equal=True),
        read,
    )


def _checks(record: Record) -> Point:
    """A record that fails its checks can be run all the same; its own claims are then worth less."""
    failed = ", ".join(result.check.id for result in validate(record.root).having("failed"))
    here = f"{failed} failed" if failed else "all pass"
    return point("checks", "all pass", here, lost="the record's own claims")


def _tree(record: Record) -> Point:
    """Compare the source with this checkout; since the record's own is run in any case, they count as equal."""
    files = record.source_files
    here = history.files_here(files)
    differ = sum(text.encode() != here.get(path) for path, text in files.items())
    named = f"{len(files)} files, sha256 {record.source_sha256[:16]}"
    other = f"; {differ} of them differ in this checkout" if differ else ""
    return point("source", named, f"the record's own{other}", equal=True)


def _packages(record: Record) -> Iterator[Point]:
    """Compare the versions of Python, packages and image."""
    here, hw = provenance.software(), record.lead.preflight
    for name in {**hw.software, **here}:
        if hw.platform == "cpu" and provenance.FOR_GPUS.fullmatch(name):
            continue  # a compiler that CPUs do not use
        lost = _BITS if name in ("python", "numpy", "optax") else _TIMES
        yield point(name, hw.software.get(name, "none"), here.get(name, "none"), lost=lost)


def _lock(record: Record) -> Point:
    """Compare the lock files, and name the commit that has the record's."""
    (preflight,) = record.finished[0].of(runlog.Preflight)
    here = provenance.lock()
    recorded = f"{preflight.lock} {preflight.lock_sha256[:16]}".strip() or "none"
    wanted = (
        f"the same packages; commit {preflight.commit[:12]} installs them"
        if preflight.commit
        else "the same packages"
    )
    return point("lock", recorded, f"{here.name} {here.sha256[:16]}".strip() or "none", lost=wanted)


def _flags(record: Record) -> str:
    return (
        " ".join(f"{name}={value}" for name, value in sorted(record.lead.preflight.environment.items()))
        or "none"
    )


def _data(record: Record, data: Path | None, report: Callable[[int, int], None]) -> Point:
    """Compare the shards that the runs read byte by byte; synthetic ones are generated when the source runs."""
    from speedrun.data import inventory

    rules, read = record.rules, record.lead.data
    shards = {shard.name: shard.sha256 for shard in (*read.shards, read.val_shard)}
    recorded = f"{len(shards)} shards"
    if data is None and rules.synthetic is not None:
        return point("data", recorded, "generated, compared after each run", equal=True)
    folder = inventory.data_folder(rules, data)
    paths = {folder / Path(name).name: wanted for name, wanted in shards.items()}
    total, done = sum(path.stat().st_size for path in paths if path.is_file()), 0
    for path, wanted in paths.items():
        report(done, total)
        _check_shard(path, wanted, rules.data.get)
        done += path.stat().st_size
    return point("data", recorded, "the same, every byte", equal=True)


def _check_shard(path: Path, wanted: str, get: str) -> None:
    from speedrun.data.shards import sha256

    try:
        found = sha256(path)
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; the record read one with sha256 {wanted[:16]}; {get}"
        ) from None
    if found != wanted:
        raise DataError(
            f"{path}: sha256 is {found[:16]}, the record read one with {wanted[:16]}; nothing was executed; {get}"
        )
