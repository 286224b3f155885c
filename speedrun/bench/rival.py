"""Our training step and a stranger's in turns, ABBA, on the same tokens.

The stranger is a folder with an executable `run`, which is called as

    run --shards DIR --steps N --first-step I --sequences N --seq-len N

It trains from its own starting state on the first N batches of DIR (`*_train_*.bin`, read in order: `data.stream` has
the rule), with the schedule of the whole record from step I on, and writes a line of JSON to standard output for each
step: {"step": i, "time_s": seconds since the first of them began, "loss": nats per token}. It compiles and warms up
before the first. Other lines are passed over. It stays in the process group that it was started in.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from speedrun.ground.errors import SpeedrunError, UsageError

_POINTS = 12  #: of the curve


class Curve(NamedTuple):
    """One run of either."""

    who: str
    ms: list[float]  #: of each step
    losses: list[float]


class Line(msgspec.Struct):
    """What the stranger says of a step."""

    step: int
    time_s: float
    loss: float


def ours(argv: Sequence[str]) -> Curve:
    """Runs `speedrun bench step --json`.

    Raises:
        SpeedrunError: if it fails; with its last line.
    """
    said = msgspec.json.decode(_said("ours", argv))
    return Curve("ours", said["ms"], said["losses"])


def theirs(argv: Sequence[str], num_steps: int) -> Curve:
    """Runs the stranger.

    Raises:
        SpeedrunError: if it fails, with its last line; or if it told of other steps than it was asked for.
    """
    lines = []
    for text in _said("the rival", argv).splitlines():
        try:
            lines.append(msgspec.json.decode(text, type=Line))
        except msgspec.DecodeError:
            continue  # whatever else it says
    if len(lines) != num_steps:
        raise SpeedrunError(
            f"the rival told of {len(lines)} steps, need {num_steps}; a line of JSON for each: step, time_s, loss"
        )
    return Curve(
        "rival", (1e3 * np.diff([0.0, *(line.time_s for line in lines)])).tolist(), [x.loss for x in lines]
    )


def executable(folder: Path) -> Path:
    """The stranger's program.

    Raises:
        UsageError: if there is none.
    """
    path = folder.absolute() / "run"
    if not path.is_file() or not path.stat().st_mode & 0o100:
        raise UsageError(f"{path} is no executable file; need one that trains; see speedrun/bench/rival.py")
    return path


def compared(runs: Sequence[Curve]) -> dict[str, Any]:
    """Ratio and curves of runs in the order ours, rival, rival, ours."""
    ms = [median(one.ms) for one in runs]
    ours_ms, rival_ms = (ms[0], ms[3]), (ms[1], ms[2])
    pairs = sorted(a / b for a, b in zip(ours_ms, rival_ms, strict=True))
    num_steps = len(runs[0].losses)
    shown = sorted({round(i * (num_steps - 1) / (_POINTS - 1)) for i in range(_POINTS)})
    return {
        "ratio": sum(ours_ms) / sum(rival_ms),
        "ratio_least": pairs[0],
        "ratio_most": pairs[1],
        "ours_ms": list(ours_ms),
        "rival_ms": list(rival_ms),
        "curve": [{"step": i, "ours": runs[0].losses[i], "rival": runs[1].losses[i]} for i in shown],
        "runs": [one._asdict() for one in runs],
    }


def _said(who: str, argv: Sequence[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
        last = lines[-1] if lines else "nothing"
        raise SpeedrunError(f"{who} ended with exit code {done.returncode}; it said last: {last[:300]}")
    return done.stdout
