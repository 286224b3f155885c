"""The training loop: compile, warm up, train under the clock, score. The host dispatches once for each step.

Programs are compiled and warmed up on random ids, and the state is built again. Then the clock starts, and only then
is the first token read. A loss is fetched while the next step runs.
"""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager

import jax
import numpy as np

from speedrun.data import stream
from speedrun.ground import faults, processes, runlog, signals
from speedrun.ground import mesh as meshes
from speedrun.ground.clock import cold_wall_s
from speedrun.ground.errors import NonFiniteError, SpeedrunError
from speedrun.ground.output import text_of
from speedrun.ledger import format
from speedrun.training import health
from speedrun.training.evaluate import evaluate
from speedrun.training.fingerprint import state_hash
from speedrun.training.outcome import data_read
from speedrun.training.program import inspect
from speedrun.training.save_and_resume import resume, save, saved_if_stopped
from speedrun.training.trainer import Pending, Place, Trainer
from speedrun.training.warmup import Executables, compile_all, warm_up


def run(trainer: Trainer) -> None:
    """Compile, warm up, train and score."""
    executables = _set_up(trainer)
    mesh, schedule = trainer.ready.program.mesh, trainer.ready.program.schedule
    throttled_s = health.throttled_s(mesh)
    with closing(_feed(trainer, executables)) as feed, _clocked(trainer):
        for step, batches in feed:
            _before_step(trainer, executables, step, batches)
            batch = _next_batch(trainer, executables, step, batches)
            tokens_BT, targets_BT = (meshes.place(x, mesh) for x in batch)
            train_step = executables.steps[executables.planned[step].shape]
            trainer.state, metrics = train_step(trainer.state, tokens_BT, targets_BT, schedule)
            _report(trainer, executables)  # of the previous step: the devices are busy with this one
            # Gather the flags now: queued after the next step, the gather would wait for it.
            trainer.pending = Pending(step, metrics._replace(bad=meshes.whole(metrics.bad)), batches.cursor)
            trainer.place = Place(step + 1, batches.cursor)
        _finish(trainer, executables, throttled_s)
    with processes.handled_by(signals.ignore):  # the result is known, and must not be lost
        trainer.tally.final_hash = processes.agreed(
            lambda: state_hash(trainer.state),
            lambda found: {"the final state": f"of hash {found}"},
            otherwise="replicas drifted apart, so a device computes wrongly; run 'speedrun doctor' on each node",
            refuse=SpeedrunError,
        )
        _measure_again(trainer)


def _measure_again(trainer: Trainer) -> None:
    """Repeat the bench of the preflight: other programs may have come or gone since. It may fail."""
    try:
        trainer.tally.matmul_gflops = health.matmul_gflops(trainer.ready.program.mesh)
    except jax.errors.JaxRuntimeError as error:
        trainer.log.emit(runlog.Warning(f"no bench after the run: {text_of(error)}"), hold=True)


def _set_up(trainer: Trainer) -> Executables:
    """Compile, warm up and, for a resumed run, restore a checkpoint."""
    program, seed = trainer.ready.program, trainer.ready.config.seed
    inspect(program.init.lower(jax.random.key(0)).as_text())
    trainer.state = signals.interruptible(lambda: program.init(jax.random.key(seed)))
    trainer.phases.enter("compile")
    executables = compile_all(trainer)
    trainer.stopping.check()
    trainer.phases.enter("warm-up")
    warm_up(trainer, executables)
    trainer.stopping.check()
    if trainer.checkpoints is not None:
        trainer.phases.enter("checkpoint")
        if trainer.ready.config.resume:
            resume(trainer)
        trainer.checkpoints.rehearse(trainer.state)
    return executables


@contextmanager
def _clocked(trainer: Trainer) -> Iterator[None]:
    """Run the block under the clock: implicit transfers disallowed, compilations logged, signals deferred."""
    with (
        jax.transfer_guard("disallow"),
        _compilations(trainer.log),
        processes.handled_by(trainer.stopping),
        saved_if_stopped(trainer),
    ):
        trainer.phases.enter("step")
        trainer.clock.start(trainer.sync)
        trainer.log.emit(runlog.ClockStart())
        faults.point("clock")
        yield


def _feed(trainer: Trainer, executables: Executables) -> Generator[tuple[int, stream.Prefetch], None, None]:
    """Yield the number of each step, with the stream of its batch. Each stage has its own batch size."""
    start, tally = trainer.place, trainer.tally
    shapes = [planned.batch for planned in executables.planned[start.step :]]
    tokens = trainer.ready.stream(start.cursor, process=processes.index(), num_processes=processes.count())
    with stream.Prefetch(tokens, shapes) as batches:
        try:
            for step in range(start.step, len(executables.planned)):
                yield step, batches
        finally:  # also recorded when the run breaks off
            tally.data_wait_s, tally.ranges = batches.wait_s, batches.ranges


def _before_step(trainer: Trainer, executables: Executables, step: int, batches: stream.Prefetch) -> None:
    """Make checkpoints and validations that are due; stop here if a signal was received."""
    is_due = trainer.checkpoints is not None and trainer.checkpoints.is_due(step)
    validates = trainer.ready.track.validates_at(step)
    if trainer.stopping.requested or is_due or validates:
        _report(trainer, executables)
        trainer.place = Place(step, batches.cursor)
        if is_due:
            save(trainer)
        trainer.stopping.check()
    if validates:
        batches.drain()
        with trainer.clock.paused(trainer.sync):
            trainer.log.emit(runlog.ClockPause("validation", trainer.clock.seconds))
            _validate(trainer, executables, step)
        trainer.log.emit(runlog.ClockResume(trainer.clock.seconds))
    _log_stage_change(executables, step, trainer.log)
    faults.point("step")


def _next_batch(
    trainer: Trainer, executables: Executables, step: int, batches: stream.Prefetch
) -> stream.Batch:
    """Return the batch of a step; record the digest of the first one."""
    with trainer.phases.within("data"):
        faults.point("data")
        batch = next(batches)
    if not trainer.tally.first_batch_sha256:
        of_all = batch
        if processes.count() > 1:  # with the rows of other processes
            of_all = trainer.ready.stream(trainer.place.cursor).batch(*executables.planned[step].batch)
        trainer.tally.first_batch_sha256 = format.sha256(of_all.tokens_BT.astype("<u2").tobytes())
    return batch


def _finish(trainer: Trainer, executables: Executables, throttled_s: float | None) -> None:
    """Stop the clock and score the final state."""
    ready, tally = trainer.ready, trainer.tally
    _report(trainer, executables)
    trainer.clock.stop(trainer.sync)
    trainer.log.emit(runlog.ClockStop(trainer.clock.seconds))
    trainer.phases.enter("end")
    # These come before the result, so that little is left to do after it.
    tally.throttled_s = health.throttled_s(ready.program.mesh, since_s=throttled_s)
    tally.read = processes.agreed(
        lambda: data_read(trainer), lambda read: {s.name: s.sha256 for s in read.shards}
    )
    save(trainer)
    _validate(trainer, executables, len(executables.planned))
    tally.cold_wall_s = cold_wall_s()
    save(trainer, wait=True)


def _report(trainer: Trainer, executables: Executables) -> None:
    """Fetch and log the pending step."""
    if trainer.pending is None:
        return
    (step, metrics, cursor), trainer.pending = trainer.pending, None
    loss, bad = (float(np.sum(x)) for x in jax.device_get((metrics.loss, metrics.bad)))
    planned, tally = executables.planned[step], trainer.tally
    batch_tokens = planned.batch.num_sequences * planned.batch.seq_len
    tally.tokens_seen += batch_tokens
    if bad or not np.isfinite(loss):
        leaf = trainer.ready.program.step.first_nonfinite(metrics)
        raise NonFiniteError(
            f"step {step}: loss is {loss}; first non-finite gradient: {leaf}; lower the learning rate"
        )
    place = batch_tokens, tally.tokens_seen, cursor
    trainer.log.emit(runlog.Step(step, trainer.clock.seconds, loss, *place, inputs=planned.inputs))


def _validate(trainer: Trainer, executables: Executables, step: int) -> None:
    """Score the track's validation tokens and log the result. The state must not change."""
    ready, state = trainer.ready, trainer.state
    with trainer.phases.within("evaluation"):
        before = state_hash(state)
        shard, num_tokens = ready.shards.val[0], ready.track.data.val_tokens
        score = executables.score_at[step]
        val = evaluate(ready.program, score, state, shard, num_tokens, trainer.stopping.check)
        trainer.tally.val_s += val.seconds
        at = int(jax.device_get(state.step))
        if (after := state_hash(state)) != before:
            raise SpeedrunError(f"validation at step {at}: the state was {before} before and is {after} now")
        if not np.isfinite(val.nll_sum):
            raise NonFiniteError(f"validation at step {at}: loss is {val.loss}; lower the learning rate")
        is_result = at == ready.recipe.num_steps  # written together with the end of the run
        line = runlog.Val(at, val.loss, val.tokens, val.nll_sum.hex(), val.seconds)
        trainer.log.emit(line, hold=is_result)
        trainer.tally.val_loss = val.loss


def _log_stage_change(executables: Executables, step: int, log: runlog.RunLog) -> None:
    """Log a change of stage, or of an input that is an integer, such as a window."""
    before, now = executables.planned[max(0, step - 1)], executables.planned[step]
    changed = {k: int(v) for k, v in now.inputs.items() if type(v) is int and v != before.inputs[k]}
    if before.stage != now.stage or changed:
        log.emit(runlog.StageChange(step, now.stage, changed))


def _compilations(log: runlog.RunLog) -> ExitStack:
    """Log every compilation inside the block. There should be none."""

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            log.emit(runlog.Compile("inside the clock", duration_secs))

    jax.monitoring.register_event_duration_secs_listener(listen)
    stack = ExitStack()
    stack.callback(jax.monitoring.unregister_event_duration_listener, listen)
    return stack
