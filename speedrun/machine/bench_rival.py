"""Time our training step and another program's in turns, ABBA, on the same tokens.

The other program is a folder with an executable `run`, which is called as

    run --shards DIR --steps N --first-step I --sequences N --seq-len N

It compiles and warms up, then trains from its own initial state on the first N batches of DIR (`*_train_*.bin`, in the
order of `data.stream`), with the schedule of the whole record from step I on. For each step it writes a line of JSON to
standard output: {"step": i, "time_s": seconds since the first began, "loss": nats per token}. Other lines are ignored.
It stays in the process group that it was started in.
"""

import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from speedrun.base.errors import SpeedrunError, UsageError

_POINTS = 12  #: of the curve


class Curve(msgspec.Struct, frozen=True):
    """One run of either program."""

    who: str
    ms: list[float]  #: of each step
    losses: list[float]


class Line(msgspec.Struct):
    """A step, as the other program writes it."""

    step: int
    time_s: float
    loss: float


class Comparison(msgspec.Struct, frozen=True):
    """Ratios and curves of runs in the order ours, rival, rival, ours."""

    ratio: float  #: of our step time to the rival's
    ratio_least: float
    ratio_most: float
    ours_ms: list[float]
    rival_ms: list[float]
    curve: list[dict[str, float]]  #: losses of both at some steps
    runs: list[Curve]

    def __str__(self) -> str:
        ratio = f"ours / rival: {self.ratio:.3f} ({self.ratio_least:.3f} to {self.ratio_most:.3f})"
        rows = ("step {step:>5}  ours {ours:.4f}  rival {rival:.4f}".format(**row) for row in self.curve)
        return "\n".join([ratio, *rows])


def compare(
    ours: Sequence[str], theirs: Sequence[str], num_steps: int, say: Callable[[str], object]
) -> Comparison:
    """Run both command lines twice, in turns.

    `ours` is `speedrun bench step --json`. `say` takes a line of progress.

    Raises:
        SpeedrunError: if one fails, with its last line; if the rival writes another number of steps.
    """
    runs = []
    for turn in "ABBA":
        if turn == "A":
            found = msgspec.json.decode(_output("ours", ours))
            runs.append(Curve("ours", found["ms"], found["losses"]))
        else:
            runs.append(read(theirs, num_steps))
        say(f"{runs[-1].who}: {num_steps} steps, last loss {runs[-1].losses[-1]:.4f}")
    return compared(runs)


def read(argv: Sequence[str], num_steps: int) -> Curve:
    """Run the other program and read its steps; raise SpeedrunError if it fails, or writes another number of them."""
    lines = []
    for text in _output("the rival", argv).splitlines():
        with suppress(msgspec.DecodeError):  # other output
            lines.append(msgspec.json.decode(text, type=Line))
    if len(lines) != num_steps:
        raise SpeedrunError(
            f"the rival printed {len(lines)} steps, need {num_steps}; a line of JSON for each: step, time_s, loss"
        )
    ms = 1e3 * np.diff([0.0, *(line.time_s for line in lines)])
    return Curve("rival", ms.tolist(), [line.loss for line in lines])


def executable(folder: Path) -> Path:
    """Return the path of the program in a folder; raise UsageError if there is none."""
    path = folder.absolute() / "run"
    if not path.is_file() or not path.stat().st_mode & 0o100:
        raise UsageError(
            f"{path} is no executable file; need one that trains; see speedrun/machine/bench_rival.py"
        )
    return path


def compared(runs: Sequence[Curve]) -> Comparison:
    """Compare runs in the order ours, rival, rival, ours."""
    first, second, third, fourth = (median(one.ms) for one in runs)
    ours_ms, rival_ms = [first, fourth], [second, third]
    least, most = sorted(a / b for a, b in zip(ours_ms, rival_ms, strict=True))
    num_steps = len(runs[0].losses)
    shown = sorted({round(i * (num_steps - 1) / (_POINTS - 1)) for i in range(_POINTS)})
    return Comparison(
        ratio=sum(ours_ms) / sum(rival_ms),
        ratio_least=least,
        ratio_most=most,
        ours_ms=ours_ms,
        rival_ms=rival_ms,
        curve=[{"step": i, "ours": runs[0].losses[i], "rival": runs[1].losses[i]} for i in shown],
        runs=list(runs),
    )


def _output(who: str, argv: Sequence[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
        last = lines[-1] if lines else "nothing"
        raise SpeedrunError(f"{who} ended with exit code {done.returncode}; it said last: {last[:300]}")
    return done.stdout
