"""Edit each field of a log once, chain it again, and print the edits that `validate` lets pass.

    python tests/single_edits.py RECORD      of the first run; two lines of each kind of event

docs/referee.md names them: remarks, stamps within their tolerance, and what only `--replay` or a track that ranks sees.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from speedrun.base.runlog import GENESIS, digest
from speedrun.record.layout import LOG
from speedrun.record.validate import validate


def edits(fact: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Callable[[Any], Any]]]:
    """Yield the place of each leaf of JSON, with a small change of its kind."""
    if isinstance(fact, dict | list) and fact:
        places = fact if isinstance(fact, dict) else {0: fact[0], len(fact) - 1: fact[-1]}
        for key in places:
            yield from edits(fact[key], (*path, key))
    elif isinstance(fact, bool):
        yield path, lambda old: not old
    elif isinstance(fact, int | float):
        yield path, lambda old: old + type(old)(1)
    elif isinstance(fact, str):
        yield path, lambda old: old[:-1] + ("1" if old[-1:] == "0" else "0")
    else:
        yield path, lambda _: {"a": "b"} if fact == {} else [1] if fact == [] else 1.0


def edited(fact: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> None:
    *place, last = path
    for key in place:
        fact = fact[key]
    fact[last] = change(fact[last])


def chained(lines: list[dict[str, Any]]) -> bytes:
    raw, before = [], GENESIS
    for line in lines:
        raw.append(json.dumps({**line, "prev": before}, separators=(",", ":")).encode())
        before = digest(raw[-1])
    return b"\n".join(raw) + b"\n"


def passing(record: Path) -> Iterator[str]:
    """Yield each edit that no check refuses or warns of."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(record, Path(scratch, "record")))
        log = min(copy.glob(f"runs/*/{LOG}"))
        text = log.read_text()
        kinds: dict[str, list[int]] = {}
        for at, line in enumerate(text.splitlines()):
            kinds.setdefault(json.loads(line)["event"]["ev"], []).append(at)
        for at in sorted(at for places in kinds.values() for at in {places[len(places) // 2], places[-1]}):
            whole = json.loads(text.splitlines()[at])
            for path, change in [*edits(whole)]:
                if path in (("i",), ("prev",), ("event", "ev")):
                    continue
                lines = [json.loads(line) for line in text.splitlines()]
                edited(lines[at], path, change)
                log.write_bytes(chained(lines))
                report = validate(copy)
                if not report.having("failed") and not report.having("warning"):
                    yield f"line {at + 1}: {whole['event']['ev']} {'.'.join(map(str, path[-2:]))}"


if __name__ == "__main__":
    for name in passing(Path(sys.argv[1])):
        print(name, flush=True)  # noqa: T201
