"""Import other people's validations, from a text log or a CSV table of many runs.

    step:125/1770 val_loss:4.6539 train_time:12051ms step_avg:96.41ms     modded-nanogpt
    step:125/3350 val_loss:4.66393 train_time:22.870s step_avg:182.95ms   its third track: seconds
    s:250 tel:6.1710                                                      llm.c: no time
    [METRICS (latest)] step: 1674  |  val_loss: 3.275080919265747         modded-nanogpt-jax
    log,step,num_steps,val_loss,train_time_ms                             head of a table

A line counts only if it consists of `key:value` words, or fields between bars, and starts with the step, after what
launchers and loggers write before it: a log may begin with the script that wrote it. A last line without its end may be
cut off, so it does not count. What looks like a validation and does not count becomes a problem. The file is not
trusted: its size is limited, and names are cleaned.
"""

import codecs
import csv
import io
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean, variance
from typing import NamedTuple

import msgspec

from speedrun.base.atomic_files import read_regular
from speedrun.base.console import clean
from speedrun.base.errors import UsageError, translate_read_errors
from speedrun.record import statistics
from speedrun.record.layout import sha256

_FIRST_STEPS = 11  #: the oldest scripts of the speedrun restarted their clock here
_NAME_LIMIT = 200  #: characters
_MOST = 1e12  #: of a loss, of seconds
MAX_BYTES = 32 * 2**20
_LONGEST_LINE = 1000  #: characters; longer lines are source text
_NUMBER = re.compile(
    r"[+-]?(?:[0-9]{1,15}(?:\.[0-9]{0,20})?(?:e[+-]?[0-9]{1,3})?|nan|inf(?:inity)?)", re.IGNORECASE
)
_WHOLE = re.compile(r"[0-9]{1,12}(?:\.0{1,9})?")
_COLOURS = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
#: What may come before a step, up to eight of them.
_PREFIX = re.compile(
    r"""\A[\s\0]*(?:(?:
        \[[^][{}"']{1,80}\](?:<std(?:out|err)>)?:?                                # torchrun, Open MPI, many loggers
      | \d{4}[-/]\d\d[-/]\d\d(?:[ T]\d\d:\d\d(?::\d\d)?(?:[.,]\d{1,9})?)?(?:Z|[+-]\d\d:?\d\d)?  # date and time
      | \d\d:\d\d:\d\d(?:[.,]\d{1,9})?
      | \d{1,5}:                                                               # srun --label
      | DEBUG | INFO | WARNING
      | [\w.-]{1,40}\s+\|                                                      # docker compose
      | [|:-]
    )[\s\0]*){0,8}""",
    re.VERBOSE,
)
_STEP = re.compile(r"(?:step|s):\s*[+-]?\d")
#: A validation behind another text, unless that is a comment or a program.
_HIDDEN = re.compile(r"""(?!\s*\#)[^"']{0,200}?\b(?:step|s):\s*[0-9].{0,200}?\b(?:val_loss|tel):""", re.I)
_TABLE = {"log", "step", "val_loss"}
_LONGEST_HEAD = 20_000  #: characters of a table's first line


class Point(msgspec.Struct, frozen=True, omit_defaults=True):
    """One loss of a curve."""

    step: int
    loss: float | None  #: None if it was not finite
    train_time_s: float | None = None  #: by the clock of the log; None without one, or if it goes back


class Problem(msgspec.Struct, frozen=True):
    """A line that was left out or changed."""

    line: int  #: from 1
    message: str


class ContextRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run of a file."""

    name: str
    num_steps: int | None  #: planned; the last validation may come earlier
    validations: tuple[Point, ...]
    final_loss: float | None
    train_time_s: float | None  #: at the last validation


class Context(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="schema", tag="speedrun.context/1"):
    """The contents of one file."""

    source: str  #: its name, without folders
    sha256: str  #: of the file
    runs: tuple[ContextRun, ...]
    problems: tuple[Problem, ...] = ()


class Reading(NamedTuple):
    """A validation as a line of a log states it."""

    line: int
    name: str  #: of its log
    step: int
    num_steps: int | None
    loss: float
    train_time_s: float | None


def _problem(line: int, message: str) -> Problem:
    return Problem(line, clean(message, limit=160))


def _points(run: Sequence[Reading], problems: list[Problem]) -> tuple[Point, ...]:
    """Return the curve of a run, without steps and times that go back."""
    points: list[Point] = []
    reached_s = 0.0
    for line, _, step, _, loss, time_s in run:
        if points and step <= points[-1].step:
            problems.append(_problem(line, f"step {step} comes after step {points[-1].step}; left out"))
            continue
        if not math.isfinite(loss):
            problems.append(_problem(line, f"the loss of step {step} is {loss}"))
        if time_s is not None and time_s < reached_s and step > _FIRST_STEPS:
            said = f"step {step}: the time goes back from {reached_s} to {time_s} s; left out"
            problems.append(_problem(line, said))
            time_s = None
        points.append(Point(step, loss if math.isfinite(loss) else None, time_s))
        reached_s = reached_s if time_s is None else time_s
    return tuple(points)


def _runs_of(readings: Iterable[Reading], problems: list[Problem]) -> Iterator[ContextRun]:
    """Yield runs in order; the second run of a log is called `name#2`. It begins where the step falls that far."""
    for name, log in groupby(readings, lambda reading: reading.name):
        runs: list[list[Reading]] = [[]]
        for reading in log:
            # Repeated where a console and a log file were joined. As text, since NaN is not equal to itself.
            if runs[-1] and repr(runs[-1][-1][1:]) == repr(reading[1:]):
                continue
            if runs[-1] and reading.step <= runs[-1][0].step:
                runs.append([])
            runs[-1].append(reading)
        for number, run in enumerate(runs, 1):
            points = _points(run, problems)
            shown = clean(name if number == 1 else f"{name}#{number}", limit=_NAME_LIMIT)
            planned = [one.num_steps for one in run if one.num_steps is not None]
            num_steps, last = planned[-1] if planned else None, points[-1]
            yield ContextRun(shown, num_steps, points, last.loss, last.train_time_s)


def import_file(path: Path, name: str) -> Context:
    """Return the runs of a text log or a CSV table; `name` is that of a log's run."""
    with translate_read_errors(clean(str(path)), "need a text log or a CSV of curves", kind=UsageError):
        raw = read_regular(path, MAX_BYTES)
    context = import_bytes(raw, name, source=path.name, digest=sha256(raw))
    if not context.runs:
        why = "".join(f" (line {first.line}: {first.message})" for first in context.problems[:1])
        if 4 * raw.count(0) > len(raw):
            why = " (it looks like UTF-16 without a mark; convert it to UTF-8)"
        if raw.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
            why = " (it is compressed; unpack it with gunzip or unzstd)"
        raise UsageError(
            f"{clean(str(path))} holds no line of a known log{why}; need lines like 'step:125/1770 val_loss:4.6539 "
            "train_time:12051ms', or a CSV with columns log,step,val_loss"
        )
    return context


def import_bytes(raw: bytes, name: str, *, source: str, digest: str) -> Context:
    """Return the runs of uncompressed bytes; there may be none."""
    problems: list[Problem] = []
    is_utf16 = raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as PowerShell writes files
    text = raw.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")
    end = 1 + max(text.rfind("\n"), text.rfind("\r"))
    whole, rest = text[:end], text[end:]
    names, mark = _head(whole)
    if rest.strip():
        said = f"the last line has no end, so the file may be cut off: {rest.strip()[:60]!r}; left out"
        problems.append(_problem(1 + whole.count("\n"), said))
    if names:
        rows = list(_readings_of_table(whole, names, mark, problems))
        is_once = len({row[1:3] for row in rows}) == len(rows)  # else the order of the steps tells runs apart
        readings = sorted(rows, key=lambda row: (row.name, is_once * row.step))
    else:
        readings = _readings_of_log(whole, name, problems)
    runs = tuple(_runs_of(readings, problems))
    return Context(clean(source, limit=200), digest, runs, tuple(sorted(problems, key=lambda one: one.line)))


def names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each file: its path from the parent of the folder that all of them share."""
    absolute = [Path(os.path.abspath(path)) for path in paths]
    shared = Path(os.path.commonpath([path.parent for path in absolute])).parent
    return [path.relative_to(shared).as_posix() for path in absolute]


def _readings_of_log(text: str, name: str, problems: list[Problem]) -> Iterator[Reading]:
    """Yield the validations of a log. Progress bars separate what they print by carriage returns."""
    lines = ((number, raw) for number, row in enumerate(text.split("\n"), 1) for raw in row.split("\r"))
    for number, raw in lines:
        line = _PREFIX.sub("", _COLOURS.sub("", raw[: _LONGEST_LINE + 1]), count=1).strip()
        try:
            if not _STEP.match(line):
                if _HIDDEN.match(line):
                    raise ValueError("not the form of a validation")
                continue
            if len(raw) > _LONGEST_LINE:
                raise ValueError(f"{len(raw):,} characters")
            words = _words(line)
            loss, time = words.get("val_loss", words.get("tel")), words.get("train_time", "")
            if loss is not None:
                step, _, num_steps = words.get("step", words.get("s", "")).partition("/")
                per_s = 1e3 if time.endswith("ms") or not time.endswith("s") else 1.0
                time = time.removesuffix("ms").removesuffix("s")  # other units are no number
                yield _reading(number, name, step, num_steps, loss, time, per_s)
        except ValueError as error:
            problems.append(_problem(number, f"{error} in {line!r}; left out"))


def _words(line: str) -> dict[str, str]:
    """Return the `key:value` words of a line, or its fields between bars; raise ValueError for other text."""
    fields = line.split("|") if "|" in line else re.sub(r":\s+", ":", line).split()
    words: dict[str, str] = {}
    for field in fields:
        key, _, value = (part.strip() for part in field.partition(":"))
        if not (key and value):
            raise ValueError(f"{field.strip()[:40]!r} is cut off or unknown")
        words.setdefault(key, value)
    return words


def _reading(line: int, name: str, step: str, num_steps: str, loss: str, time: str, per_s: float) -> Reading:
    """Parse a reading; `num_steps` and `time` may be empty, and `per_s` is the units of time in a second."""
    wholes, numbers = (step, num_steps or "0"), (loss, time or "0")
    if not all(map(_WHOLE.fullmatch, wholes)) or not all(map(_NUMBER.fullmatch, numbers)):
        raise ValueError("a number that cannot be read")
    nats, time_s = float(loss), float(time) / per_s if time else None
    if (math.isfinite(nats) and not 0 <= nats <= _MOST) or not 0 <= (time_s or 0) <= _MOST:
        raise ValueError("a number out of range")
    return Reading(line, name, int(float(step)), int(float(num_steps)) if num_steps else None, nats, time_s)


def _head(text: str) -> tuple[list[str], str]:
    """Return the columns of a table and what separates them; no columns if the text is no table."""
    first = next(iter(text[:_LONGEST_HEAD].splitlines()), "")
    for mark in ",;\t":
        cells = next(csv.reader([first], delimiter=mark, skipinitialspace=True), [])
        names = [cell.strip().lower() for cell in cells]
        if all(names.count(one) == 1 for one in _TABLE):
            return names, mark
    return [], ""


def _readings_of_table(text: str, names: list[str], mark: str, problems: list[Problem]) -> Iterator[Reading]:
    body = io.StringIO(text, newline="")
    next(body)
    rows = csv.DictReader(body, names, delimiter=mark, skipinitialspace=True, strict=True)
    try:
        for row in rows:
            cells = {key: (value or "").strip() for key, value in row.items() if isinstance(key, str)}
            steps, time_ms = (cells["step"], cells.get("num_steps", "")), cells.get("train_time_ms", "")
            try:
                if None in row:
                    raise ValueError("more cells than columns")
                yield _reading(1 + rows.line_num, cells["log"], *steps, cells["val_loss"], time_ms, 1e3)
            except ValueError as error:
                said = f"{error} in {','.join(cells.values())!r}; left out"
                problems.append(_problem(1 + rows.line_num, said))
    except csv.Error as error:
        problems.append(_problem(1 + rows.line_num, f"{error}; the rest is left out"))


class Group(msgspec.Struct, frozen=True):
    """A group of equal runs."""

    folder: str
    step: int  #: of the last validation
    num_steps: int | None
    losses: tuple[float, ...]  #: at that step
    mean: float
    sd: float | None  #: None for one run
    step_ms: float | None  #: mean over steps up to the last validation; None without times


class Noise(msgspec.Struct, frozen=True):
    """The sd of equal runs, over all groups of two or more."""

    num_runs: int
    num_groups: int
    freedom: int  #: degrees of freedom
    pooled_sd: float
    low: float  #: of the 95 % interval of the pooled sd, for normal losses
    high: float


def distinct(runs: Iterable[ContextRun]) -> list[ContextRun]:
    """Return the runs with a final loss, without copies of a log."""
    found, seen = [], set()
    for run in runs:
        # A single loss without a time may be equal by chance.
        is_telling = len(run.validations) > 1 or run.train_time_s is not None
        if run.final_loss is None or (is_telling and run.validations in seen):
            continue
        seen.add(run.validations)
        found.append(run)
    return found


def groups(runs: Iterable[ContextRun]) -> list[Group]:
    """Group the equal runs among those that `distinct` returns."""
    equal: dict[tuple[str, int, int | None], list[ContextRun]] = defaultdict(list)
    for run in runs:
        equal[run.name.rpartition("/")[0], run.validations[-1].step, run.num_steps].append(run)
    found = []
    for (folder, step, num_steps), same in equal.items():
        losses = tuple(run.final_loss for run in same if run.final_loss is not None)
        times_s = [run.train_time_s for run in same if run.train_time_s is not None]
        step_ms = fmean(times_s) / step * 1e3 if step and len(times_s) == len(same) else None
        found.append(Group(folder, step, num_steps, losses, fmean(losses), statistics.sd(losses), step_ms))
    return found


def noise(found: Sequence[Group]) -> Noise | None:
    """Return the pooled sd of runs around the means of their groups, with the interval freedom * sd^2 / chi^2."""
    from scipy import special

    several = [group for group in found if group.sd is not None]
    if not several:
        return None
    num_runs = sum(len(group.losses) for group in several)
    freedom = num_runs - len(several)
    squares = sum(variance(group.losses) * (len(group.losses) - 1) for group in several)
    pooled = math.sqrt(squares / freedom)
    low, high = (pooled * math.sqrt(freedom / special.chdtri(freedom, tail)) for tail in (0.025, 0.975))
    return Noise(num_runs, len(several), freedom, pooled, float(low), float(high))
