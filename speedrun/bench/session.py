"""All that is measured on a GPU: commands of `speedrun`, one process after the other, in slices of time.

    OUT/parts/<name>.json    how a part ended, and its figures; beside it what it printed and the files that it made
    OUT/summary.md           a table of all parts

A part with a result does not run again. Its own limit is a result, the end of a slice is none.
"""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any, Literal, NamedTuple

import msgspec

from speedrun.bench import loading
from speedrun.data import imitation, stream
from speedrun.ground import track as tracks
from speedrun.ground.clock import Stopwatch, now
from speedrun.ground.errors import SpeedrunError, UsageError, translate_os_errors, unknown
from speedrun.ground.exit_codes import meaning
from speedrun.ground.wholefile import write_whole

Status = Literal["ok", "refused", "failed"]
_COMMAND = (sys.executable, "-m", "speedrun")


class Part(NamedTuple):
    """A command of `speedrun` that prints JSON."""

    name: str
    argv: tuple[str, ...]
    limit_s: float


class Result(msgspec.Struct, frozen=True):
    """How a part ended."""

    name: str
    argv: tuple[str, ...]
    status: Status
    reason: str  #: one line; empty if all is well
    seconds: float
    ended_utc: str
    machine: list[str]
    figures: Any  #: what the part printed; None if that is no JSON


_ONE = "--microbatches 1 --set stages.0.num_sequences=1"  #: one sequence, the share of one of eight GPUs
_NUM_STEPS, _STEP_TOKENS = 60, 49_152  #: on real text
#: Options of each measurement; w1, w7 and w14 are windows of attention, by a step of the schedule that has them.
FULL = {
    "step": "--recipe record21 --devices 1",
    **{"w1": "--first-step 0", "w7": "--first-step 787", "w14": "--first-step 1769"},
    "text": f"--recipe record21 --devices 1 {_ONE} --set eval_seq_len=16384",
    "heads": f"--tokens {_STEP_TOKENS} --heads 6 --dim 128",
    "head": f"--tokens {_STEP_TOKENS} --dim 768",
}
TINY = {
    "step": "--recipe smoke --devices 1 --set stages.0.seq_len=64",
    **{"w1": "--first-step 0", "w7": "--first-step 100", "w14": "--first-step 279"},
    "text": f"--recipe webmini --devices 1 {_ONE} --set config.model_dim=32 --set config.num_heads=2"
    " --set config.head_dim=16 --set config.mlp_dim=64",
    "heads": "--tokens 512 --heads 2 --dim 16",
    "head": "--tokens 64 --dim 32 --vocab 512",
}


def parts(size: dict[str, str], out: Path, tokens: Path, rival: Path | None) -> list[Part]:
    """Return all parts, most important first: half an hour on one GPU, or tiny for a rehearsal.

    `tokens` is a folder of shards to train on and to score, `rival` one with another program (`bench.rival`).
    """
    found: list[Part] = []

    def add(name: str, words: str, limit_s: float = 120) -> None:
        found.append(Part(name, (*shlex.split(words), "--json"), limit_s))

    data, files = f"--data {shlex.quote(str(tokens))}", shlex.quote(str(out / "parts"))
    step, num_steps = f"bench step {size['step']}", 6 if size is TINY else _NUM_STEPS
    add("target", "bench target")
    for form, window in product(("triton", "flash3", "banded"), ("w1", "w7", "w14")):
        add(f"step-{form}-{window}", f"{step} --steps 5 --attention {form} {size[window]}", 300)
    for form, window in product(("triton", "flash3"), ("w1", "w14")):
        add(f"rank-{form}-{window}", f"{step} {_ONE} --steps 5 --attention {form} {size[window]}", 300)
    short = f"--set stages.0.num_steps={num_steps}"
    add("run", f"run --track webmini {size['text']} {short} {data} --out {files}/run", 300)
    if rival is not None:
        add("rival", f"bench rival {shlex.quote(str(rival))} {size['text']} --steps {num_steps} {data}", 450)
    for window in ("w1", "w14"):
        words = f"--steps 2 --top 40 --out {files}/profile-{window}"
        add(f"profile-{window}", f"profile {size['step']} {_ONE} {size[window]} {words}", 300)
    add("step-auto-w14-no-command-buffers", f"{step} --steps 5 {size['w14']} --no-command-buffers", 300)
    add("doctor", "doctor")
    add("norm", f"bench norm {size['heads']}")
    add("muon", f"bench muon {size['step']}", 300)
    add("head", f"bench head {size['head']}")
    for blocks in (1, 2, 4, 7, 10, 14):
        add(f"attention-w{blocks}", f"bench attention {size['heads']} --block 128 --window {blocks}")
    add("loader", "bench loader")
    add("plan", "plan --track single-gpu")
    return found


def provide(folder: Path, *, made: bool) -> None:
    """Make tokens unless that was done before, or check those given; raise DataError if there are too few."""
    if made and not any(folder.glob("*_train_*.bin")):
        imitation.write(folder, tracks.load("webmini").data, 2 * _NUM_STEPS * _STEP_TOKENS)
    shapes = [stream.Shape(1, _STEP_TOKENS)] * _NUM_STEPS
    stream.require_steps(loading.folder_shards(folder, None), shapes)


def results(out: Path) -> dict[str, Result]:
    """Return the results in a folder, by name of the part."""
    found: dict[str, Result] = {}
    for path in out.glob("parts/*.json"):
        with suppress(msgspec.DecodeError):  # another version wrote it: the part runs again
            found[path.stem] = msgspec.json.decode(path.read_bytes(), type=Result)
    return found


def chosen(parts: Sequence[Part], names: str | None, out: Path) -> list[Part]:
    """Return the parts of these names, split at commas; None: those without a result. Refuses an unknown name."""
    known = {part.name for part in parts}
    asked = known - results(out).keys() if names is None else set(filter(None, names.split(",")))
    for name in sorted(asked - known):
        raise unknown("part", name, known)
    return [part for part in parts if part.name in asked]


def run(
    parts: Sequence[Part], out: Path, machine: list[str], env: dict[str, str], most_s: float
) -> Iterator[Result]:
    """Run parts in order; yield each result once it is on disk. `machine`, in lines, becomes part of it.

    After `most_s` seconds the running part is cut, and later ones do not run.
    """
    with translate_os_errors(out):
        (out / "parts").mkdir(parents=True, exist_ok=True)
    watch = Stopwatch()
    for part in parts:
        if (result := _one(part, out, machine, env, most_s - watch.seconds)) is None:
            return
        yield result


def _one(part: Part, out: Path, machine: list[str], env: dict[str, str], left_s: float) -> Result | None:
    """Run a part and write its result; return None, and write none, if the slice was over before its limit."""
    stem, watch, limit_s = out / "parts" / part.name, Stopwatch(), min(part.limit_s, left_s)
    if limit_s <= 0:
        return None
    file, said, errors = (stem.with_name(f"{part.name}.{kind}") for kind in ("json", "out", "err"))
    file.unlink(missing_ok=True)
    shutil.rmtree(stem, ignore_errors=True)  # what an earlier try made
    argv = [*_COMMAND, *part.argv]
    with said.open("wb") as stdout, errors.open("wb") as stderr:
        process = Popen(argv, env=env, stdin=DEVNULL, stdout=stdout, stderr=stderr, process_group=0)
    code = None
    try:
        code = process.wait(limit_s)
    except TimeoutExpired:
        if limit_s < part.limit_s:
            return None
    finally:  # with all that it started
        with suppress(ProcessLookupError, TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)  # one that a driver holds may not die; the next part goes on
    figures = None
    with suppress(msgspec.DecodeError):
        figures = msgspec.json.decode(said.read_bytes())
    last = errors.read_text(errors="replace").strip().rpartition("\n")[2][:300] or "nothing"
    status, reason = _verdict(code, figures, last)
    seconds, ended_utc = round(watch.seconds, 1), now().utc
    result = Result(part.name, part.argv, status, reason, seconds, ended_utc, machine, figures)
    write_whole(file, msgspec.json.encode(result))
    return result


def _verdict(code: int | None, figures: Any, last: str) -> tuple[Status, str]:
    """Return status and reason of a part by its exit code; None if its limit ended it."""
    error = figures.get("error") if isinstance(figures, dict) else None
    if code in (0, SpeedrunError.exit_code) and figures is not None and not error:
        return "ok", meaning(code) if code else ""
    how = "beyond its limit" if code is None else meaning(code)
    reason = str(error or f"{how}; it said last: {last}")
    return ("refused" if code == UsageError.exit_code else "failed"), reason


_GIST = ("mean_ms", "step_ms", "mfu", "peak_bytes", "ratio")


def row(one: Result) -> str:
    """Return a line of the table: how a part ended, and the few figures that matter most, or the reason for none."""
    facts = one.figures if one.status == "ok" and isinstance(one.figures, dict) else {}
    gist = {key: facts[key] for key in _GIST if facts.get(key) is not None}
    rows = one.figures if isinstance(one.figures, list) else facts.get("timings", ())
    gist |= {timed["name"]: timed["median_ms"] for timed in rows}
    said = ", ".join(f"{key} {value:.5g}" for key, value in gist.items())
    return f"{one.status:<8} {one.name:<32} {one.seconds:6.1f} s  {said or one.reason}"


def report(parts: Sequence[Part], out: Path) -> None:
    """Write a table of all parts."""
    found = results(out)
    done = [found[part.name] for part in parts if part.name in found]
    missing = [part.name for part in parts if part.name not in found]
    lines = [f"- {line}" for line in dict.fromkeys(line for one in done for line in one.machine)]
    lines += ["", *(f"    {row(one)}" for one in done), "", f"Not run: {', '.join(missing) or 'none'}.", ""]
    write_whole(out / "summary.md", "\n".join(["# What this machine measured", "", *lines]).encode())
