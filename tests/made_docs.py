"""Makes two pages of docs/: the notebook of tutorial.md, and the page of checks.

python tests/made_docs.py
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from speedrun.record.checks import CHECKS
from speedrun.record.checks.v6_examination import LOWERED, REPLAY_CHECKS

DOCS = Path(__file__).parent.parent / "docs"
START = """\
import matplotlib.pyplot as plt

import speedrun as sr


def show(name: str) -> str:
    \"\"\"Draw the loss of a run; return where it ended.\"\"\"
    record = sr.Record(f"runs/{name}")
    record.plot()
    plt.imshow(plt.imread(record.folder / "plots" / "loss.png"))
    plt.axis("off")
    return f"{name}: {record.summary.val_loss_mean:.3f} nats per token"
"""
#: A block of code with the name of its file before it, if it is one.
BLOCK = re.compile(r"(?:^`(?P<file>\w+\.py)`:\n\n)?^```(?P<kind>python|sh)\n(?P<code>.*?)\n```$", re.M | re.S)


def cells(text: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the source of each cell."""
    text, at, has_started = re.sub(r"<!-- .*? -->", "", text), 0, False
    for found in [*BLOCK.finditer(text), None]:
        words = text[at : found.start() if found else len(text)].strip()
        if words:
            yield "markdown", words
        if not has_started:
            has_started = True
            yield "code", START.rstrip()
        if found is None:
            return
        at = found.end()
        if found["kind"] == "python":
            yield "code", f"%%writefile {found['file']}\n{found['code']}"
            continue
        for command in found["code"].splitlines():
            command = command.replace("path/to/", "")
            recipe = re.search(r"--recipe (\w+)", command)
            if command.startswith("speedrun run") and recipe:
                yield "code", f"!{command} --out runs/{recipe[1]}"
                yield "code", f'show("{recipe[1]}")'
            else:
                yield "code", f"!{command}"


def notebook() -> str:
    """Return the words of the tutorial, its files as cells that write them, its runs and their plots."""
    made = []
    for number, (kind, source) in enumerate(cells((DOCS / "tutorial.md").read_text())):
        cell = {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": source.splitlines(keepends=True),
        }
        made.append(cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


CHECKS_HEAD = """\
# The checks of a record

`speedrun validate RECORD` asks all but those from V601 on, which need `--replay` or `--relower`. An id never changes
its meaning. `speedrun validate --explain V305` prints a part of this page.

`run` and `batch` also ask what is known before the clock starts. On a track that ranks they do not start if no ranked
record could hold the run, unless `--unranked` is given; elsewhere they warn. `doctor` asks the same of a machine.
"""


def checks_page() -> str:
    """Return each check with its reason, and what to do if it fails."""
    parts = [CHECKS_HEAD]
    for one in (*CHECKS, *REPLAY_CHECKS, LOWERED):
        kind = {"error": "", "warning": " (It only warns.)"}.get(
            one.severity, " (On tracks that do not rank, it warns.)"
        )
        kind += " Also asked before the clock starts." if one.before else ""
        parts.append(f"**{one.id}: {one.title}.** Why: {one.why}.{kind} If it fails: {one.hint}.\n")
    return "\n".join(parts)


MADE = {"tutorial.ipynb": notebook, "checks.md": checks_page}

if __name__ == "__main__":
    for name, make in MADE.items():
        (DOCS / name).write_text(make())
