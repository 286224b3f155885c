"""Saving a run in checkpoints, and resuming from them."""

from collections.abc import Iterator
from contextlib import contextmanager

from speedrun.data import stream
from speedrun.ground import runlog
from speedrun.ground.clock import Stopwatch
from speedrun.ground.errors import Terminated
from speedrun.ledger import format
from speedrun.training import checkpoint
from speedrun.training.fingerprint import state_hash
from speedrun.training.outcome import latest, lost_s
from speedrun.training.trainer import Place, Trainer


@contextmanager
def saved_if_stopped(trainer: Trainer) -> Iterator[None]:
    """Save a checkpoint if the run is stopped. `Terminated` is raised only between steps."""
    try:
        yield
    except Terminated:
        save(trainer, wait=True)
        raise


def save(trainer: Trainer, *, wait: bool = False) -> None:
    """Save a checkpoint of the current step, unless it is already saved; `wait` until it is on disk.

    All losses must be reported first.
    """
    if trainer.checkpoints is None:
        return
    with trainer.phases.within("checkpoint"):
        if trainer.checkpoints.newest != trainer.place.step:
            _write(trainer, trainer.checkpoints)
        if wait:
            trainer.checkpoints.settle()


def resume(trainer: Trainer) -> None:
    """Resume from the newest checkpoint; without one, keep the fresh state."""
    ready, out, checkpoints = trainer.ready, trainer.ready.config.out, trainer.checkpoints
    assert checkpoints is not None
    if not checkpoints.steps:
        if run_id := latest(out, trainer.run_id):
            trainer.log.emit(runlog.Resume(run_id, 0, state_hash(trainer.state), 0.0, 0, stream.START))
        return
    trainer.state, old = checkpoints.restore(
        ready.program,
        format.config_sha256(ready.described),
        say=lambda text: trainer.log.emit(runlog.Warning(text)),
    )
    trainer.place = Place(old.step, stream.Cursor(*old.cursor))
    trainer.clock.resume_at(old.train_time_s)
    trainer.tally.tokens_seen = old.tokens_seen
    trainer.tally.lost_s = lost_s(out, old.step)
    resumed = old.run_id, old.step, state_hash(trainer.state), old.train_time_s, old.tokens_seen, old.cursor
    trainer.log.emit(runlog.Resume(*resumed))


def _write(trainer: Trainer, checkpoints: checkpoint.Checkpoints) -> None:
    """Write a checkpoint, and log it."""
    watch, place, state = Stopwatch(), trainer.place, trainer.state
    facts = checkpoint.Facts(
        step=place.step,
        run_id=trainer.run_id,
        config_sha256=format.config_sha256(trainer.ready.described),
        cursor=place.cursor,
        tokens_seen=trainer.tally.tokens_seen,
        train_time_s=trainer.clock.seconds,
        arrays=checkpoint.described(state),
    )
    checkpoints.save(state, facts)
    trainer.log.emit(runlog.Checkpoint(place.step, state_hash(state), watch.seconds))
