"""Read and write the text logs of modded-nanogpt and llm.c: losses by step.

    step:125/1770 val_loss:4.6539 train_time:12051ms step_avg:96.41ms     a validation, of all later scripts
    step:125/3350 val_loss:4.66393 train_time:22.870s step_avg:182.95ms   the same in seconds, of its third track
    step:126/5100 train_loss:4.9467 train_time:16262ms step_avg:140.19ms  a step, of the first ten scripts
    step:126/1770 train_time:12147ms step_avg:96.40ms                     a step of later scripts: no loss, not kept
    s:250 tel:6.1710   s:250 trl:6.1512 lr:0.000214 norm:0.9123           llm.c: validation and step, without a time
    [METRICS (latest)] step: 1674  |  val_loss: 3.275080919265747         modded-nanogpt-jax: validation
    [METRICS (1 step stale)] step: 9  |  time: 2025-08-20 13:50:50.4  |  loss: 6.47   a step, by the wall clock

The wall clock of the last one runs through validations, so it is not a train time and not kept. A log may begin with
the whole text of the script that wrote it, with versions and with the table of nvidia-smi. None of it is read: a line
counts only if it consists of `key:value` words (or fields between bars), the first of which is the step.
Source: the public logs, and the print statements inside them.
"""

import math
import re
from collections.abc import Iterator

from speedrun.exchange.curves import NUMBER, ContextRun, Problems, Reading, runs_of

_LONGEST_LINE = 1000  #: characters; longer lines are source text
_MARK = r"(?:\[[a-z]+[0-9]{1,4}\]:|\[METRICS[^\]|]{0,40}\])?\s*"
_STEP = re.compile(rf"{_MARK}(?:step|s):\s*([0-9]{{1,12}})(?:/([0-9]{{1,12}}))?(?=\s|$)(.*)")
_BEGINS_LIKE_A_STEP = re.compile(r"step:\s*[0-9]|\[METRICS")
_WORD = re.compile(r"([A-Za-z_][A-Za-z0-9_/]{0,40}):\s*(\S{1,100})(?=\s|$)\s*")
_FIELD = re.compile(r"\|\s*([A-Za-z_][A-Za-z0-9_/]{0,40}):\s*([^|]{1,100}?)\s*(?=\||$)")
_LOSS = re.compile(rf"(?:{NUMBER}|[+-]?(?:nan|inf))")
_TIME = re.compile(rf"({NUMBER})(ms|s)?")
_COLOURS = re.compile(r"\x1b\[[0-9;]{0,20}m")

_VALIDATION = ("val_loss", "tel")
_TRAINING = ("train_loss", "trl", "loss")


def read(name: str, text: str, problems: Problems) -> list[ContextRun]:
    """Return the runs of one text log; step lines that cannot be read are added to `problems`."""
    return runs_of(name, _readings(text, problems), problems)


def _readings(text: str, problems: Problems) -> Iterator[Reading]:
    for number, raw in enumerate(text.split("\n"), 1):
        if len(raw) > _LONGEST_LINE:
            if _BEGINS_LIKE_A_STEP.match(raw):
                problems.add(number, f"a step line of {len(raw):,} characters; left out")
            continue
        line = (_COLOURS.sub("", raw) if "\x1b" in raw else raw).strip()
        if step := _STEP.match(line):
            reading = _reading(number, step)
            if isinstance(reading, str):
                problems.add(number, f"{reading} in {line!r}; left out")
            elif reading is not None:
                yield reading
        elif _BEGINS_LIKE_A_STEP.match(line):
            problems.add(number, f"no step in {line!r}; left out")


def _reading(number: int, step: re.Match[str]) -> Reading | str | None:
    """Return the reading of a line, None if it has no loss, or what is wrong with it."""
    words, rest = _words(step[3])
    if rest:
        return f"the line is cut off or unknown from {rest[:40]!r} on"
    val = next((words[key] for key in _VALIDATION if key in words), None)
    loss = val or next((words[key] for key in _TRAINING if key in words), None)
    if loss is None:
        return None
    time = _TIME.fullmatch(words.get("train_time", "0"))
    if not _LOSS.fullmatch(loss) or time is None:
        return "a number that cannot be read"
    time_s = float(time[1]) / (1 if time[2] == "s" else 1e3) if "train_time" in words else None
    planned = int(step[2]) if step[2] else None
    return Reading(number, "val" if val else "train", int(step[1]), planned, float(loss), time_s)


def _words(text: str) -> tuple[dict[str, str], str]:
    """Return the leading `key:value` words, the first of each key, and the rest."""
    words: dict[str, str] = {}
    rest = text.lstrip()
    while rest.startswith("|") and (field := _FIELD.match(rest)):
        words.setdefault(field[1], field[2])
        rest = rest[field.end() :]
    while rest and (word := _WORD.match(rest)):
        words.setdefault(word[1], word[2])
        rest = rest[word.end() :]
    return words, rest


def write(run: ContextRun) -> str:
    """Return a run as such a log: losses by step with four digits, and times in whole milliseconds."""
    lines = []
    points = [(point.step, 0, "val", point) for point in run.validations]
    points += [(point.step, 1, "train", point) for point in run.train_losses]
    planned = "" if run.num_steps is None else f"/{run.num_steps}"
    for step, _, kind, point in sorted(points, key=lambda point: point[:2]):
        loss = math.nan if point.loss is None else point.loss
        time = ""
        if point.train_time_s is not None:
            time_ms = point.train_time_s * 1e3
            time = f" train_time:{time_ms:.0f}ms step_avg:{time_ms / max(step, 1):.2f}ms"
        lines.append(f"step:{step}{planned} {kind}_loss:{loss:.4f}{time}")
    return "".join(f"{line}\n" for line in lines)
