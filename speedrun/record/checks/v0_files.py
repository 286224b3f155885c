"""V001 to V009: the files are valid and consistent."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from speedrun.base import console, runlog
from speedrun.base.errors import UsageError
from speedrun.record import archive, layout
from speedrun.record.checks.table import Skip, at_most, check, check_run, same
from speedrun.record.layout import SOURCE
from speedrun.record.logged_run import Run
from speedrun.record.reader import Record, read_programs
from speedrun.record.reproduction import runs_problem
from speedrun.record.source import split_source

_MOST_SETTING = 200  #: characters
_SLACK_S = 0.001  #: rounding of sums
#: Control characters except tab and newline, line separators, invisible characters, and those that turn text around.
_HOSTILE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0d\ufeff\uffa0\ufff9-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


@check(
    "V001 every file can be read and is well-formed",
    needs_runs=False,
    why="a file without exactly one reading can mean two things to two readers",
    hint="let `speedrun run` write the files, and do not edit them",
)
def _schema(record: Record) -> Iterator[str]:
    yield from record.malformed


@check_run(
    "V002 the hash chain of each log is unbroken",
    of="runs",
    why="each line carries the digest of the line before, so editing a line breaks the chain",
    hint="restore the log from the machine that wrote it, or run again",
)
def _chain(run: Run, _record: Record) -> Iterator[str]:
    if run.chain_break is not None:
        yield f"line {run.chain_break + 1} does not follow the line before it"


@check(
    "V003 source and programs are those that the runs name",
    why="an examiner runs the programs and reviewers read the source, so both must be those that ran",
    hint="restore source.txt and programs-*.xz, which the run wrote before its clock started",
)
def _hashes(record: Record) -> Iterator[str]:
    if SOURCE in record.refused:
        raise Skip(f"{SOURCE} was not read: see V008")
    try:
        if not split_source(record.raw.get(SOURCE, b"").decode()):
            yield f"{SOURCE}: missing, or without a file; need the source that ran"
    except ValueError as error:
        yield f"{SOURCE}: {error}"
    for run in record.runs:
        yield same(f"{run.folder}: the digest of {SOURCE}", record.source_sha256, run.start.source_sha256)
    for run in record.finished:
        yield same(f"{run.folder}: archives of programs", len(run.of(runlog.Exported)), 1)
    named = {archive.name_of(made.sha256): made for run in record.runs for made in run.of(runlog.Exported)}
    if len(named) > 1:
        yield f"runs name different programs: {', '.join(sorted(named))}"
    for name, made in named.items():
        raw = record.raw.get(name)
        if raw is None or (layout.sha256(raw), len(raw)) != (made.sha256, made.num_bytes):
            yield f"{name}: missing, or not the programs that a run names"
            continue
        try:
            steps = {len(one.steps) for one in read_programs(raw).platforms.values()}
            yield same(f"{name}: numbers of steps", steps, {record.reference_run.start.num_steps})
        except UsageError as error:
            yield f"{name}: {error}"
    unnamed = [name for name in record.raw if archive.NAME.fullmatch(name) and name not in named]
    yield from (f"{name}: no run names it" for name in unnamed)


@check_run(
    "V005 one config, and its hash is right",
    of="runs",
    why="runs with different settings are different experiments, whose mean has no meaning",
    hint="make one record for each config; its runs differ only in their seeds",
)
def _config(run: Run, record: Record) -> Iterator[str]:
    start, config, first = run.start, run.start.config, record.runs[0].start
    recipe = config.get("recipe")
    stated = (recipe.get("name"), recipe.get("revision")) if isinstance(recipe, dict) else ()
    for name in ("num_devices", "microbatches", "replicas"):
        if type(number := config.get(name, 1)) is not int:
            yield f"{name} in its config is {number!r}, need a whole number"
    yield same("the recipe in its config", stated, (start.recipe, start.recipe_revision))
    yield same("the hash of its config", layout.config_sha256(config), start.config_sha256)
    for name, text in start.overrides.items():
        if name != "size" and not _has(recipe, name, text):  # a size stands for many settings
            yield f"its config does not have its setting {console.clean(f'{name}={text}', limit=80)}"
    ours, theirs = (layout.config_sha256({"": [one.config, one.overrides]}) for one in (start, first))
    yield same(f"the hash of config and overrides, as in {record.runs[0].folder}", ours, theirs)


def _has(recipe: Any, name: str, text: str) -> bool:
    """Say whether a recipe in a log, which is untrusted, has the value of a setting."""
    for part in name.split("."):
        parts = {str(i): one for i, one in enumerate(recipe)} if isinstance(recipe, list) else recipe
        recipe = parts.get(part) if isinstance(parts, dict) else None
    try:
        value = ast.literal_eval(text[:_MOST_SETTING])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
    return recipe in (text, list(value) if isinstance(value, tuple) else value)


@check(
    "V006 the track is known, to the byte",
    why="a rule is never changed in place, so a track file with another digest is another track",
    hint="validate with the version of speedrun that made the record",
)
def _known_track(record: Record) -> Iterator[str]:
    if record.track is None:
        named = sorted({f"{run.start.track} ({run.start.track_sha256[:8]})" for run in record.runs})
        yield f"the runs name {', '.join(named)}; this version has no such track with that digest"


@check_run(
    "V007 the log of a finished run is consistent",
    of="finished",
    why="its end repeats what its beginning says, and both must describe the same run",
    hint="restore the log from the machine that wrote it, or run again",
)
def _consistent(run: Run, _record: Record) -> Iterator[str]:
    (begun,), end = run.of(runlog.DataReady), run.end
    scored_ns = [line.t_mono_ns for line in run.lines if isinstance(line.event, runlog.Val)]
    span_s = (scored_ns[-1] - run.lines[0].t_mono_ns) / 1e9
    val = run.data.val_shard.name, run.data.val_sha256
    yield same("validation data at its end", val, (begun.val_shard, begun.val_sha256))
    yield same("seconds of compilation", end.compile_s, _seconds(run.of(runlog.Compile)), _SLACK_S)
    yield same("seconds of validation", end.val_s, _seconds(run.vals), _SLACK_S)
    yield at_most("seconds between its lines", span_s, end.cold_wall_s)
    yield at_most("seconds of waiting for data", end.data_wait_s, run.train_time_s)
    yield from _unlike_steps(run)
    yield same("errors", [console.clean(error.kind) for error in run.of(runlog.Error)], [])
    if not (run.final_hash and (end.first_batch_sha256 or not run.steps)):
        yield "its end lacks the hash of the final state or of the first batch"


def _unlike_steps(run: Run) -> Iterator[str]:
    """Yield the changes of stage that the inputs of their step and of the one before do not show."""
    inputs = {step.step: step.inputs for step in run.steps}
    for change in run.of(runlog.StageChange):
        before, now = inputs.get(change.step - 1), inputs.get(change.step, {})
        if before is not None:
            changed = {name: new for name, new in now.items() if type(new) is int and new != before.get(name)}
            yield same(f"inputs that change at step {change.step}", change.inputs, changed)


def _seconds(events: list[Any]) -> float:
    return sum(event.seconds for event in events)


@check(
    "V008 only known, plain, small files",
    needs_runs=False,
    why="strangers read a record, so nothing in it may execute, hide, or be too large to review",
    hint="remove everything that the harness did not write",
)
def _plain_files(record: Record) -> Iterator[str]:
    yield from (f"{path}: {why}" for path, why in record.refused.items())
    for path, content in record.raw.items():
        if path.endswith((".md", ".txt", "about.json")) and _HOSTILE.search(content.decode(errors="replace")):
            yield f"{path}: holds control or bidirectional characters"
        if path.endswith(".png") and not content.startswith(b"\x89PNG\r\n\x1a\n"):
            yield f"{path}: is not a PNG image"


@check(
    "V009 a reproduction is of this record, and can be judged",
    why="readers must be able to derive its verdict",
    hint="let `speedrun reproduce RECORD --into-record` write reproduction.json, or remove it",
)
def _reproduced(record: Record) -> Iterator[str]:
    """The numbers of the referee's runs are trusted; the verdict follows from them."""
    stored = record.reproduction
    if stored is None or not record.finished:
        return
    if (stored.record_id, stored.track) != (record.id, record.rules.id):
        yield "reproduction.json: is of another record"
    elif problem := runs_problem(stored, record.finished):
        yield f"reproduction.json: {problem}"
