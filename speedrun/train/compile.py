"""Before the clock: compiles, warms up, and builds the state again or restores it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from speedrun.base import faults, messages, runlog, signals
from speedrun.base import mesh as meshes
from speedrun.base.clock import Stopwatch
from speedrun.data import stream
from speedrun.record import layout
from speedrun.science.params import count
from speedrun.science.step import TrainState
from speedrun.train import memory
from speedrun.train.attempt import Attempt, Progress
from speedrun.train.checkpoint import state_hash
from speedrun.train.preflight import Ready, shapes_of
from speedrun.train.program import StepShape, finite, finite_step, inspect
from speedrun.train.run_config import folder_of, steps_in

_STEPS = 2  #: of each executable


class Planned(NamedTuple):
    """The plan of a step."""

    shape: StepShape
    stage: int
    batch: stream.Shape
    inputs: dict[str, float]  #: for the log: those that are numbers

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the batch."""
        return self.batch.num_sequences * self.batch.seq_len


class Executables(NamedTuple):
    """All programs of a run and the plan of each step. No code of a recipe runs under the clock."""

    steps: dict[StepShape, Any]
    scores: dict[StepShape, Any]
    planned: tuple[Planned, ...]  #: each step


def initial(this: Attempt) -> TrainState:
    """Return the state of the seed."""
    program, seed = this.ready.program, this.ready.config.seed
    inspect(program.init.lower(jax.random.key(0)).as_text())
    return signals.interruptible(lambda: program.init(jax.random.key(seed)))


def compile_all(this: Attempt) -> Executables:
    """Compile each shape of a step and of a validation; raise UsageError if one needs more memory than a device has."""
    ready, log, program, recipe = this.ready, this.log, this.ready.program, this.ready.recipe
    done: dict[str, Any] = {}

    def compiled(name: str, lowered: Any) -> Any:
        watch = Stopwatch()
        faults.point("compile")
        if (text := lowered.as_text()) in done:
            return done[text]
        with _cache() as answers:
            done[text] = program.compiled(lowered)
        seconds = watch.seconds
        this.compile_s += seconds
        log.emit(runlog.Compile(name, seconds, answers[-1] if answers else "off"))
        return done[text]

    planned = tuple(map(partial(_planned, ready), range(recipe.num_steps), shapes_of(recipe)))
    trained, scored = program.shapes(ready.track.validates_at)
    steps = {shape: compiled(f"train/{shape}", program.traced_step(shape).lower()) for shape in trained}
    scores = {shape: compiled(f"eval/{shape}", program.traced_score(shape).lower()) for shape in scored}
    analyses = [executable.memory_analysis() for executable in (*steps.values(), *scores.values())]
    memory.require(program, max(m.peak_memory_in_bytes for m in analyses))
    log.emit(plan(ready, max(m.temp_size_in_bytes for m in analyses)))
    return Executables(steps, scores, planned)


def _planned(ready: Ready, step: int, batch: stream.Shape) -> Planned:
    row = ready.program.step.plan.rows[step].items()
    inputs = {k: np.asarray(v).item() for k, v in row if np.ndim(v) == 0 and not isinstance(v, str)}
    return Planned(ready.program.shape_at(step), ready.recipe.stage_of(step), batch, inputs)


@contextmanager
def _cache() -> Iterator[list[Literal["hit", "miss"]]]:
    """Collect hits and misses of JAX's persistent cache; there are none if it is off."""
    answers: list[Literal["hit", "miss"]] = []

    def listen(event: str, **_: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            answers.append("hit")
        elif event == "/jax/compilation_cache/cache_misses":
            answers.append("miss")

    jax.monitoring.register_event_listener(listen)
    try:
        yield answers
    finally:
        jax.monitoring.unregister_event_listener(listen)


def compilations(log: messages.Log) -> ExitStack:
    """Log compilations inside the block. There should be none."""

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            log.emit(runlog.Compile("inside the clock", duration_secs))

    jax.monitoring.register_event_duration_secs_listener(listen)
    stack = ExitStack()
    stack.callback(jax.monitoring.unregister_event_duration_listener, listen)
    return stack


def warm_up(this: Attempt, executables: Executables, state: TrainState) -> TrainState:
    """Run each executable on random ids; return a new state from the seed, or raise NonFiniteError."""
    ready, log, watch, program = this.ready, this.log, Stopwatch(), this.ready.program
    log.emit(runlog.WarmupStart(state_hash(state)))
    for shape, step in executables.steps.items():
        for _ in range(_STEPS):
            state, metrics = step(state, *_random_ids(ready, shape), program.schedule)
            metrics = metrics._replace(bad=meshes.replicated(metrics.bad))
            finite_step(program, metrics, f"warm-up of {shape}")
    for shape, score in executables.scores.items():
        nll_BC = meshes.fetch(score(state.params, *_random_ids(ready, shape), program.schedule, state.step))
        finite(program, nll_BC.sum(), f"warm-up of a validation, {shape}")
    del state  # otherwise two states would be in memory
    state = program.init(jax.random.key(ready.config.seed))
    again, num_steps = state_hash(state), _STEPS * len(executables.steps)
    this.warmup_s = watch.seconds
    log.emit(runlog.WarmupEnd(again, num_steps, this.warmup_s))
    return state


def _random_ids(ready: Ready, shape: StepShape) -> list[jax.Array]:
    """Return random tokens and targets, placed like real ones: of 16 ids, for which sampled columns have room."""
    size = 2, shape.num_sequences, shape.seq_len
    pair = np.random.default_rng(0).integers(0, 16, size, np.int32) * (ready.track.data.vocab_size // 16)
    return [meshes.shard_own(x_BT, ready.program.mesh) for x_BT in pair]


def plan(ready: Ready, temp_bytes: int) -> runlog.Plan:
    """Return the sizes of a run; `temp_bytes` are those of its largest program."""
    table = ready.program.layout.table
    return runlog.Plan(
        num_params=count(table),
        tokens_per_step=max(stage.batch_tokens for stage in ready.recipe.stages),
        total_tokens=ready.recipe.total_tokens,
        flops_per_token=memory.flops_per_token(table),
        state_bytes_per_device=memory.state_bytes(ready.program),
        temp_bytes_per_device=temp_bytes,
        kernels={call: f"{one.name}: {one.reason}" for call, one in ready.program.kernels.choices.items()},
        compiler_options=ready.program.compiler_options,
        shapes={name: spec.shape for name, spec in table.items()},
    )


def restored(this: Attempt, state: TrainState) -> tuple[TrainState, Progress]:
    """Return the newest checkpoint of a run that is resumed, or the fresh state; set the clock and the lost time."""
    at = Progress()
    if this.kept is None:
        return state, at
    this.phases.enter("checkpoint")
    out, log = this.ready.config.out, this.log
    if this.ready.config.resume and steps_in(folder_of(out)):
        digest = layout.config_sha256(this.ready.described)
        warn = lambda text: log.emit(runlog.Warning(text))  # noqa: E731
        state, old = this.kept.restore(this.ready.program, digest, say=warn)
        done = old.train_time_s, old.tokens_seen, old.cursor
        log.emit(runlog.Resume(old.run_id, old.step, state_hash(state), *done))
        this.clock.resume_at(old.train_time_s)
        at, this.lost_s = Progress(old.step, old.tokens_seen, old.cursor), lost_s(out, old.step)
    elif this.ready.config.resume and (earlier := _latest(out, but=this.run_id)):
        log.emit(runlog.Resume(earlier, 0, state_hash(state), 0.0, 0, stream.START))
        this.lost_s = lost_s(out, 0)
    this.kept.rehearse(state)
    return state, at


def lost_s(record: Path, step: int) -> float:
    """Return the seconds that earlier processes of a run spent after its checkpoint of `step`; 0: since their start."""
    lost_ns, saved = 0, (runlog.Checkpoint, runlog.Resume)
    for lines in _logs(record).values():
        since = [x for x in lines if isinstance(x.event, saved) and x.event.step == step] or lines[: not step]
        lost_ns += lines[-1].t_mono_ns - since[-1].t_mono_ns if since else 0
    return lost_ns / 1e9


def _latest(record: Path, but: str) -> str:
    """Return the id of the run whose clock began [V306] and that no other goes on from; the latest; or empty."""
    logs = _logs(record)
    logs.pop(but, None)  # on another node it may be missing, or still empty
    begun = {x: log for x, log in logs.items() if {runlog.ClockStart} & {type(line.event) for line in log}}
    goes_on = [line.event for log in begun.values() for line in log if isinstance(line.event, runlog.Resume)]
    left = begun.keys() - {event.run_id for event in goes_on}
    return max(left, key=lambda run_id: begun[run_id][0].t_utc, default="")


def _logs(record: Path) -> dict[str, list[runlog.Line]]:
    return {path.parent.name: [*runlog.read(path)] for path in record.glob("runs/*/metrics.jsonl")}
