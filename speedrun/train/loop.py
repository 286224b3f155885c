"""The training loop: compile, warm up, train under the clock, score.

Programs are warmed up on random ids, and the state is built again. No token is read before the clock starts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
from msgspec.structs import replace

from speedrun.base import faults, processes, runlog, signals
from speedrun.base import mesh as meshes
from speedrun.base.clock import Clock, Phases, Stopwatch, cold_wall_s
from speedrun.base.errors import SpeedrunError, Terminated
from speedrun.data import stream
from speedrun.record import layout
from speedrun.science.step import StepMetrics, TrainState
from speedrun.train import health
from speedrun.train.checkpoint import Checkpoints, Facts, described, state_hash
from speedrun.train.preflight import Ready
from speedrun.train.program import evaluate, finite, finite_step
from speedrun.train.warmup import Executables, Untimed, compilations, set_up


class Pending(NamedTuple):
    """A dispatched step whose metrics are not fetched."""

    step: int
    metrics: StepMetrics
    cursor: stream.Cursor  #: of the token after its batch


@dataclass
class Training:
    """A run and everything that changes while it trains."""

    run_id: str
    ready: Ready
    log: runlog.RunLog
    checkpoints: Checkpoints | None
    phases: Phases = field(default_factory=Phases)
    clock: Clock = field(default_factory=Clock)
    stopping: signals.Deferred = field(default_factory=processes.deferred_stop)
    pending: Pending | None = None
    val_loss: float | None = None
    # For the end of the log.
    final_hash: str = ""
    first_batch_sha256: str = ""
    untimed: Untimed = field(default_factory=Untimed)
    val_s: float = 0.0
    data_wait_s: float = 0.0
    cold_wall_s: float = 0.0  #: 0 until the last validation is done
    throttled_s: float | None = None
    matmul_gflops: float = 0.0  #: measured after the run
    ranges: tuple[runlog.ShardRange, ...] = ()
    read: runlog.DataRead | None = None  #: with the digests of the shards, which take seconds

    def __post_init__(self) -> None:
        self.state: TrainState  # since `set_up`
        self.executables: Executables
        digest = layout.config_sha256(self.ready.described)
        self.place = Facts(0, self.run_id, digest, stream.START, tokens_seen=0, train_time_s=0.0, arrays={})

    def run(self) -> None:
        """Compile, warm up, train and score."""
        self.set_up()
        self.clock.resume_at(self.place.train_time_s)
        throttled_s = health.throttled_s(mesh := self.ready.program.mesh)
        with self._clocked():
            self.train()
            self._finish(throttled_s)
        with processes.handled_by(signals.ignore):  # do not lose the result
            self.final_hash = processes.agreed(
                lambda: state_hash(self.state),
                lambda found: {"the final state": f"of hash {found}"},
                otherwise="replicas drifted apart, so a device computes wrongly; run 'speedrun doctor' on each node",
                refuse=SpeedrunError,
            )
            self.matmul_gflops = health.matmul_gflops_again(mesh, self.log)

    def set_up(self) -> None:
        """Make the state and everything that runs under the clock."""
        given = self.ready, self.checkpoints, self.place, self.log, self.phases, self.stopping, self.untimed
        self.state, self.executables, self.place = set_up(*given)

    def train(self) -> None:
        """Run all steps, with the validations before them."""
        mesh, schedule, start = self.ready.program.mesh, self.ready.program.schedule, self.place
        planned = self.executables.planned
        tokens = self.ready.stream(start.cursor, process=processes.index(), num_processes=processes.count())
        with stream.Prefetch(tokens, [each.batch for each in planned[start.step :]]) as batches:
            try:
                for step in range(start.step, len(planned)):
                    self._before_step(step, batches)
                    batch = self._next_batch(step, batches)
                    tokens_BT, targets_BT = (meshes.place(x, mesh) for x in batch)
                    train_step = self.executables.steps[planned[step].shape]
                    self.state, metrics = train_step(self.state, tokens_BT, targets_BT, schedule)
                    self._report()  # of the previous step: the devices are busy with this one
                    # Gather the flags now: queued after the next step, the gather would wait for it.
                    bad = meshes.whole(metrics.bad)
                    self.pending = Pending(step, metrics._replace(bad=bad), batches.cursor)
                    self.place = replace(self.place, step=step + 1, cursor=batches.cursor)
            finally:  # also for a run that breaks off
                self.data_wait_s, self.ranges = batches.wait_s, batches.ranges

    def end(self, outcome: runlog.Outcome) -> runlog.RunEnd:
        """Return the last event of the log."""
        return runlog.RunEnd(
            status=outcome,
            val_loss=self.val_loss if outcome == "finished" else None,
            train_time_s=self.clock.seconds,
            cold_wall_s=self.cold_wall_s or cold_wall_s(),
            compile_s=self.untimed.compile_s,
            warmup_s=self.untimed.warmup_s,
            val_s=self.val_s,
            data_wait_s=self.data_wait_s,
            peak_bytes=meshes.peak_bytes(self.ready.program.mesh),
            final_hash=self.final_hash,
            data=self.read or self.ready.data_read(self.ranges),
            first_batch_sha256=self.first_batch_sha256,
            throttled_s=self.throttled_s,
            phases={**self.phases.seconds()},
            lost_s=self.untimed.lost_s,
            matmul_gflops=self.matmul_gflops,
        )

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        """Start the clock. Inside the block, disallow implicit transfers, log compilations and defer signals."""
        with jax.transfer_guard("disallow"), compilations(self.log), processes.handled_by(self.stopping):
            try:
                self.phases.enter("step")
                self.clock.start(self._sync)
                self.log.emit(runlog.ClockStart())
                faults.point("clock")
                yield
            except Terminated:  # raised only between steps
                self._save(wait=True)
                raise

    def _sync(self) -> None:
        """Wait until all devices are done, in all processes."""
        jax.device_get(jax.block_until_ready(self.state).step)
        processes.barrier()

    def _before_step(self, step: int, batches: stream.Prefetch) -> None:
        """Save and validate if due; stop if a signal was received."""
        every = self.ready.config.checkpoint_every
        is_due = every > 0 and step > 0 and step % every == 0
        validates = self.ready.track.validates_at(step)
        if self.stopping.requested or is_due or validates:
            self._report()
            self.place = replace(self.place, step=step, cursor=batches.cursor)
            if is_due:
                self._save()
            self.stopping.check()
        if validates:
            batches.drain()
            self._validate_in_pause(step)
        _log_stage_change(self.executables, step, self.log)
        faults.point("step")

    def _next_batch(self, step: int, batches: stream.Prefetch) -> stream.Batch:
        """Return the batch of a step; record the digest of the first one."""
        with self.phases.within("data"):
            faults.point("data")
            batch = next(batches)
        if not self.first_batch_sha256:
            of_all = batch
            if processes.count() > 1:  # include the rows of other processes
                of_all = self.ready.stream(self.place.cursor).batch(*self.executables.planned[step].batch)
            self.first_batch_sha256 = layout.sha256(of_all.tokens_BT.astype("<u2").tobytes())
        return batch

    def _report(self) -> None:
        """Fetch and log the pending step."""
        if self.pending is None:
            return
        (step, metrics, cursor), self.pending = self.pending, None
        loss = finite_step(self.ready.program, metrics, f"step {step}")
        planned = self.executables.planned[step]
        batch_tokens = planned.batch.num_sequences * planned.batch.seq_len
        self.place = replace(self.place, tokens_seen=self.place.tokens_seen + batch_tokens)
        place = batch_tokens, self.place.tokens_seen, cursor
        self.log.emit(runlog.Step(step, self.clock.seconds, loss, *place, inputs=planned.inputs))

    def _validate_in_pause(self, step: int) -> None:
        with self.clock.paused(self._sync):
            self.log.emit(runlog.ClockPause("validation", self.clock.seconds))
            self._validate(step)
        self.log.emit(runlog.ClockResume(self.clock.seconds))

    def _validate(self, step: int) -> None:
        """Score the validation tokens, log the result, and check that the state did not change."""
        ready, state = self.ready, self.state
        with self.phases.within("evaluation"):
            before = state_hash(state)
            shard, num_tokens = ready.shards.val[0], ready.track.data.val_tokens
            score = self.executables.scores[ready.program.eval_shape_at(step)]
            val = evaluate(ready.program, score, state, shard, num_tokens, self.stopping.check)
            self.val_s, where = self.val_s + val.seconds, f"validation at step {val.step}"
            if (after := state_hash(state)) != before:
                raise SpeedrunError(f"{where}: the state was {before} before and is {after} now")
            finite(ready.program, val.loss, where)
            is_result = val.step == ready.recipe.num_steps  # written together with the end of the run
            self.log.emit(val if is_result else replace(val, sequences=()), hold=is_result)
            self.val_loss = val.loss

    def _save(self, *, wait: bool = False) -> None:
        """Save a checkpoint of this step unless there is one; `wait` until it is on disk."""
        if self.checkpoints is None:
            return
        with self.phases.within("checkpoint"):
            if self.checkpoints.newest != self.place.step:
                train_time_s, watch = self.clock.seconds, Stopwatch()
                facts = replace(self.place, train_time_s=train_time_s, arrays=described(self.state))
                self.checkpoints.save(self.state, facts)
                self.log.emit(runlog.Checkpoint(facts.step, state_hash(self.state), watch.seconds))
            if wait:
                self.checkpoints.settle()

    def _finish(self, throttled_s: float | None) -> None:
        """Stop the clock and score the final state."""
        self._report()
        self.clock.stop(self._sync)
        self.log.emit(runlog.ClockStop(self.clock.seconds))
        self.phases.enter("end")
        # Before the result, so that little can fail after it.
        self.throttled_s = health.throttled_s(self.ready.program.mesh, since_s=throttled_s)
        self.read = processes.agreed(
            lambda: self.ready.data_read(self.ranges),
            lambda read: {s.name: s.sha256 for s in read.shards},
        )
        self._save()
        self._validate(len(self.executables.planned))
        self.cold_wall_s = cold_wall_s()
        self._save(wait=True)


def _log_stage_change(executables: Executables, step: int, log: runlog.RunLog) -> None:
    """Log a change of stage, or of an input that is an integer, such as a window."""
    before, now = executables.planned[max(0, step - 1)], executables.planned[step]
    changed = {k: int(v) for k, v in now.inputs.items() if type(v) is int and v != before.inputs[k]}
    if before.stage != now.stage or changed:
        log.emit(runlog.StageChange(step, now.stage, changed))
