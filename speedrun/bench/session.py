"""Run commands in one session: each has a time limit, and one that hangs or dies costs no other its result.

    OUT/parts/<name>.json    how a part ended; <name>.out and <name>.err hold its output
    OUT/summary.md           all of them, for people; outputs.tar.gz the whole folder, small enough to send

This process uses no device. A worker (`cli.warm`) runs the parts one after the other. It is replaced when a part hangs
or dies, and before and after a part that runs alone.
"""

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from speedrun.bench.parts import Part
from speedrun.ground.clock import Stopwatch, now
from speedrun.ground.errors import UsageError
from speedrun.ground.wholefile import write_whole

_GRACE_S = 3.0  #: beyond a part's limit, for its stacks to be written
_DEATH_S = 20.0  #: a process that a driver holds may not die; the next part does not wait for it


#: `killed`: over its limit; `cut`: the time of the session was over before that.
Status = Literal["ok", "failed", "refused", "died", "killed", "cut"]


class Result(msgspec.Struct, frozen=True):
    """How a part ended."""

    name: str
    argv: tuple[str, ...]
    status: Status
    reason: str  #: one line; empty if all is well
    seconds: float
    ended_utc: str


def results(out: Path) -> dict[str, Result]:
    """Return the results in a folder, by name of the part."""
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
    """Run parts in order.

    Args:
        parts: to run.
        out: an existing folder.
        worker: command line of a process that calls `cli.warm.serve`.
        env: environment of the worker.
        most_s: for all parts: the last one is cut short, later ones do not run.
        ended: called with each result, once it is on disk.
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
        process.replace()


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
    """Return the last line of output, before the stacks of a hang."""
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
    """A worker that died."""

    by: int | None  #: its exit code; None if it was killed at the limit


class _Worker:
    """The process that runs the parts, started on demand."""

    def __init__(self, argv: Sequence[str], env: dict[str, str], log: Path) -> None:
        self._argv, self._env, self._log = argv, env, log
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], most_s: float) -> int | _Lost:
        """Return the exit code of a command, or `_Lost` if the worker died."""
        process = self._process = self._process or self._start()
        assert process.stdin
        assert process.stdout
        with suppress(BrokenPipeError):  # a dead worker shows below: its output ends
            process.stdin.write(msgspec.json.encode(request) + b"\n")
        ready, _, _ = select.select([process.stdout], [], [], most_s)
        answer = process.stdout.readline() if ready else b""
        if answer:
            return msgspec.json.decode(answer)["exit_code"]
        code = process.wait() if ready else None
        self.replace()
        return _Lost(code)

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("wb") as log:  # output between parts
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
        """End the process group; the next part gets a new one."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            assert pipe
            pipe.close()
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_DEATH_S)
