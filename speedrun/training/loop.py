"""The loop: compile, warm up, train under the clock, score. One step costs the host one dispatch.

Order of things: programs are compiled and warmed up on synthetic ids and the state is built anew; then the clock
starts, and only then the first token is read. A loss is fetched while the next step runs.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from typing import Any

import jax
import numpy as np

from speedrun.data import stream
from speedrun.ground import faults, processes, runlog, signals
from speedrun.ground import mesh as meshes
from speedrun.ground.clock import Clock, cold_wall_s
from speedrun.ground.errors import NonFiniteError, SpeedrunError
from speedrun.ledger import runfile
from speedrun.science.step import StepMetrics, TrainState
from speedrun.training import health
from speedrun.training.checkpoint import Checkpoints
from speedrun.training.evaluate import Score, evaluate
from speedrun.training.fingerprint import state_hash
from speedrun.training.keeping import Place, go_on, kept_if_stopped, save
from speedrun.training.outcome import Tally, data_read
from speedrun.training.prepare import Ready
from speedrun.training.program import StepShape, inspect
from speedrun.training.warmup import Executables, compile_all, warm_up

Pending = tuple[int, StepMetrics, stream.Cursor]


def run(
    ready: Ready, log: runlog.RunLog, clock: Clock, tally: Tally, checkpoints: Checkpoints | None
) -> None:
    """Compiles, warms up, trains and scores."""
    program, track, stopping = ready.program, ready.track, processes.stopping()
    phases = tally.phases
    inspect(program.init.lower(jax.random.key(0)).as_text())
    state = signals.beside(lambda: program.init(jax.random.key(ready.config.seed)))
    phases.enter("compile")
    executables = compile_all(ready, state, log, tally)
    stopping.check()
    phases.enter("warm-up")
    state = warm_up(ready, state, executables, log, tally)
    stopping.check()
    place = Place(0, stream.START)
    if checkpoints is not None:
        phases.enter("checkpoint")
        if ready.config.resume:
            state, place = go_on(ready, checkpoints, state, log, clock, tally)
        checkpoints.rehearse(state)

    def sync() -> None:
        """All devices are done, and all hosts know."""
        jax.device_get(jax.block_until_ready(state).step)
        processes.barrier()

    def validate(step: int) -> None:
        with phases.within("evaluation"):
            tally.val_loss = _validate(ready, executables.score_at[step], state, log, tally, stopping.check)

    def keep(*, wait: bool = False) -> None:
        """Only when all losses up to here are known to be finite. Can wait until it is on disk."""
        if checkpoints is not None:
            with phases.within("checkpoint"):
                if checkpoints.newest != place.step:
                    save(ready, checkpoints, state, place, log, clock, tally)
                if wait:
                    checkpoints.settle()

    def report(pending: Pending | None) -> None:
        """Fetches and logs a finished step; the device is already busy with the next one."""
        if pending is None:
            return
        step, metrics, cursor = pending
        loss, bad = (float(np.sum(x)) for x in jax.device_get((metrics.loss, metrics.bad)))
        planned = executables.planned[step]
        batch_tokens = planned.shape.num_sequences * planned.shape.seq_len
        tally.tokens_seen += batch_tokens
        tally.first_loss = loss if tally.first_loss is None else tally.first_loss
        if bad or not np.isfinite(loss):
            leaf = program.step.first_nonfinite(metrics)
            raise NonFiniteError(
                f"step {step}: loss is {loss}; first non-finite gradient: {leaf}; lower the learning rate"
            )
        log.emit(
            runlog.Step(
                step=step,
                train_time_s=clock.seconds,
                loss=loss,
                batch_tokens=batch_tokens,
                tokens_seen=tally.tokens_seen,
                cursor=cursor,
                lr_scale=planned.lr_scale,
                window_blocks=planned.window_blocks,
            )
        )

    shapes = [step.shape for step in executables.planned]
    feed = _batches(ready, shapes, tally, place)
    throttled_s = health.throttled_s(program.mesh)
    with (
        jax.transfer_guard("disallow"),
        _compilations(log),
        closing(feed),
        processes.handled_by(stopping),
        kept_if_stopped(keep),
    ):
        phases.enter("step")
        clock.start(sync)
        log.emit(runlog.ClockStart())
        faults.point("clock")
        pending: Pending | None = None
        for step, batches in feed:
            is_due = checkpoints is not None and checkpoints.due(step)
            if stopping.asked or is_due or track.validates_at(step):
                report(pending)
                pending, place = None, Place(step, batches.cursor)
                if is_due:
                    keep()
                stopping.check()
            if track.validates_at(step):
                batches.drain()
                with clock.paused(sync):
                    log.emit(runlog.ClockPause("validation", clock.seconds))
                    validate(step)
                log.emit(runlog.ClockResume(clock.seconds))
            _log_stage_change(executables, step, log)
            faults.point("step")
            phases.enter("data")
            faults.point("data")
            batch = next(batches)
            phases.enter("step")
            tokens_BT, targets_BT = (meshes.place(x, program.mesh) for x in batch)
            if tally.first_batch_sha256 is None:
                tally.first_batch_sha256 = _first_sha256(ready, shapes[step], place, batch)
            train_step = executables.steps[shapes[step]]
            state, metrics = train_step(state, tokens_BT, targets_BT, program.schedule)
            report(pending)
            # At once: behind the next step it would be fetched a step later. In one process it is what it was.
            pending = step, metrics._replace(bad=meshes.whole(metrics.bad)), batches.cursor
            place = Place(step + 1, batches.cursor)
        report(pending)
        clock.stop(sync)
        log.emit(runlog.ClockStop(clock.seconds))
        phases.enter("end")
        # Before the result is known, so that little is left to do after it.
        tally.throttled_s = health.throttled_s(program.mesh, since_s=throttled_s)
        tally.read = processes.agreed(
            lambda: data_read(ready, tally), lambda read: {s.name: s.sha256 for s in read.shards}
        )
        keep()
        validate(len(executables.planned))
        tally.cold_wall_s = cold_wall_s()
        keep(wait=True)
    tally.final_hash = processes.agreed(
        lambda: state_hash(state),
        lambda found: {"the final state": f"of hash {found}"},
        otherwise="replicas drifted apart, so a device computes wrongly; 'speedrun doctor' tells more of each node",
        refuse=SpeedrunError,
    )


def _batches(
    ready: Ready, shapes: list[StepShape], tally: Tally, place: Place
) -> Generator[tuple[int, stream.Prefetch], None, None]:
    """The number of each step, with the stream its batch comes from; each stage has batches of its own size."""
    tokens = stream.TokenStream(
        ready.shards.train, place.cursor, process=processes.index(), num_processes=processes.count()
    )
    with stream.Prefetch(tokens, [shape[:2] for shape in shapes[place.step :]]) as batches:
        try:
            for step in range(place.step, len(shapes)):
                yield step, batches
        finally:  # also when the run breaks off: what was read is told
            tally.data_wait_s, tally.ranges = batches.wait_s, batches.ranges


def _first_sha256(ready: Ready, shape: StepShape, place: Place, batch: stream.Batch) -> str:
    """Digest of the ids of the first batch, with the rows that other processes have of it."""
    if processes.count() > 1:
        batch = stream.TokenStream(ready.shards.train, place.cursor).batch(*shape[:2])
    return runfile.sha256(batch.tokens_BT.astype("<u2").tobytes())


def _log_stage_change(executables: Executables, step: int, log: runlog.RunLog) -> None:
    """Says when another executable or another window begins to be used."""
    before, now = executables.planned[max(0, step - 1)], executables.planned[step]
    if (before.stage, before.window_blocks) != (now.stage, now.window_blocks):
        log.emit(runlog.StageChange(step, now.stage, now.window_blocks))


def _compilations(log: runlog.RunLog) -> ExitStack:
    """Writes every compilation inside the block into the log: there should be none."""

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            log.emit(runlog.Compile("inside the clock", duration_secs))

    jax.monitoring.register_event_duration_secs_listener(listen)
    stack = ExitStack()
    stack.callback(jax.monitoring.unregister_event_duration_listener, listen)
    return stack


def _validate(
    ready: Ready, score: Any, state: TrainState, log: runlog.RunLog, tally: Tally, poll: Callable[[], None]
) -> float:
    """Scores the track's validation tokens and logs the result. The state must be the same afterwards."""
    shard, num_tokens = ready.shards.val[0], ready.track.data.val_tokens
    before = state_hash(state)
    val: Score = evaluate(ready.program, score, state, shard, num_tokens, poll)
    tally.val_s += val.seconds
    step = int(jax.device_get(state.step))
    if (after := state_hash(state)) != before:
        raise SpeedrunError(f"validation at step {step}: the state was {before} before it and is {after} now")
    if not np.isfinite(val.nll_sum):
        raise NonFiniteError(f"validation at step {step}: loss is {val.loss}; lower the learning rate")
    is_result = step == ready.recipe.num_steps  # told with the end of the run: no fault falls between them
    log.emit(runlog.Val(step, val.loss, val.tokens, val.nll_sum.hex(), val.seconds), hold=is_result)
    return val.loss
