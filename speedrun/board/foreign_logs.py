"""Import a file of somebody else's validations: a text log, or a CSV table of many runs.

    step:125/1770 val_loss:4.6539 train_time:12051ms step_avg:96.41ms     modded-nanogpt
    step:125/3350 val_loss:4.66393 train_time:22.870s step_avg:182.95ms   its third track: seconds
    s:250 tel:6.1710                                                      llm.c: no time
    [METRICS (latest)] step: 1674  |  val_loss: 3.275080919265747         modded-nanogpt-jax

A log may begin with the whole text of the script that wrote it, with versions and with the table of nvidia-smi. None
of it is read: a line counts only if it consists of `key:value` words (or fields between bars), the first of which is
the step. Source: the public logs, and the print statements inside them.

    log,step,num_steps,val_loss,train_time_ms

is the head of a table; the lines of a run are adjacent.

The file is not trusted. It is read once, up to a limit that also holds after decompression. Bytes that are not UTF-8
are replaced, names are cleaned before they are shown, and lines that cannot be read are reported by number.

Logs from elsewhere have no seed, no digest of the data and no chain of hashes, so none of them can become a `Record` or
is ever ranked. Losses are nats per token. Times are seconds on the clock of whoever made the log; what that clock
counted is unknown.

Each dialect turns its validations into `Reading`s. The rules for their order are the same for all:

- A loss that is not finite is kept as None and reported.
- A reading that repeats the one before is dropped: a console and a log file may have been joined.
- A step at or below the first step of the run starts the next run. Any other step that does not rise is left out.
- A time that goes back is left out and its loss is kept, except before step 11: the oldest scripts of the speedrun
  restarted their clock after ten steps.
- A run with the same validations as an earlier run of the file is a copy and left out.
"""

import csv
import errno
import gzip
import io
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from speedrun.base.console import clean
from speedrun.base.errors import UsageError, translate_read_errors
from speedrun.base.wholefile import read_regular
from speedrun.record.layout import sha256

MOST_RUNS = 20_000
_MOST_PROBLEMS = 100
_FIRST_STEPS = 11  #: before the clock restarts
_NAME_LIMIT = 200  #: characters
_MOST = 1e12  #: of a loss, of seconds
MAX_BYTES = 32 * 2**20
_GZIP = b"\x1f\x8b"
_LONGEST_LINE = 1000  #: characters; longer lines are source text
#: Short enough to be read.
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,15}(?:\.[0-9]{0,20})?(?:[eE][+-]?[0-9]{1,3})?|nan|inf)")
_WHOLE = re.compile(r"[0-9]{1,12}")
_COLOURS = re.compile(r"\x1b\[[0-9;]{0,20}m")
_MARK = re.compile(r"\s*(?:\[[a-z]+[0-9]{1,4}\]:|\[METRICS[^\]|]{0,40}\])?\s*")
_STEP = re.compile(r"(?:step|s):\s*[0-9]")


class Point(msgspec.Struct, frozen=True, omit_defaults=True):
    """One loss of a curve."""

    step: int  #: steps done
    loss: float | None  #: None where it was not finite
    train_time_s: float | None = None  #: None where the log has none, or one that goes back


class Problem(msgspec.Struct, frozen=True):
    """A line that could not be taken as it is, and what was done with it."""

    line: int  #: from 1
    message: str


class ContextRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run of a source."""

    name: str
    num_steps: int | None  #: planned; the last validation may come earlier
    validations: tuple[Point, ...]
    final_loss: float | None
    train_time_s: float | None  #: at the last validation


class Context(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="schema", tag="speedrun.context/1"):
    """The contents of one file."""

    source: str  #: its name, without folders
    sha256: str  #: of the file, before decompression
    runs: tuple[ContextRun, ...]
    problems: tuple[Problem, ...] = ()  #: the first ones
    num_problems: int = 0  #: all of them


def can_identify(points: Sequence[Point]) -> bool:
    """Whether two runs with these validations are copies; a single loss without a time may be equal by chance."""
    return len(points) > 1 or any(point.train_time_s is not None for point in points)


class Reading(NamedTuple):
    """A validation, as a line of a log has it."""

    line: int
    name: str  #: of its log
    step: int
    num_steps: int | None
    loss: float
    train_time_s: float | None


class Problems:
    """Problems by line: the first hundred, and the number of all."""

    def __init__(self) -> None:
        self.kept: list[Problem] = []
        self.count = 0

    def add(self, line: int, message: str) -> None:
        """Add one; the message may quote the file."""
        self.count += 1
        if len(self.kept) < _MOST_PROBLEMS:
            self.kept.append(Problem(line, clean(message, limit=160)))


def _split(log: Iterable[Reading]) -> Iterator[list[Reading]]:
    """Yield the readings of each run of one log, without repeated ones."""
    run: list[Reading] = []
    for reading in log:
        # NaN is not equal to itself, so texts are compared.
        if run and repr(run[-1][1:]) == repr(reading[1:]):
            continue
        if run and reading.step <= run[0].step:
            yield run
            run = []
        run.append(reading)
    yield run


def _points(run: Sequence[Reading], problems: Problems) -> tuple[Point, ...]:
    """Return the curve of a run."""
    points: list[Point] = []
    reached_s = 0.0
    for line, _, step, _, loss, time_s in run:
        if points and step <= points[-1].step:
            problems.add(line, f"step {step} comes after step {points[-1].step}; left out")
            continue
        if not math.isfinite(loss):
            problems.add(line, f"the loss of step {step} is {loss}")
        if time_s is not None and time_s < reached_s and step > _FIRST_STEPS:
            problems.add(line, f"step {step}: the time goes back from {reached_s} to {time_s} s; left out")
            time_s = None
        points.append(Point(step, loss if math.isfinite(loss) else None, time_s))
        reached_s = reached_s if time_s is None else time_s
    return tuple(points)


def _runs_of(readings: Iterable[Reading], problems: Problems) -> Iterator[ContextRun]:
    """Yield runs in order, with names that are safe to print; the second of a log is called `name#2`."""
    left = MOST_RUNS
    for name, log in groupby(readings, lambda reading: reading.name):
        seen: dict[tuple[Point, ...], int] = {}
        for number, run in enumerate(_split(log), 1):
            if not left:
                problems.add(run[0].line, f"more than {MOST_RUNS:,} runs; the rest is left out")
                return
            left -= 1
            points = _points(run, problems)
            if can_identify(points) and points in seen:
                problems.add(run[0].line, f"run {number} of {name} repeats run {seen[points]}; left out")
                continue
            seen[points] = number
            shown = clean(name if number == 1 else f"{name}#{number}", limit=_NAME_LIMIT)
            planned = [one.num_steps for one in run if one.num_steps is not None]
            num_steps, last = planned[-1] if planned else None, points[-1]
            yield ContextRun(shown, num_steps, points, last.loss, last.train_time_s)


def import_file(path: Path, name: str) -> Context:
    """Return the runs of a text log or a CSV table, either compressed by gzip or not.

    `name` is that of a text log's run; a table names its own.

    Raises:
        UsageError: the file cannot be read, is larger than 32 MiB, or holds no curve.
    """
    advice = "need a text log or a CSV of curves"
    with translate_read_errors(clean(str(path)), advice, EOFError, zlib.error, kind=UsageError):
        raw = read_regular(path, MAX_BYTES)
        inflated = _inflated(raw)
    context = import_bytes(inflated, name, source=path.name, digest=sha256(raw))
    if not context.runs:
        first = next(iter(context.problems), None)
        why = f" (line {first.line}: {first.message})" if first else ""
        raise UsageError(
            f"{clean(str(path))} holds no line of a known log{why}; need lines like 'step:125/1770 val_loss:4.6539 "
            "train_time:12051ms', or a CSV with columns log,step,val_loss"
        )
    return context


def import_bytes(raw: bytes, name: str, *, source: str, digest: str) -> Context:
    """Return the runs of uncompressed bytes; there may be none."""
    problems = Problems()
    text = raw.decode("utf-8-sig", errors="replace")
    head = text[:200].partition("\n")[0].strip().split(",")
    if {"log", "step", "val_loss"} <= {*head}:
        readings = _readings_of_table(text, problems)
    else:
        readings = _readings_of_log(text, name, problems)
    runs = tuple(_runs_of(readings, problems))
    kept = sorted(problems.kept, key=lambda problem: problem.line)
    return Context(clean(source, limit=200), digest, runs, tuple(kept), problems.count)


def names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each file: its path from the parent of the folder that all share, without machine paths."""
    absolute = [Path(os.path.abspath(path)) for path in paths]
    shared = Path(os.path.commonpath([path.parent for path in absolute])).parent
    return [path.relative_to(shared).as_posix() for path in absolute]


def _inflated(raw: bytes) -> bytes:
    """Return the content of a gzip file, or the bytes unchanged."""
    if not raw.startswith(_GZIP):
        return raw
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        inflated = file.read(MAX_BYTES + 1)
    if len(inflated) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"more than {MAX_BYTES:,} bytes, unpacked")
    return inflated


def _readings_of_log(text: str, name: str, problems: Problems) -> Iterator[Reading]:
    for number, raw in enumerate(text.split("\n"), 1):
        line = _MARK.sub("", _COLOURS.sub("", raw[: _LONGEST_LINE + 1]), count=1).strip()
        if not _STEP.match(line):
            continue
        try:
            if len(raw) > _LONGEST_LINE:
                raise ValueError(f"{len(raw):,} characters")
            words = _words(line)
            loss, time = words.get("val_loss", words.get("tel")), words.get("train_time", "")
            if loss is not None:
                step, _, num_steps = words.get("step", words.get("s", "")).partition("/")
                is_ms = time.endswith("ms") or not time.endswith("s")
                per_s = 1e3 if is_ms else 1.0
                yield _reading(number, name, step, num_steps, loss, time.rstrip("ms"), per_s)
        except ValueError as error:
            problems.add(number, f"{error} in {line!r}; left out")


def _words(line: str) -> dict[str, str]:
    """Return the `key:value` words of a line, or fields between bars, the first of each key; refuse other text."""
    fields = line.split("|") if "|" in line else re.sub(r":\s+", ":", line).split()
    words: dict[str, str] = {}
    for field in fields:
        key, _, value = (part.strip() for part in field.partition(":"))
        if not (key and value):
            raise ValueError(f"{field.strip()[:40]!r} is cut off or unknown")
        words.setdefault(key, value)
    return words


def _reading(line: int, name: str, step: str, num_steps: str, loss: str, time: str, per_s: float) -> Reading:
    """Return a reading; number of steps and time may be empty. `per_s`: units of time in a second."""
    wholes, numbers = (step, num_steps or "0"), (loss, time or "0")
    if not all(map(_WHOLE.fullmatch, wholes)) or not all(map(_NUMBER.fullmatch, numbers)):
        raise ValueError("a number that cannot be read")
    nats, time_s = float(loss), float(time) / per_s if time else None
    if (math.isfinite(nats) and not 0 <= nats <= _MOST) or not 0 <= (time_s or 0) <= _MOST:
        raise ValueError("a number out of range")
    return Reading(line, name, int(step), int(num_steps) if num_steps else None, nats, time_s)


def _readings_of_table(text: str, problems: Problems) -> Iterator[Reading]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in rows:
            cells = {key: (value or "").strip() for key, value in row.items() if isinstance(key, str)}
            steps, time_ms = (cells["step"], cells.get("num_steps", "")), cells.get("train_time_ms", "")
            try:
                if None in row:
                    raise ValueError("more cells than columns")
                yield _reading(rows.line_num, cells["log"], *steps, cells["val_loss"], time_ms, 1e3)
            except ValueError as error:
                problems.add(rows.line_num, f"{error} in {','.join(cells.values())!r}; left out")
    except csv.Error as error:
        problems.add(rows.line_num, f"{error}; the rest is left out")
