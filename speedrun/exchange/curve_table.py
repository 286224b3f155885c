"""Read and write the curves of many runs as one CSV table.

    log,step,num_steps,val_loss,train_time_ms

One line for each validation; the lines of a run are adjacent. A table of training losses has `train_loss` in place of
`val_loss`. A file may come from a stranger: each cell must be text or a number, and is cleaned before it is shown.
"""

import csv
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from speedrun.exchange.curves import MOST_RUNS, NUMBER, ContextRun, Point, Problems, Reading, runs_of

_COLUMNS = ("log", "step", "num_steps", "val_loss", "train_time_ms")
_WHOLE = re.compile(r"[0-9]{1,12}")
_NUMBER = re.compile(rf"{NUMBER}|[+-]?(?:nan|inf)")


def is_table(text: str) -> bool:
    """Whether a text starts with the head of such a table."""
    head = text[:200].partition("\n")[0].strip().split(",")
    return "log" in head and "step" in head and not {"val_loss", "train_loss"}.isdisjoint(head)


def read(text: str, problems: Problems) -> list[ContextRun]:
    """Return the runs of a table in order; lines that cannot be read are added to `problems`."""
    rows = csv.DictReader(io.StringIO(text, newline=""))
    runs: list[ContextRun] = []
    try:
        for name, readings in itertools.groupby(_readings(rows, problems), key=lambda pair: pair[0]):
            runs += runs_of(name, (reading for _, reading in readings), problems)
            if len(runs) >= MOST_RUNS:
                problems.add(rows.line_num, f"more than {MOST_RUNS:,} runs; the rest is left out")
                break
    except csv.Error as error:
        problems.add(rows.line_num, f"{error}; the rest is left out")
    return runs


def _readings(rows: csv.DictReader, problems: Problems) -> Iterator[tuple[str, Reading]]:
    kind = "val" if "val_loss" in (rows.fieldnames or ()) else "train"
    for row in rows:
        cells = {key: (value or "").strip() for key, value in row.items() if isinstance(key, str)}
        loss, time_ms = cells.get(f"{kind}_loss", ""), cells.get("train_time_ms", "")
        planned = cells.get("num_steps", "")
        if (
            None in row  # more cells than columns
            or not _WHOLE.fullmatch(cells["step"])
            or not _NUMBER.fullmatch(loss)
            or not (time_ms == "" or _NUMBER.fullmatch(time_ms))
            or not (planned == "" or _WHOLE.fullmatch(planned))
        ):
            problems.add(rows.line_num, f"cannot be read: {','.join(cells.values())!r}; left out")
            continue
        time_s = float(time_ms) / 1e3 if time_ms else None
        reading = Reading(
            rows.line_num, kind, int(cells["step"]), int(planned) if planned else None, float(loss), time_s
        )
        yield cells["log"], reading


def write(runs: Iterable[ContextRun], *, train: bool = False) -> str:
    """Return the table of validations, or of training losses, with all digits."""
    columns = [column.replace("val_loss", "train_loss") if train else column for column in _COLUMNS]
    lines: list[Sequence[object]] = [columns]
    for run in runs:
        planned = "" if run.num_steps is None else run.num_steps
        points = run.train_losses if train else run.validations
        lines += [(run.name, point.step, planned, *_cells(point)) for point in points]
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(lines)
    return table.getvalue()


def _cells(point: Point) -> tuple[str, str]:
    loss, time_s = point.loss, point.train_time_s
    # A digit of a nanosecond is more than a clock resolves, and dividing by 1,000 gives the same seconds again.
    time_ms = "" if time_s is None else f"{time_s * 1e3:.6f}".rstrip("0").rstrip(".")
    return "nan" if loss is None else repr(loss), time_ms
