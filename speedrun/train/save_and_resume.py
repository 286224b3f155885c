"""Saving a run in a checkpoint, and resuming from the newest one."""

from pathlib import Path
from typing import NamedTuple

from speedrun.base import runlog
from speedrun.base.clock import Stopwatch
from speedrun.data import stream
from speedrun.record import layout
from speedrun.science.step import TrainState
from speedrun.train.checkpoint import Checkpoints, Facts, described, state_hash
from speedrun.train.preflight import Ready


class Place(NamedTuple):
    """The position of a run."""

    step: int  #: the next one
    cursor: stream.Cursor  #: of its first token
    tokens_seen: int = 0
    train_time_s: float = 0.0


BEGINNING = Place(0, stream.START)


def save(
    ready: Ready, checkpoints: Checkpoints, run_id: str, state: TrainState, place: Place, log: runlog.RunLog
) -> None:
    """Write a checkpoint in the background, and log it."""
    watch = Stopwatch()
    digest = layout.config_sha256(ready.described)
    facts = Facts(**place._asdict(), run_id=run_id, config_sha256=digest, arrays=described(state))
    checkpoints.save(state, facts)
    log.emit(runlog.Checkpoint(place.step, state_hash(state), watch.seconds))


def resume(
    ready: Ready, checkpoints: Checkpoints, run_id: str, state: TrainState, log: runlog.RunLog
) -> tuple[TrainState, Place, float]:
    """Return state and place of the newest checkpoint, and the seconds lost after it; without one, the fresh state."""
    out = ready.config.out
    if not checkpoints.steps:
        if earlier := _latest(out, but=run_id):
            log.emit(runlog.Resume(earlier, 0, state_hash(state), 0.0, 0, stream.START))
        return state, BEGINNING, 0.0
    state, old = checkpoints.restore(
        ready.program, layout.config_sha256(ready.described), say=lambda text: log.emit(runlog.Warning(text))
    )
    place = Place(old.step, stream.Cursor(*old.cursor), old.tokens_seen, old.train_time_s)
    done = old.train_time_s, old.tokens_seen, old.cursor
    log.emit(runlog.Resume(old.run_id, old.step, state_hash(state), *done))
    return state, place, lost_s(out, old.step)


def lost_s(record: Path, step: int) -> float:
    """Return the seconds that earlier processes of a run spent after its checkpoint of `step`; they are repeated."""
    lost_ns = 0
    for path in record.glob("runs/*/metrics.jsonl"):
        lines = list(runlog.read(path))
        saved = (runlog.Checkpoint, runlog.Resume)
        since = [x.t_mono_ns for x in lines if isinstance(x.event, saved) and x.event.step == step]
        lost_ns += lines[-1].t_mono_ns - since[-1] if since else 0
    return lost_ns / 1e9


def _latest(record: Path, but: str) -> str:
    """Return the id of the latest run in a record but one; empty if there is no other."""
    logs = {path.parent.name: path for path in record.glob("runs/*/metrics.jsonl")}
    # On another node the log of this run may be missing, or still empty.
    firsts = {run_id: next(runlog.read(path)) for run_id, path in logs.items() if run_id != but}
    return max(firsts, key=lambda run_id: firsts[run_id].t_utc, default="")
