"""V001 to V009: the files are what they say, and say the same thing."""

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
from speedrun.ledger.reproduction import concluded, runs_problem
from speedrun.ledger.run import Run

#: Control characters but tab and newline, and all that turn the direction of text.
_HOSTILE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
_ACTIVE_SVG = re.compile(
    rb"<\s*(script|foreignObject|iframe|image|a)\b|\son\w+\s*=|javascript:", re.IGNORECASE
)


#: From the name that a run gives itself to the first line of its log.
_BEGINNING_S = 60.0


@check(
    "V001",
    "every file can be read and has its form",
    needs=(),
    why="a file that cannot be read in exactly one way can say two things to two readers",
    hint="let the harness write the files: `speedrun run` makes them, nobody edits them",
)
def schema(record: Record) -> Iterator[str]:
    """Unknown keys, other spacing, a key twice, NaN, events out of order: all end up here."""
    yield from record.malformed


@check(
    "V002",
    "the hash chain of each log is unbroken",
    why="each line carries the digest of the line before, so a line edited later breaks the chain there",
    hint="restore the log from where the run wrote it, or run again",
)
def chain(record: Record) -> Iterator[str]:
    """`prev` of each line is the digest of the line before, and `i` counts."""
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
    why="the source text is what replay executes and reviewers read: it must be the one that ran",
    hint="restore the files, or assemble the record again",
)
def hashes(record: Record) -> Iterator[str]:
    """Every digest of the record: of files, of the source text and its parts, of the manifest itself."""
    manifest = record.manifest
    assert manifest is not None
    try:
        source = derive_source(record.raw)
    except runfile.FormatError as error:
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
    why="numbers that people read are worth nothing unless the logs give them again",
    hint="assemble the record again; never edit derived numbers",
)
def derived(record: Record) -> Iterator[str]:
    """Everything derived is derived again. `target_reached` has its own check, V310."""
    stored, summary = record.manifest, record.summary
    assert stored is not None
    assert summary is not None
    manifest = derive_manifest(
        record.runs, stored.about, stored.batch.declared_runs, stored.source, stored.files
    )
    manifest = msgspec.structs.replace(manifest, record_id=stored.record_id)
    yield from _differences("manifest.json", stored, manifest)
    again = derive_summary(record.runs, record.rules, record.declaration)
    again = msgspec.structs.replace(again, target_reached=summary.target_reached)
    yield from _differences("summary.json", summary, again)
    if not record.raw.get("README.md", b"").startswith(readme_head(stored, summary, record.runs).encode()):
        yield "README.md: its head is not the generated one"


@check(
    "V005",
    "one config, and its hash is right",
    why="runs with different settings are different experiments, and their mean says nothing",
    hint="make one record for each config; only the seeds of its runs differ",
)
def config(record: Record) -> Iterator[str]:
    """The resolved config stands in the log; its digest in the log and in run.json."""
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
    """A rule is never changed in place, so another digest is another rule."""
    if record.track is None:
        named = sorted({f"{run.start.track} ({run.start.track_sha256[:8]})" for run in record.runs})
        yield f"the runs name {', '.join(named)}; this version has no one track that is the same file"


@check(
    "V007",
    "run.json, metrics.jsonl and log.txt agree",
    why="people read log.txt and programs read metrics.jsonl; both must tell the same run",
    hint="restore run.json and log.txt: the run writes both from its log",
)
def one_story(record: Record) -> Iterator[str]:
    """The text log is rendered again; what run.json shares with the log is compared."""
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
            yield f"{run.folder}: run.json says it finished, the log tells of {console.clean(errors[0].kind)}"


def _shared_facts(run: Run) -> Iterator[tuple[str, object, object]]:
    """Name, value in run.json, value in the log."""
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
    why="a record is read by strangers: nothing in it may run, hide, or be too large to review",
    hint="take out everything the harness did not write",
)
def plain_files(record: Record) -> Iterator[str]:
    """Nothing that runs, hides or surprises: no links, binaries, scripts, terminal codes or turned text."""
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
    "a reproduction is of this record, and says what its runs say",
    needs=("runs", "manifest", "track"),
    why="whoever reads that a record holds must be able to compute it again",
    hint="let `speedrun reproduce RECORD --into-record` write reproduction.json, or take it out",
)
def reproduced(record: Record) -> Iterator[str]:
    """Differences and verdict are derived again; the runs themselves are the referee's word."""
    stored, manifest = record.reproduction, record.manifest
    assert manifest is not None
    if stored is None or not record.finished:
        return
    if (stored.record_id, stored.track) != (manifest.record_id, manifest.track.id):
        yield "reproduction.json: is of another record"
        return
    if problem := runs_problem(stored, record.finished):
        yield f"reproduction.json: {problem}"
        return
    yield from _differences(
        "reproduction.json", stored, concluded(stored, record.finished, record.rules.target.sigma)
    )


def _differences(place: str, stored: object, again: object) -> Iterator[str]:
    """A line for each leaf that differs between what is stored and what was derived again."""
    old, new = msgspec.to_builtins(stored), msgspec.to_builtins(again)
    yield from _walk(place, old, new)


def _walk(place: str, old: object, new: object) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _walk(f"{place}.{key}", old.get(key), new.get(key))
    elif old != new:
        yield f"{place}: stored {old!r}, derived {new!r}"
