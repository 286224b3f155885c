"""A whole run in one function: compile, warm up, train under the clock, score.

Programs are warmed up on random ids, and the state is built again. No token is read before the clock starts.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol

import jax
from msgspec.structs import replace

from speedrun.base import faults, messages, processes, runlog, signals
from speedrun.base import mesh as meshes
from speedrun.base.clock import Stopwatch, cold_wall_s
from speedrun.base.errors import SpeedrunError, Terminated
from speedrun.data import stream
from speedrun.record import layout
from speedrun.science.step import StepMetrics, TrainState
from speedrun.train import device_benchmark
from speedrun.train.attempt import Attempt, Progress
from speedrun.train.checkpoint import CheckpointFacts, described, state_hash
from speedrun.train.compile import Executables, compilations, compile_all, initial, restored, warm_up
from speedrun.train.export_programs import export_to_record
from speedrun.train.program import evaluate, finite, finite_step


class Pending(NamedTuple):
    """A dispatched step whose metrics are not fetched."""

    metrics: StepMetrics
    after: Progress


class Steps(Protocol):
    """Makes the steps of a run: a `Mesh`, or several that another room brings."""

    def begin(
        self, programs: Executables, state: TrainState, at: Progress, held: ExitStack
    ) -> tuple[TrainState, Progress]:
        """Prepare all steps, before the clock; return where the run begins. `held` ends with the run."""
        ...

    def make(self, state: TrainState, at: Progress) -> tuple[TrainState, Progress, Pending | None]:
        """Make a step, or several; return what is to be logged one step later, or None if all is logged."""
        ...

    def drain(self) -> None:
        """Wait until nothing is being read: the clock is about to pause."""


#: Is called first, as other meshes compile at the same time.
Maker = Callable[[Attempt, signals.Deferred], Steps]


def run(this: Attempt, steps: Maker) -> None:
    """Train and score; write the log but for its first and last events."""
    ready, log, clock, stopping = this.ready, this.log, this.clock, processes.deferred_stop()
    every, validates_at = ready.config.checkpoint_every, ready.track.validates_at
    pending: Pending | None = None

    def sync() -> None:
        """Wait until all devices are done, in all processes."""
        jax.device_get(jax.block_until_ready(state).step)
        processes.barrier()

    train = steps(this, stopping)
    with ExitStack() as held:
        state = initial(this)
        this.phases.enter("compile")
        if processes.is_first():
            export_to_record(ready, log)
        programs = compile_all(this)
        stopping.check()
        this.phases.enter("warm-up")
        state = warm_up(this, programs, state)
        stopping.check()
        state, at = train.begin(programs, *restored(this, state), held)
        throttled_s = device_benchmark.throttled_s(ready.program.mesh)
        with under_clock(this, stopping, lambda: save(this, state, at, wait=True)):
            clock.start(sync)
            log.emit(runlog.ClockStart())
            faults.point("clock")
            while at.step < ready.recipe.num_steps:
                is_due = every > 0 and at.step > 0 and at.step % every == 0
                if stopping.requested or is_due or validates_at(at.step):
                    pending = report(this, programs, pending)
                    if is_due:
                        save(this, state, at)
                    stopping.check()
                if validates_at(at.step):
                    train.drain()
                    with clock.paused(sync):
                        log.emit(runlog.ClockPause("validation", clock.seconds))
                        score(this, programs, state, at.step, stopping.check)
                    log.emit(runlog.ClockResume(clock.seconds))
                faults.point("step")
                state, at, started = train.make(state, at)
                report(this, programs, pending)  # of the step before: the devices are busy with this one
                pending = started
            report(this, programs, pending)
            clock.stop(sync)
            log.emit(runlog.ClockStop(clock.seconds))

            this.phases.enter("end")
            # Before the result, so that little can fail after it.
            this.throttled_s = device_benchmark.throttled_s(ready.program.mesh, since_s=throttled_s)
            this.read = processes.all_processes_agree(
                lambda: ready.data_read(this.ranges), lambda read: {s.name: s.sha256 for s in read.shards}
            )
            save(this, state, at)
            score(this, programs, state, at.step, stopping.check)
            this.cold_wall_s = cold_wall_s()
            save(this, state, at, wait=True)
    with processes.handled_by(signals.ignore):  # do not lose the result
        this.final_hash = hash_of_all(state)
        this.matmul_gflops = device_benchmark.matmul_gflops_again(ready.program.mesh, log)
        score_held_out(this, programs, state)


class Mesh:
    """The steps of a run on the mesh of its processes."""

    def __init__(self, this: Attempt, _: signals.Deferred) -> None:
        self._this = this

    def begin(
        self, programs: Executables, state: TrainState, at: Progress, held: ExitStack
    ) -> tuple[TrainState, Progress]:
        """Open the stream; nothing is read before the first step."""
        self._programs = programs
        share = {"process": processes.index(), "num_processes": processes.count()}
        tokens = self._this.ready.stream(at.cursor, **share)
        batches = stream.Prefetch(tokens, [each.batch for each in programs.planned[at.step :]])
        self._batches = held.enter_context(batches)
        return state, at

    def make(self, state: TrainState, at: Progress) -> tuple[TrainState, Progress, Pending]:
        """Read a batch and dispatch its step."""
        this, batches, planned = self._this, self._batches, self._programs.planned[at.step]
        log_stage_change(self._programs, at.step, this.log)
        with this.phases.within("data"):
            faults.point("data")
            batch = next(batches)
            this.data_wait_s, this.ranges = batches.wait_s, batches.ranges
        if not this.first_batch_sha256:  # with the rows of other processes
            whole = batch if processes.count() == 1 else this.ready.stream(at.cursor).batch(*planned.batch)
            this.first_batch_sha256 = layout.sha256(whole.tokens_BT.astype("<u2").tobytes())
        tokens_BT, targets_BT = (meshes.shard(x, this.ready.program.mesh) for x in batch)
        train_step, schedule = self._programs.steps[planned.shape], this.ready.program.schedule
        state, metrics = train_step(state, tokens_BT, targets_BT, schedule)
        # Gather the flags now: queued after the next step, the gather would wait for it.
        metrics = metrics._replace(bad=meshes.replicated(metrics.bad))
        after = Progress(at.step + 1, at.tokens_seen + planned.num_tokens, batches.cursor)
        return state, after, Pending(metrics, after)

    def drain(self) -> None:
        """Wait until nothing is being read."""
        self._batches.drain()


@contextmanager
def under_clock(this: Attempt, stopping: signals.Deferred, keep: Callable[[], None]) -> Iterator[None]:
    """Inside the block, disallow implicit transfers, log compilations and defer signals; `keep` the state at one."""
    with jax.transfer_guard("disallow"), compilations(this.log), processes.handled_by(stopping):
        try:
            this.phases.enter("step")
            yield
        except Terminated:  # raised only between steps
            keep()
            raise


def report(this: Attempt, programs: Executables, pending: Pending | None) -> None:
    """Fetch and log a pending step; raise NonFiniteError if its loss, a gradient or an update is not finite."""
    if pending is None:
        return
    after, step = pending.after, pending.after.step - 1
    loss = finite_step(this.ready.program, pending.metrics, f"step {step}")
    planned = programs.planned[step]
    place = planned.num_tokens, after.tokens_seen, after.cursor
    this.log.emit(runlog.Step(step, this.clock.seconds, loss, *place, inputs=planned.inputs))


def score(
    this: Attempt, programs: Executables, state: TrainState, step: int, stop: Callable[[], None]
) -> None:
    """Score the validation tokens, log the result, and check that the state did not change. `stop` may raise."""
    ready, program = this.ready, this.ready.program
    with this.phases.within("evaluation"):
        before = state_hash(state)
        shard, num_tokens = ready.shards.val[0], ready.track.data.val_tokens
        val = evaluate(program, programs.scores[program.eval_shape_at(step)], state, shard, num_tokens, stop)
        this.val_s, where = this.val_s + val.seconds, f"validation at step {val.step}"
        if (after := state_hash(state)) != before:
            raise SpeedrunError(f"{where} changed the state, {before}, to {after}; it may only read it")
        finite(program, val.loss, where)
        is_result = val.step == ready.recipe.num_steps  # written together with the end of the run
        this.log.emit(val if is_result else replace(val, sequences=()), hold=is_result)
        this.val_loss = val.loss


def score_held_out(this: Attempt, programs: Executables, state: TrainState) -> None:
    """Score text of the validation shard that nobody knew before the result was told, as large as the track says."""
    ready, program, step = this.ready, this.ready.program, this.ready.recipe.num_steps
    shard, data = ready.shards.val[0], ready.track.data
    if data.held_tokens:
        with this.phases.within("evaluation"):
            nonce, score = processes.of_first(this.log.nonce), programs.scores[program.eval_shape_at(step)]
            start = data.held_start(nonce, shard.num_tokens)
            val = evaluate(program, score, state, shard, data.held_tokens, start=start)
            finite(program, val.loss, "held-out text")
            this.log.emit(runlog.HeldOut(nonce, val), hold=True)


def save(this: Attempt, state: TrainState, at: Progress, *, wait: bool = False) -> None:
    """Save a checkpoint of this step unless there is one; `wait` until it is on disk."""
    if this.kept is None:
        return
    with this.phases.within("checkpoint"):
        if this.kept.newest != at.step:
            train_time_s, watch = this.clock.seconds, Stopwatch()
            digest = layout.config_sha256(this.ready.described)
            done = at.cursor, at.tokens_seen, train_time_s
            this.kept.save(state, CheckpointFacts(at.step, this.run_id, digest, *done, described(state)))
            this.log.emit(runlog.Checkpoint(at.step, state_hash(state), watch.seconds))
        if wait:
            this.kept.settle()


def log_stage_change(programs: Executables, step: int, log: messages.Log) -> None:
    """Log a change of stage, or of an input that is an integer, such as a window."""
    before, now = programs.planned[max(0, step - 1)], programs.planned[step]
    changed = {k: int(v) for k, v in now.inputs.items() if type(v) is int and v != before.inputs[k]}
    if before.stage != now.stage or changed:
        log.emit(runlog.StageChange(step, now.stage, changed))


def hash_of_all(state: TrainState) -> str:
    """Return the hash of the final state, the same in all processes."""
    return processes.all_processes_agree(
        lambda: state_hash(state),
        lambda found: {"the final state": f"of hash {found}"},
        otherwise="replicas drifted apart, so a device computes wrongly; run 'speedrun doctor' on each node",
        refuse=SpeedrunError,
    )
