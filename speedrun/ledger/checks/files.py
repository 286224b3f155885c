"""V001 to V009: the files are valid and consistent."""

import re
from collections.abc import Iterator
from datetime import datetime

import msgspec

from speedrun.ground import console, runlog
from speedrun.ledger import format, runfile
from speedrun.ledger.assemble import (
    derive_files,
    derive_manifest,
    derive_source,
    derive_summary,
    readme_head,
)
from speedrun.ledger.checks.table import check
from speedrun.ledger.record import Record
from speedrun.ledger.reproduction import runs_problem
from speedrun.ledger.run import Run

#: Control characters but tab and newline, and all that change the direction of text.
_HOSTILE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
_ACTIVE_SVG = re.compile(
    rb"<\s*(script|foreignObject|iframe|image|a)\b|\son\w+\s*=|javascript:", re.IGNORECASE
)


#: Between the creation of a run and the first line of its log.
_BEGINNING_S = 60.0


@check(
    "V001",
    "every file can be read and is well-formed",
    needs=(),
    why="a file without exactly one reading can mean two things to two readers",
    hint="let `speedrun run` write the files, and do not edit them",
)
def schema(record: Record) -> Iterator[str]:
    """Reports unknown and repeated keys, other spacing, NaN, and events out of order."""
    yield from record.malformed


@check(
    "V002",
    "the hash chain of each log is unbroken",
    why="each line carries the digest of the line before, so that editing a line breaks the chain",
    hint="restore the log from where the run wrote it, or run again",
)
def chain(record: Record) -> Iterator[str]:
    """`prev` of each line is the digest of the line before, and `i` is its number."""
    for run in record.runs:
        prev = runlog.GENESIS
        for number, (raw, line) in enumerate(zip(run.raw_lines, run.lines, strict=True)):
            if (line.i, line.prev) != (number, prev):
                yield f"{run.folder}: line {number + 1} does not follow the line before it"
                break
            prev = runlog.digest(raw)


@check(
    "V003",
    "source and files are the ones the manifest names",
    needs=("runs", "manifest", "source"),
    why="replay executes and reviewers read the source text, so it must be the one that ran",
    hint="restore the files, or assemble the record again",
)
def hashes(record: Record) -> Iterator[str]:
    """Compare every digest: of files, of the source text and its parts, and of the manifest."""
    manifest = record.manifest
    assert manifest is not None
    try:
        source = derive_source(record.raw)
    except format.FormatError as error:
        yield str(error)
        return
    yield from _differences("manifest.json: source", manifest.source, source)
    yield from _differences("manifest.json: files", manifest.files, derive_files(record.raw))
    for run in record.runs:
        if {run.file.source_sha256, run.start.source_sha256} != {source.sha256}:
            yield f"{run.folder}: ran other sources than source.txt"
    if manifest.record_id != format.record_id(manifest):
        yield "manifest.json: record_id is not the hash of its content"


@check(
    "V004",
    "manifest, summary and README follow from the runs",
    needs=("runs", "manifest", "summary", "track"),
    why="people read these numbers, so they must follow from the logs",
    hint="assemble the record again; never edit derived numbers",
)
def derived(record: Record) -> Iterator[str]:
    """Derive everything again. V310 checks `target_reached`."""
    stored, summary = record.manifest, record.summary
    assert stored is not None
    assert summary is not None
    manifest = derive_manifest(
        record.runs, stored.about, stored.batch.declared_runs, stored.source, stored.files
    )
    manifest = msgspec.structs.replace(manifest, record_id=stored.record_id)
    yield from _differences("manifest.json", stored, manifest)
    expected = derive_summary(record.runs, record.rules, record.declaration)
    expected = msgspec.structs.replace(expected, target_reached=summary.target_reached)
    yield from _differences("summary.json", summary, expected)
    if not record.raw.get("README.md", b"").startswith(readme_head(stored, summary, record.runs).encode()):
        yield "README.md: its head is not the generated one"


@check(
    "V005",
    "one config, and its hash is right",
    why="runs with different settings are different experiments, whose mean has no meaning",
    hint="make one record for each config; its runs differ only in their seeds",
)
def config(record: Record) -> Iterator[str]:
    """Compare the config in the log with its digests in the log and in run.json."""
    for run in record.runs:
        stated = {run.start.config_sha256, run.file.config_sha256}
        if stated != {runfile.config_sha256(run.start.config)}:
            yield f"{run.folder}: config_sha256 is not the hash of the config in the log"
    if len({runfile.config_sha256(run.start.config) for run in record.runs}) > 1:
        yield "the runs have different configs"


@check(
    "V006",
    "the track is known, to the byte",
    why="a rule is never changed in place, so a track file with another digest is another track",
    hint="validate with the version of speedrun that made the record",
)
def known_track(record: Record) -> Iterator[str]:
    """All runs name one track of this version, with its digest."""
    if record.track is None:
        named = sorted({f"{run.start.track} ({run.start.track_sha256[:8]})" for run in record.runs})
        yield f"the runs name {', '.join(named)}; this version has no such track with that digest"


@check(
    "V007",
    "run.json, metrics.jsonl and log.txt agree",
    why="people read log.txt and programs read metrics.jsonl, so both must describe the same run",
    hint="restore run.json and log.txt: the run writes both from its log",
)
def one_story(record: Record) -> Iterator[str]:
    """Render the text log again, and compare run.json with the log."""
    for run in record.runs:
        if console.render(run.lines) != run.text:
            yield f"{run.folder}: log.txt is not the text of metrics.jsonl"
        for name, stated, logged in _shared_facts(run):
            if stated != logged:
                yield f"{run.folder}: run.json says {name} {stated!r}, the log {logged!r}"
        apart_s = abs((run.begun - datetime.fromisoformat(run.file.created_utc)).total_seconds())
        if apart_s > _BEGINNING_S:
            yield f"{run.folder}: run.json says it began {run.file.created_utc}, the log {run.lines[0].t_utc}"
        if run.finished and (errors := run.of(runlog.Error)):
            yield f"{run.folder}: run.json says it finished, the log has {console.clean(errors[0].kind)}"


def _shared_facts(run: Run) -> Iterator[tuple[str, object, object]]:
    """Yield the name, the value in run.json and the value in the log of each shared fact."""
    file = run.file
    yield "run_id", file.run_id, run.start.run_id
    yield "folder", file.run_id, run.folder
    yield "seed", file.seed, run.start.seed
    yield "recipe", file.recipe, run.start.recipe
    for hw in run.of(runlog.Preflight):
        yield "platform", file.platform, hw.platform
        yield "device_kind", file.device_kind, hw.device_kind
        yield "num_devices", file.num_devices, hw.num_devices
        yield "software", file.software, hw.software
        yield "environment", file.environment, hw.environment
    for data in run.of(runlog.DataReady):
        yield "val_shard", file.data.val_shard.name, data.val_shard
        yield "val_sha256", file.data.val_sha256, data.val_sha256
    for step in run.steps[:1]:
        yield "first_loss", file.first_loss, step.loss.hex()
    for end in run.of(runlog.RunEnd):
        yield "outcome", file.outcome, end.status
        yield "final_hash", file.final_hash, end.final_hash
        yield "peak_bytes", file.peak_bytes, end.peak_bytes


@check(
    "V008",
    "only known, plain, small files",
    needs=(),
    why="strangers read a record, so nothing in it may execute, hide, or be too large to review",
    hint="remove everything that the harness did not write",
)
def plain_files(record: Record) -> Iterator[str]:
    """Report links, binaries, scripts, terminal codes and bidirectional text."""
    yield from (f"{path}: {why}" for path, why in record.refused.items())
    for path, content in record.raw.items():
        if path.endswith((".md", "source.txt")) and _HOSTILE.search(content.decode(errors="replace")):
            yield f"{path}: holds control or bidirectional characters"
        if path.endswith(".svg") and _ACTIVE_SVG.search(content):
            yield f"{path}: holds a script or a link"
        if path.endswith(".png") and not content.startswith(b"\x89PNG\r\n\x1a\n"):
            yield f"{path}: is not a PNG image"


@check(
    "V009",
    "a reproduction is of this record, and can be judged",
    needs=("runs", "manifest", "track"),
    why="readers must be able to derive its verdict",
    hint="let `speedrun reproduce RECORD --into-record` write reproduction.json, or remove it",
)
def reproduced(record: Record) -> Iterator[str]:
    """Check that a verdict follows from its runs; their results are taken from the referee."""
    stored, manifest = record.reproduction, record.manifest
    assert manifest is not None
    if stored is None or not record.finished:
        return
    if (stored.record_id, stored.track) != (manifest.record_id, manifest.track.id):
        yield "reproduction.json: is of another record"
    elif problem := runs_problem(stored, record.finished):
        yield f"reproduction.json: {problem}"


def _differences(place: str, stored: object, derived: object) -> Iterator[str]:
    """Yield a line for each leaf in which a stored file differs from the derived one."""
    old, new = msgspec.to_builtins(stored), msgspec.to_builtins(derived)
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(f"{place}.{key}", old.get(key), new.get(key))
    elif old != new:
        yield f"{place}: stored {old!r}, derived {new!r}"
