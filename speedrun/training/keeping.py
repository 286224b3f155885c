"""Between the loop and its checkpoints: where a run stands, how it goes on, and what is kept if it is stopped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from speedrun.data import stream
from speedrun.ground import runlog
from speedrun.ground.clock import Clock, Stopwatch
from speedrun.ground.errors import Terminated
from speedrun.ledger import runfile
from speedrun.science.step import TrainState
from speedrun.training import checkpoint
from speedrun.training.checkpoint import Checkpoints
from speedrun.training.fingerprint import state_hash
from speedrun.training.outcome import Tally, latest, lost_s
from speedrun.training.prepare import Ready


class Place(NamedTuple):
    """Where a run stands."""

    step: int  #: the next one
    cursor: stream.Cursor  #: of its first token


@contextmanager
def kept_if_stopped(keep: Callable[..., None]) -> Iterator[None]:
    """Keeps the state of a run that was told to stop. It is told between steps only, where the state is whole."""
    try:
        yield
    except Terminated:
        keep(wait=True)
        raise


def go_on(
    ready: Ready, checkpoints: Checkpoints, fresh: TrainState, log: runlog.RunLog, clock: Clock, tally: Tally
) -> tuple[TrainState, Place]:
    """The state of an earlier run, and where in the data it stands; without any checkpoint, the `fresh` one."""
    if not checkpoints.steps:
        if run_id := latest(ready.config.out):
            log.emit(runlog.Resume(run_id, 0, state_hash(fresh), 0.0, 0, stream.START))
        return fresh, Place(0, stream.START)
    state, old = checkpoints.restore(ready.program, runfile.config_sha256(ready.described))
    clock.resume_at(old.train_time_s)
    tally.tokens_seen = old.tokens_seen
    tally.lost_s = lost_s(ready.config.out, old.step)
    log.emit(
        runlog.Resume(old.run_id, old.step, state_hash(state), old.train_time_s, old.tokens_seen, old.cursor)
    )
    return state, Place(old.step, stream.Cursor(*old.cursor))


def save(
    ready: Ready,
    checkpoints: Checkpoints,
    state: TrainState,
    place: Place,
    log: runlog.RunLog,
    clock: Clock,
    tally: Tally,
) -> None:
    """Hands the state to the writer of checkpoints."""
    watch = Stopwatch()
    facts = checkpoint.Facts(
        step=place.step,
        run_id=tally.run_id,
        config_sha256=runfile.config_sha256(ready.described),
        cursor=place.cursor,
        tokens_seen=tally.tokens_seen,
        train_time_s=clock.seconds,
        arrays=checkpoint.described(state),
    )
    checkpoints.save(state, facts)
    log.emit(runlog.Checkpoint(place.step, state_hash(state), watch.seconds))
