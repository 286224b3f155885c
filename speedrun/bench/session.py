"""All that is measured on a GPU: commands of `speedrun`, one process after the other, each with a limit of time.

    OUT/parts/<name>.json    what a part printed, or why it printed nothing; beside it the files that it made
    OUT/parts/<name>.err     what it said meanwhile
    OUT/summary.md           a line for each part

A part with a result does not run again. Its own limit is a result, the end of a slice of time is none.
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
from typing import Any, NamedTuple

import msgspec

from speedrun.data import imitation
from speedrun.ground import track as tracks
from speedrun.ground.clock import Stopwatch
from speedrun.ground.errors import UsageError, translate_os_errors, unknown
from speedrun.ground.exit_codes import meaning
from speedrun.ground.wholefile import write_whole

COMMAND = (sys.executable, "-m", "speedrun")


class Part(NamedTuple):
    """A command of `speedrun` that prints JSON."""

    name: str
    argv: tuple[str, ...]
    limit_s: float


class Result(NamedTuple):
    """What a part printed: figures, or an object with `error` and `exit_code`, as all commands do."""

    name: str
    figures: Any

    @property
    def status(self) -> str:
        """`ok`; `refused` for what this machine cannot do; else `failed`."""
        if not self.error:
            return "ok"
        return "refused" if self.figures.get("exit_code") == UsageError.exit_code else "failed"

    @property
    def error(self) -> str:
        """Why there are no figures; empty if there are some."""
        return self.figures.get("error", "") if isinstance(self.figures, dict) else ""

    def __str__(self) -> str:
        """A line: how it ended, and the few figures that matter most, or the reason for none."""
        facts = self.figures if isinstance(self.figures, dict) else {"timings": self.figures}
        gist = {key: facts[key] for key in _GIST if facts.get(key) is not None}
        gist |= {timed["name"]: timed["median_ms"] for timed in facts.get("timings", ())}
        said = ", ".join(f"{key} {value:.5g}" for key, value in gist.items())
        return f"{self.status:<8} {self.name:<32} {said or self.error}"


_GIST = ("mean_ms", "step_ms", "mfu", "peak_bytes", "ratio")
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


def imitated(folder: Path) -> Path:
    """Return the folder, with tokens for all parts unless it has some."""
    if not any(folder.glob("*_train_*.bin")):
        imitation.write(folder, tracks.load("webmini").data, 2 * _NUM_STEPS * _STEP_TOKENS)
    return folder


def results(out: Path) -> dict[str, Result]:
    """Return the results in a folder, by name of the part."""
    found: dict[str, Result] = {}
    for path in out.glob("parts/*.json"):
        with suppress(msgspec.DecodeError):  # it was cut off: the part runs again
            found[path.stem] = Result(path.stem, msgspec.json.decode(path.read_bytes()))
    return found


def chosen(parts: Sequence[Part], names: str | None, out: Path) -> list[Part]:
    """Return the parts of these names, split at commas; None: those without a result. Refuses an unknown name."""
    known = {part.name for part in parts}
    asked = known - results(out).keys() if names is None else set(filter(None, names.split(",")))
    for name in sorted(asked - known):
        raise unknown("part", name, known)
    return [part for part in parts if part.name in asked]


def run(parts: Sequence[Part], out: Path, env: dict[str, str], most_s: float) -> Iterator[Result]:
    """Run parts in order; yield each result once it is on disk.

    After `most_s` seconds the running part is cut, and later ones do not run.
    """
    with translate_os_errors(out):
        (out / "parts").mkdir(parents=True, exist_ok=True)
    watch = Stopwatch()
    for part in parts:
        path = out / "parts" / f"{part.name}.json"
        left_s = most_s - watch.seconds
        code = _end(part, path, env, min(part.limit_s, left_s)) if left_s > 0 else None
        if code is None and left_s < part.limit_s:
            path.unlink(missing_ok=True)
            return
        if part.name not in results(out):
            last = path.with_suffix(".err").read_text(errors="replace").strip().rpartition("\n")[2]
            how = "beyond its limit" if code is None else meaning(code)
            error = f"{how}; it said last: {last[:300] or 'nothing'}"
            write_whole(path, msgspec.json.encode({"error": error, "exit_code": code}))
        yield results(out)[part.name]


def _end(part: Part, path: Path, env: dict[str, str], limit_s: float) -> int | None:
    """Run a part, printing into `path`; return its exit code, None if the limit ended it and all that it started."""
    shutil.rmtree(path.with_suffix(""), ignore_errors=True)  # what an earlier try made
    said, errors = path, path.with_suffix(".err")
    with said.open("wb") as stdout, errors.open("wb") as stderr:
        argv = [*COMMAND, *part.argv]
        process = Popen(argv, env=env, stdin=DEVNULL, stdout=stdout, stderr=stderr, process_group=0)
    try:
        return process.wait(limit_s)
    except TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError, TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)  # one that a driver holds may not die; the next part goes on


def report(parts: Sequence[Part], out: Path) -> None:
    """Write a line for each part, and name those without a result."""
    found = results(out)
    lines = [f"    {found[part.name]}" for part in parts if part.name in found]
    missing = [part.name for part in parts if part.name not in found]
    text = ["# What this machine measured", "", *lines, "", f"Not run: {', '.join(missing) or 'none'}.", ""]
    write_whole(out / "summary.md", "\n".join(text).encode())
