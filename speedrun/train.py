"""The loop: one run of one recipe on one track, under the clock, into one log.

    python -m speedrun.train CONFIG.json      what `speedrun replay` calls on an unpacked `source.txt`

Order of things: everything that can be refused is refused; then the folder is made; then programs are
compiled and warmed up on synthetic ids and the state is built anew; then the clock starts, and only then
the first token is read.
"""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from speedrun import console, health, provenance, recipes, runlog
from speedrun import mesh as meshes
from speedrun import track as tracks
from speedrun.clock import Clock, Stopwatch, cold_wall_s, now
from speedrun.data import shards, stream
from speedrun.errors import NonFiniteError, SpeedrunError, UsageError
from speedrun.evaluate import Score, evaluate
from speedrun.ledger import format
from speedrun.params import count
from speedrun.recipe import Recipe, describe
from speedrun.step import Program, StepMetrics, TrainState, state_hash

_WARMUP_STEPS = 2


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run was asked to do. With `source.txt` and the data it is all that a replay needs."""

    track: str
    out: Path  #: the record folder; must not exist
    recipe: str | None = None  #: None: the track's own
    seed: int = 0
    overrides: dict[str, str] = {}  #: settings of the recipe, by dotted name
    data: Path | None = None  #: folder of shards; None: the track's own
    num_devices: int | None = None  #: None: what the track asks for, or all there are
    microbatches: int | None = None  #: None: one for each device of a full node


@dataclass(frozen=True)
class Ready:
    """Everything a run needs, checked; nothing written yet."""

    config: RunConfig
    track: tracks.Track
    recipe: Recipe
    program: Program
    shards: shards.TrackShards
    folder: Path
    source: str

    @property
    def source_sha256(self) -> str:
        """Digest of the source closure."""
        return format.sha256(self.source.encode())

    @property
    def described(self) -> dict[str, Any]:
        """The resolved recipe and how it was split over devices, as JSON."""
        return {
            "recipe": describe(self.recipe),
            "num_devices": self.program.num_devices,
            "microbatches": self.program.microbatches,
        }


@dataclass
class Tally:
    """What accumulates during a run and ends up in `run_end` and `run.json`."""

    compile_s: float = 0.0
    warmup_s: float = 0.0
    val_s: float = 0.0
    data_wait_s: float = 0.0
    init_hash: str = ""
    final_hash: str = ""
    val_loss: float | None = None
    first_loss: float | None = None
    first_batch_sha256: str | None = None
    tokens_seen: int = 0
    peak_bytes: int = 0
    ranges: tuple[stream.ShardRange, ...] = ()


def prepare(config: RunConfig) -> Ready:
    """Checks everything that can be wrong with a run before anything is written or compiled.

    Raises:
        UsageError: unknown track, recipe or setting; device count; output folder.
        DataError: shards missing, damaged, foreign or too short.
    """
    track = tracks.load(config.track)
    recipe = recipes.load(config.recipe or track.recipe).override(config.overrides)
    if config.out.exists():
        raise UsageError(f"{config.out} exists already; need a new folder; remove it or pass another --out")
    meshes.prepare(track.rules.platform)
    num_devices = config.num_devices or track.rules.num_devices or len(jax.devices())
    mesh = meshes.make_mesh(num_devices)
    program = Program(recipe, mesh, *([config.microbatches] if config.microbatches else []))
    folder = shards.data_folder(track, config.data)
    opened = shards.open_track(folder, track.data)
    needed = recipe.config.vocab_size
    if needed < track.data.vocab_size:
        raise UsageError(
            f"recipe {recipe.name} knows {needed} ids, {track.id} has {track.data.vocab_size}; choose another"
        )
    stream.require_steps(opened.train, [s.batch_tokens for s in recipe.stages for _ in range(s.num_steps)])
    stream.validation_batches(
        opened.val[0], track.data.val_tokens, recipe.eval_sequences, recipe.eval_seq_len
    )
    source = provenance.closure(
        [f"speedrun.recipes.{config.recipe or track.recipe}", "speedrun.train"],
        [tracks.TRACKS_DIR / f"{track.name}.toml"],
    )
    return Ready(config, track, recipe, program, opened, folder, source)


def train(config: RunConfig, reader: console.Live | None = None) -> format.RunFile:
    """Trains once and writes `source.txt` and `runs/<run id>/` into the record folder.

    Args:
        config: what to run.
        reader: is told every event; the console.

    Returns:
        The facts of the run, as in its `run.json`.

    Raises:
        SpeedrunError: with nothing written, if `prepare` refuses; with an ended log, if the run breaks off.
    """
    ready = prepare(config)
    started = now()
    nonce = hashlib.sha256(f"{started}".encode()).hexdigest()[:4]
    run_id = f"{ready.recipe.name}-{config.seed}-{nonce}"
    run_dir = config.out / "runs" / run_id
    try:
        run_dir.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{run_dir}: {error.strerror}; choose an --out that can be written") from None
    (config.out / "source.txt").write_text(ready.source, encoding="utf-8")
    tally = Tally()
    with runlog.RunLog(run_dir / "metrics.jsonl", now) as log:
        if reader is not None:
            log.subscribe(reader)
        clock, outcome = Clock(), "aborted"
        try:
            _announce(ready, run_id, log)
            _run(ready, log, clock, tally)
            outcome = "finished"
        except NonFiniteError as error:
            outcome = "non-finite"
            log.emit(runlog.Error(outcome, str(error)))
            raise
        except (SpeedrunError, KeyboardInterrupt) as error:
            log.emit(runlog.Error(type(error).__name__, str(error)))
            raise
        finally:
            # Also on the way out of a failure: a run that broke off stays visible in its record.
            tally.peak_bytes = meshes.peak_bytes(ready.program.mesh)
            log.emit(_run_end(ready, outcome, clock, tally))
            text = console.render(runlog.read(run_dir / "metrics.jsonl"))
            (run_dir / "log.txt").write_text(text, encoding="utf-8")
            run_file = _run_file(ready, run_id, started.utc, outcome, tally)
            (run_dir / "run.json").write_bytes(format.encode(run_file))
    return run_file


def _announce(ready: Ready, run_id: str, log: runlog.RunLog) -> None:
    """What is about to run, on what, from which data."""
    track, recipe, mesh = ready.track, ready.recipe, ready.program.mesh
    log.emit(
        runlog.RunStart(
            run_id=run_id,
            track=track.id,
            track_sha256=tracks.sha256(track.name),
            recipe=recipe.name,
            seed=ready.config.seed,
            num_steps=recipe.num_steps,
            source_sha256=ready.source_sha256,
            config=ready.described,
            config_sha256=format.config_sha256(ready.described),
        )
    )
    device = mesh.devices.flat[0]
    log.emit(
        runlog.Preflight(
            platform=device.platform,
            device_kind=device.device_kind,
            num_devices=mesh.size,
            software=provenance.software(),
            environment=provenance.environment(),
            matmul_gflops=health.matmul_gflops(mesh),
        )
    )
    val = ready.shards.val[0]
    log.emit(
        runlog.DataReady(
            folder=ready.folder.name,
            train_shards=[shard.path.name for shard in ready.shards.train],
            val_shard=val.path.name,
            val_tokens=track.data.val_tokens,
            val_sha256=stream.validation_sha256(val, track.data.val_tokens),
        )
    )


def _run(ready: Ready, log: runlog.RunLog, clock: Clock, tally: Tally) -> None:
    """Compiles, warms up, trains and scores."""
    program, track = ready.program, ready.track
    state = program.init(jax.random.key(ready.config.seed))
    steps, score = _compile(ready, state, log, tally)
    state = _warm_up(ready, state, steps, score, log, tally)

    def sync() -> None:
        """All devices are done, and the host knows."""
        jax.device_get(jax.block_until_ready(state).step)

    def validate() -> None:
        tally.val_loss = _validate(ready, score, state, log, tally)

    def report(pending: "Pending") -> None:
        """Fetches and logs a finished step; the device is already busy with the next one."""
        step, metrics, cursor = pending
        loss = float(jax.device_get(metrics.loss))
        stage, inputs = ready.recipe.stages[ready.recipe.stage_of(step)], ready.recipe.inputs_at(step)
        tally.tokens_seen += stage.batch_tokens
        tally.first_loss = loss if step == 0 else tally.first_loss
        if not np.isfinite(loss):
            leaf = program.first_nonfinite(metrics)
            raise NonFiniteError(
                f"step {step}: loss is {loss}; first non-finite gradient: {leaf}; lower the learning rate"
            )
        log.emit(
            runlog.Step(
                step=step,
                train_time_s=clock.seconds,
                loss=loss,
                batch_tokens=stage.batch_tokens,
                tokens_seen=tally.tokens_seen,
                cursor=cursor,
                lr_scale=float(inputs.lr_scale),
                window_blocks=int(inputs.window_blocks),
            )
        )

    with jax.transfer_guard("disallow"), _compilations(log):
        clock.start(sync)
        log.emit(runlog.ClockStart())
        pending: Pending | None = None
        for step, batches in _batches(ready, tally):
            if track.validates_at(step):
                if pending is not None:
                    report(pending)
                    pending = None
                batches.drain()
                with clock.paused(sync):
                    log.emit(runlog.ClockPause("validation", clock.seconds))
                    validate()
                log.emit(runlog.ClockResume(clock.seconds))
            _log_stage_change(ready, step, log)
            batch = next(batches)
            tokens_BT, targets_BT = (meshes.place(x, program.mesh) for x in batch)
            if step == 0:
                tally.first_batch_sha256 = format.sha256(batch.tokens_BT.astype("<u2").tobytes())
            state, metrics = steps[ready.recipe.stage_of(step)](
                state, tokens_BT, targets_BT, program.schedule
            )
            if pending is not None:
                report(pending)
            pending = step, metrics, batches.cursor
        if pending is not None:
            report(pending)
        clock.stop(sync)
        log.emit(runlog.ClockStop(clock.seconds))
        validate()
    tally.final_hash = state_hash(state)


Pending = tuple[int, StepMetrics, stream.Cursor]


def _batches(ready: Ready, tally: Tally) -> Iterator[tuple[int, stream.Prefetch]]:
    """The number of each step, with the stream its batch comes from; each stage has batches of its own size."""
    first, cursor = 0, stream.START
    for stage in ready.recipe.stages:
        tokens = stream.TokenStream(ready.shards.train, cursor)
        with stream.Prefetch(tokens, stage.num_sequences, stage.seq_len) as batches:
            for step in range(first, first + stage.num_steps):
                yield step, batches
        first, cursor = first + stage.num_steps, batches.cursor
        tally.data_wait_s += batches.wait_s
        tally.ranges += batches.ranges


def _log_stage_change(ready: Ready, step: int, log: runlog.RunLog) -> None:
    """Says when another executable or another window begins to be used."""
    if step == 0:
        return
    (stage, window), before = (
        (ready.recipe.stage_of(s), int(ready.recipe.inputs_at(s).window_blocks)) for s in (step, step - 1)
    )
    if (stage, window) != before:
        log.emit(runlog.StageChange(step, stage, window))


def _compilations(log: runlog.RunLog) -> ExitStack:
    """Writes every compilation inside the block into the log: there should be none."""

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event == "/jax/core/compile/backend_compile_duration":
            log.emit(runlog.Compile("inside the clock", duration_secs))

    jax.monitoring.register_event_duration_secs_listener(listen)
    stack = ExitStack()
    stack.callback(jax.monitoring.unregister_event_duration_listener, listen)
    return stack


def _compile(ready: Ready, state: TrainState, log: runlog.RunLog, tally: Tally) -> tuple[list[Any], Any]:
    """One executable for each stage and one for validation, ahead of time."""
    program, recipe = ready.program, ready.recipe

    def compiled(name: str, lowered: Any) -> Any:
        watch = Stopwatch()
        executable = lowered().compile()
        log.emit(runlog.Compile(name, watch.seconds))
        tally.compile_s += watch.seconds
        return executable

    def ids(num_sequences: int, seq_len: int) -> tuple[jax.Array, jax.Array]:
        x_BT = np.zeros((num_sequences, seq_len), np.int32)
        return meshes.place(x_BT, program.mesh), meshes.place(x_BT, program.mesh)

    shapes = list(dict.fromkeys((s.num_sequences, s.seq_len) for s in recipe.stages))
    by_shape = {
        shape: compiled(
            f"train/{shape[0]}x{shape[1]}",
            lambda shape=shape: program.train_step.lower(state, *ids(*shape), program.schedule),
        )
        for shape in shapes
    }
    eval_shape = recipe.eval_sequences, recipe.eval_seq_len
    score = compiled(
        f"eval/{eval_shape[0]}x{eval_shape[1]}",
        lambda: program.eval_step.lower(state.params, *ids(*eval_shape), program.schedule, state.step),
    )
    memory = [executable.memory_analysis() for executable in by_shape.values()]
    log.emit(_plan(ready, state, max(m.temp_size_in_bytes for m in memory)))
    return [by_shape[s.num_sequences, s.seq_len] for s in recipe.stages], score


def _plan(ready: Ready, state: TrainState, temp_bytes: int) -> runlog.Plan:
    """Sizes of the run. FLOPs are 6 for each weight of a matrix or the head: attention scores are not counted."""
    table = ready.program.layout.table
    weights = sum(spec.size for spec in table.values() if spec.group in ("matrix", "head"))
    return runlog.Plan(
        num_params=count(table),
        tokens_per_step=max(stage.batch_tokens for stage in ready.recipe.stages),
        total_tokens=ready.recipe.total_tokens,
        flops_per_token=6.0 * weights,
        state_bytes_per_device=sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)),
        temp_bytes_per_device=temp_bytes,
    )


def _warm_up(
    ready: Ready, state: TrainState, steps: list[Any], score: Any, log: runlog.RunLog, tally: Tally
) -> TrainState:
    """Runs every executable on random ids, then builds the state anew from the seed."""
    program, watch = ready.program, Stopwatch()
    before = state_hash(state)
    log.emit(runlog.WarmupStart(before))
    rng = np.random.default_rng(0)

    def ids(num_sequences: int, seq_len: int) -> list[jax.Array]:
        random = rng.integers(0, ready.track.data.vocab_size, (2, num_sequences, seq_len), np.int32)
        return [meshes.place(x_BT, program.mesh) for x_BT in random]

    for stage, step in zip(ready.recipe.stages, steps, strict=True):
        for _ in range(_WARMUP_STEPS):
            state, _ = step(state, *ids(stage.num_sequences, stage.seq_len), program.schedule)
    score(
        state.params,
        *ids(ready.recipe.eval_sequences, ready.recipe.eval_seq_len),
        program.schedule,
        state.step,
    )
    state = program.init(jax.random.key(ready.config.seed))
    tally.init_hash = state_hash(state)
    tally.warmup_s = watch.seconds
    log.emit(runlog.WarmupEnd(tally.init_hash, _WARMUP_STEPS * len(steps), watch.seconds))
    return state


def _validate(ready: Ready, score: Any, state: TrainState, log: runlog.RunLog, tally: Tally) -> float:
    """Scores the track's validation tokens and logs the result."""
    val: Score = evaluate(ready.program, score, state, ready.shards.val[0], ready.track.data.val_tokens)
    tally.val_s += val.seconds
    step = int(jax.device_get(state.step))
    if not np.isfinite(val.nll_sum):
        raise NonFiniteError(f"validation at step {step}: loss is {val.loss}; lower the learning rate")
    log.emit(runlog.Val(step, val.loss, val.tokens, val.nll_sum.hex(), val.seconds))
    return val.loss


def _run_end(ready: Ready, outcome: str, clock: Clock, tally: Tally) -> runlog.RunEnd:
    return runlog.RunEnd(
        status=outcome,
        val_loss=tally.val_loss if outcome == "finished" else None,
        train_time_s=clock.seconds,
        cold_wall_s=cold_wall_s(),
        compile_s=tally.compile_s,
        warmup_s=tally.warmup_s,
        val_s=tally.val_s,
        data_wait_s=tally.data_wait_s,
        peak_bytes=tally.peak_bytes,
        final_hash=tally.final_hash,
    )


def _run_file(ready: Ready, run_id: str, created_utc: str, outcome: Any, tally: Tally) -> format.RunFile:
    """The facts of the run."""
    device, val = ready.program.mesh.devices.flat[0], ready.shards.val[0]
    digest = {shard.path.name: shards.sha256(shard.path) for shard in (*ready.shards.train, val)}
    read = tuple(
        format.ShardRange(r.name, digest[r.name], r.shard_tokens, r.start, r.stop) for r in tally.ranges
    )
    val_tokens = ready.track.data.val_tokens
    return format.RunFile(
        run_id=run_id,
        seed=ready.config.seed,
        track=ready.track.id,
        track_sha256=tracks.sha256(ready.track.name),
        recipe=ready.recipe.name,
        recipe_revision=ready.recipe.revision,
        overrides=ready.config.overrides,
        config_sha256=format.config_sha256(ready.described),
        source_sha256=ready.source_sha256,
        created_utc=created_utc,
        outcome=outcome,
        init_hash=tally.init_hash,
        final_hash=tally.final_hash,
        first_batch_sha256=tally.first_batch_sha256,
        first_loss=None if tally.first_loss is None else tally.first_loss.hex(),
        platform=device.platform,
        device_kind=device.device_kind,
        num_devices=ready.program.num_devices,
        software=provenance.software(),
        environment=provenance.environment(),
        data=format.DataRead(
            shards=read,
            val_shard=format.ShardRange(val.path.name, digest[val.path.name], val.num_tokens, 0, val_tokens),
            val_sha256=stream.validation_sha256(val, val_tokens),
        ),
        peak_bytes=tally.peak_bytes,
    )


if __name__ == "__main__":
    with console.Live(sys.stdout) as live:
        raw = Path(sys.argv[1]).read_bytes()
        train(msgspec.json.decode(raw, type=RunConfig, dec_hook=lambda kind, value: kind(value)), live)
