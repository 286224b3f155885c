"""Commands measured in one sitting: each has a limit, one that hangs or dies costs no other, results stay.

    OUT/parts/<name>.json    how a part ended; <name>.out and <name>.err hold what it said
    OUT/summary.md           all of them, for people; outputs.tar.gz the whole folder, small enough to send

This process touches no device. A worker runs the parts one after the other (`cli.warm`); it is replaced when a part
hangs or dies, and before and after a part that runs alone.
"""

import io
import os
import select
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from speedrun.ground.clock import Stopwatch, now
from speedrun.ground.errors import UsageError, unknown
from speedrun.ground.wholefile import write_whole

MOST_ARCHIVE_BYTES = 16 * 2**20
_GRACE_S = 3.0  #: beyond a part's limit, for its stacks to be written
_DEATH_S = 20.0  #: a process that a driver holds may not die; the next part does not wait for it


class Part(NamedTuple):
    """A command of `speedrun`."""

    name: str
    argv: tuple[str, ...]
    limit_s: float
    alone: bool = False  #: in a process of its own, while no other holds a device
    makes: str = ""  #: a folder in OUT that it refuses to write over; one of an earlier try is removed
    ends_well: tuple[int, ...] = (0,)  #: exit codes with which it has measured what it should


#: `killed` went beyond its limit; `cut` had less time than that, because the slice was over.
Status = Literal["ok", "failed", "refused", "died", "killed", "cut"]


class Result(msgspec.Struct, frozen=True):
    """How a part ended."""

    name: str
    argv: tuple[str, ...]
    status: Status
    reason: str  #: one line; empty if all is well
    seconds: float
    ended_utc: str


def chosen(parts: Sequence[Part], names: str) -> list[Part]:
    """The parts of these names, which commas divide, in the order of all.

    Raises:
        UsageError: for a name that no part has.
    """
    asked = [name for name in names.split(",") if name]
    known = [part.name for part in parts]
    for name in asked:
        if name not in known:
            raise unknown("part", name, known)
    return [part for part in parts if part.name in asked]


def results(out: Path) -> dict[str, Result]:
    """Of all parts that ever ran into this folder, by name."""
    found = [msgspec.json.decode(path.read_bytes(), type=Result) for path in sorted(out.glob("parts/*.json"))]
    return {one.name: one for one in found}


def run(
    parts: Sequence[Part],
    out: Path,
    worker: Sequence[str],
    *,
    env: dict[str, str],
    most_s: float,
    ended: Callable[[Result], object],
) -> None:
    """Runs parts in order, and tells of each as it ends.

    Args:
        parts: which.
        out: the folder; exists.
        worker: the command line of a process that `cli.warm.serve`s.
        env: its environment.
        most_s: of all together: the last part is cut short, and those behind it are left.
        ended: is called with each result, once that is on disk.
    """
    (out / "parts").mkdir(exist_ok=True)
    watch, process = Stopwatch(), _Worker(worker, env, out / "parts" / "worker.log")
    try:
        for part in parts:
            left_s = most_s - watch.seconds
            if left_s <= 0:
                return
            if part.alone:
                process.replace()
            result = _one(part, out, process, min(part.limit_s, left_s))
            if part.alone:
                process.replace()
            write_whole(out / "parts" / f"{part.name}.json", msgspec.json.encode(result))
            ended(result)
    finally:
        process.end()


def _one(part: Part, out: Path, process: "_Worker", limit_s: float) -> Result:
    stem, watch = out / "parts" / part.name, Stopwatch()
    if part.makes:
        shutil.rmtree(out / part.makes, ignore_errors=True)
    for suffix in (".json", ".out", ".err"):
        stem.with_name(stem.name + suffix).unlink(missing_ok=True)
    code = process.ask(
        {"argv": part.argv, "stem": str(stem.absolute()), "limit_s": limit_s}, limit_s + _GRACE_S
    )
    status, reason = _verdict(part, code, limit_s, _last_line(stem) or _last_line(stem.with_name("worker")))
    return Result(part.name, part.argv, status, reason, round(watch.seconds, 1), now().utc)


def _verdict(part: Part, code: "int | _Lost", limit_s: float, last: str) -> tuple[Status, str]:
    if code in part.ends_well:
        return "ok", f"exit code {code}" if code else ""
    if isinstance(code, int):
        return ("refused" if code == UsageError.exit_code else "failed"), last or f"exit code {code}"
    if code.by is None:
        if limit_s < part.limit_s:
            return "cut", f"the slice was over after {limit_s:.0f} s; last it said: {last}"
        return "killed", f"beyond its limit of {limit_s:.0f} s; last it said: {last}"
    how = f"signal {-code.by}" if code.by < 0 else f"exit code {code.by}"
    return "died", f"{how}; last it said: {last}"


def _last_line(stem: Path) -> str:
    """Of what a part said, before the stacks that a hang left."""
    for suffix in (".err", ".out", ".log"):
        path = stem.with_name(stem.name + suffix)
        text = path.read_text(errors="replace") if path.is_file() else ""
        lines = [line.strip() for line in text.partition("Timeout (")[0].splitlines() if line.strip()]
        if lines:
            said = lines[-1].removeprefix("error: ")
            try:
                told = msgspec.json.decode(said)
            except msgspec.DecodeError:
                return said[:300]
            return str(told["error"] if isinstance(told, dict) and "error" in told else "")[:300]
    return ""


class _Lost(NamedTuple):
    """A worker that gave no answer."""

    by: int | None  #: its exit code; None if it was killed for its time


class _Worker:
    """The process that runs the parts; started when it is needed."""

    def __init__(self, argv: Sequence[str], env: dict[str, str], log: Path) -> None:
        self._argv, self._env, self._log = argv, env, log
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], most_s: float) -> int | _Lost:
        """The exit code of a command; the worker is gone if it gave none."""
        process = self._process = self._process or self._start()
        assert process.stdin
        assert process.stdout
        with suppress(BrokenPipeError):  # a dead one says so at once: its standard output ends
            process.stdin.write(msgspec.json.encode(request) + b"\n")
        ready, _, _ = select.select([process.stdout], [], [], most_s)
        answer = process.stdout.readline() if ready else b""
        if answer:
            return msgspec.json.decode(answer)["exit_code"]
        code = process.wait() if ready else None
        self.replace()
        return _Lost(code)

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("wb") as log:  # what it says outside of parts
            return subprocess.Popen(
                self._argv,
                env=self._env,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def replace(self) -> None:
        """Ends the process, and what it started; the next part gets another."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            assert pipe
            pipe.close()
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_DEATH_S)

    end = replace


def summary(head: Sequence[str], parts: Sequence[Part], out: Path) -> str:
    """All results as Markdown: a table of parts, then the figures of each."""
    found = results(out)
    names = [part.name for part in parts if part.name in found]
    names += [name for name in found if name not in names]
    missing = [part.name for part in parts if part.name not in found]
    rows = [
        {
            "part": name,
            "status": one.status,
            "seconds": f"{one.seconds:.0f}",
            "figures, or the reason": one.reason if one.status != "ok" else _gist(_said(out, name)),
        }
        for name, one in ((name, found[name]) for name in names)
    ]
    lines = ["# What this machine measured", "", *(f"- {line}" for line in head), "", *_table(rows), ""]
    if missing:
        lines += [f"Not run: {', '.join(missing)}.", ""]
    for name in names:
        lines += [f"## {name}", "", f"`speedrun {' '.join(found[name].argv)}`", "", *_figures(out, name), ""]
    return "\n".join(lines)


_SHOWN_LINES, _SHOWN_CHARS = 14, 120
_FEW = 8  #: of a list of numbers
#: What the first table shows of a part, where it has it.
_GIST = (
    "mean_ms",
    "step_ms",
    "tokens_per_s",
    "mfu",
    "peak_bytes",
    "ratio",
    "matmul_gflops",
    "memory_gb_per_s",
    "ready",
)


def _said(out: Path, name: str) -> Any:
    """What a part said on its standard output: what its JSON holds, or text."""
    path = out / "parts" / f"{name}.out"
    text = path.read_text(errors="replace").strip() if path.is_file() else ""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _gist(said: Any) -> str:
    """The few figures that matter most."""
    if isinstance(said, str):
        results = [line for line in said.splitlines() if line.startswith("result")]
        return " ".join(results[-1].split()) if results else ""
    facts: dict[str, Any] = said if isinstance(said, dict) else {}
    rows: list[dict[str, Any]] = said if isinstance(said, list) else facts.get("timings", [])
    if rows and "verdict" in rows[0]:
        return f"{sum(row['verdict'] == 'right' for row in rows)} of {len(rows)} cases right"
    if rows:
        return ", ".join(f"{row['name']} {_shown(row['median_ms'])} ms" for row in rows)
    return ", ".join(f"{key} {_shown(facts[key])}" for key in _GIST if facts.get(key) is not None)


def _figures(out: Path, name: str) -> list[str]:
    """All that a part said: JSON as tables, text as its last lines."""
    said = _said(out, name)
    if isinstance(said, str):
        return ["```", *said.splitlines()[-_SHOWN_LINES:], "```"] if said else []
    if isinstance(said, list):
        return _table(said)
    lines = [f"- {key}: {_shown(value)}" for key, value in said.items() if not _is_rows(value)]
    for key, rows in said.items():
        if _is_rows(rows):
            lines += ["", f"{key}:", "", *_table(rows)]
    return lines


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    heads = [key for key in rows[0] if not isinstance(rows[0][key], dict | list)] if rows else []
    lines = [heads, ["---"] * len(heads), *([_shown(row.get(key)) for key in heads] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines] if heads else []


def _shown(value: Any) -> str:
    """A value in a cell or a line."""
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list):
        some = value[:: max(1, len(value) // _FEW)]
        return ", ".join(map(_shown, some)) + (
            f" ({len(some)} of {len(value)})" if len(some) < len(value) else ""
        )
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_shown(one)}" for key, one in value.items())
    text = " ".join(str(value).replace("|", "/").split())
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}~"


def archive(out: Path, most_bytes: int = MOST_ARCHIVE_BYTES) -> list[str]:
    """Packs the folder into `outputs.tar.gz`; gives the files that would have made it too large, largest first."""
    target = out / "outputs.tar.gz"
    target.unlink(missing_ok=True)
    files = sorted((path for path in out.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    left_out: list[str] = []
    while True:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for path in files:
                tar.add(path, path.relative_to(out))
        if packed.tell() <= most_bytes or not files:
            break
        left_out.append(str(files.pop().relative_to(out)))
    write_whole(target, packed.getvalue())
    return left_out
