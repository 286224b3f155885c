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
"""

import csv
import errno
import gzip
import io
import itertools
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from speedrun.exchange.curves import MOST_RUNS, Context, ContextRun, Problems, Reading, runs_of
from speedrun.ground.console import clean
from speedrun.ground.errors import UsageError
from speedrun.ground.wholefile import read_regular
from speedrun.ledger.format import sha256

MAX_BYTES = 32 * 2**20
_GZIP = b"\x1f\x8b"
_LONGEST_LINE = 1000  #: characters; longer lines are source text
#: Short enough to be read.
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,15}(?:\.[0-9]{0,20})?(?:[eE][+-]?[0-9]{1,3})?|nan|inf)")
_WHOLE = re.compile(r"[0-9]{1,12}")
_COLOURS = re.compile(r"\x1b\[[0-9;]{0,20}m")
_MARK = re.compile(r"\s*(?:\[[a-z]+[0-9]{1,4}\]:|\[METRICS[^\]|]{0,40}\])?\s*")
_STEP = re.compile(r"(?:step|s):\s*[0-9]")


def import_file(path: Path, name: str) -> Context:
    """Return the runs of a text log or a CSV table, either compressed by gzip or not.

    `name` is that of a text log's run; a table names its own.

    Raises:
        UsageError: the file cannot be read, is larger than 32 MiB, or holds no curve.
    """
    try:
        raw = read_regular(path, MAX_BYTES)
        inflated = _inflated(raw)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{clean(str(path))}: {reason}; need a text log or a CSV of curves") from None
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
        runs = _runs_of_table(text, problems)
    else:
        runs = runs_of(name, _readings_of_log(text, problems), problems)
    return Context(clean(source, limit=200), digest, tuple(runs), tuple(problems.kept), problems.count)


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


def _readings_of_log(text: str, problems: Problems) -> Iterator[Reading]:
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
                yield _reading(number, step, num_steps, loss, time.rstrip("ms"), 1e3 if is_ms else 1.0)
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


def _reading(line: int, step: str, num_steps: str, loss: str, time: str, per_s: float) -> Reading:
    """Return a reading; number of steps and time may be empty. `per_s`: units of time in a second."""
    wholes, numbers = (step, num_steps or "0"), (loss, time or "0")
    if not all(map(_WHOLE.fullmatch, wholes)) or not all(map(_NUMBER.fullmatch, numbers)):
        raise ValueError("a number that cannot be read")
    planned, time_s = int(num_steps) if num_steps else None, float(time) / per_s if time else None
    return Reading(line, int(step), planned, float(loss), time_s)


def _runs_of_table(text: str, problems: Problems) -> list[ContextRun]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    runs: list[ContextRun] = []
    try:
        for name, readings in itertools.groupby(_readings_of_table(rows, problems), key=lambda pair: pair[0]):
            runs += runs_of(name, (reading for _, reading in readings), problems)
            if len(runs) >= MOST_RUNS:
                problems.add(rows.line_num, f"more than {MOST_RUNS:,} runs; the rest is left out")
                break
    except csv.Error as error:
        problems.add(rows.line_num, f"{error}; the rest is left out")
    return runs


def _readings_of_table(rows: csv.DictReader, problems: Problems) -> Iterator[tuple[str, Reading]]:
    for row in rows:
        cells = {key: (value or "").strip() for key, value in row.items() if isinstance(key, str)}
        steps, time_ms = (cells["step"], cells.get("num_steps", "")), cells.get("train_time_ms", "")
        try:
            if None in row:
                raise ValueError("more cells than columns")
            yield cells["log"], _reading(rows.line_num, *steps, cells["val_loss"], time_ms, 1e3)
        except ValueError as error:
            problems.add(rows.line_num, f"{error} in {','.join(cells.values())!r}; left out")
