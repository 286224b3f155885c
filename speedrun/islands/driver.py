"""A run whose steps are made by islands. The driver holds the weights, scores them, and writes log and snapshots."""

from collections.abc import Callable
from contextlib import ExitStack
from statistics import fmean

import jax
import numpy as np

from speedrun.base import faults, runlog
from speedrun.base import mesh as meshes
from speedrun.base.clock import Stopwatch
from speedrun.base.errors import SpeedrunError
from speedrun.base.signals import Deferred
from speedrun.data.stream import START, Cursor
from speedrun.islands import snapshot
from speedrun.islands.fleet import Fleet, Played
from speedrun.islands.island import config_sha256, weights_of, with_weights
from speedrun.islands.rounds import Engine, Leases, Lost, Weights
from speedrun.islands.snapshot import Snapshot
from speedrun.record import layout
from speedrun.record.reader import load
from speedrun.science.step import TrainState
from speedrun.train.attempt import Attempt, Progress
from speedrun.train.checkpoint import state_hash
from speedrun.train.compile import Executables
from speedrun.train.run_config import RunConfig

_POLL_S = 0.2
_MOST_FAILED = 10  #: rounds in a row that do not count


class Driver:
    """`run.Steps` that a fleet makes: each is a round that counts."""

    def __init__(
        self,
        this: Attempt,
        stopping: Deferred,
        *,
        settings: runlog.Islands,
        engine_of: Callable[[RunConfig], Engine],
        meet_s: float,
    ) -> None:
        """Start the islands, which train as the request says; they have `meet_s` to be ready."""
        self._this, self._stopping, self._settings, self._meet_s = this, stopping, settings, meet_s
        self._engine, self._joined = engine_of(this.ready.config), set[str]()
        self._engine.islands()

    def begin(
        self, programs: Executables, state: TrainState, at: Progress, held: ExitStack
    ) -> tuple[TrainState, Progress]:
        """Make the fleet, or restore it; wait for the islands."""
        this, ready, self._planned = self._this, self._this.ready, programs.planned
        given = self._settings, config_sha256(ready), [one.batch for one in programs.planned]
        shapes = {one.shape for one in programs.planned}
        lowered = {shape: ready.program.traced_score(shape).lower() for shape in shapes}
        self._scores = {shape: ready.program.compiled(one) for shape, one in lowered.items()}
        self._initial = state
        if not ready.config.resume:
            self._fleet = Fleet(*given, Leases(ready.stream(START)), weights_of(state), self._score)
        else:
            kept = snapshot.load(ready.config.out)
            leases = Leases(ready.stream(kept.cursor), kept.num_granted, kept.returned)
            self._fleet = Fleet(*given, leases, kept.weights, self._score, kept.velocity, kept.version)
            state, at = self._resumed(kept, state)
        this.log.emit(self._settings)
        first = ready.stream(START).batch(*self._fleet.shapes[0])
        this.first_batch_sha256 = layout.sha256(first.tokens_BT.astype("<u2").tobytes())
        this.phases.enter("start")
        self._recruit(self._settings.islands)
        return state, at

    def _score(self, weights: Weights, start: Cursor, step: int) -> float:
        """Return the mean loss of weights on the batch from there, as at a step, in nats."""
        ready, planned = self._this.ready, self._planned[step]
        state = with_weights(ready.program, self._initial, weights, step)
        batch = ready.stream(start).batch(*planned.batch)
        placed = (meshes.shard(x_BT, ready.program.mesh) for x_BT in batch)
        score = self._scores[planned.shape]
        nats_BC = score(state.params, *placed, ready.program.schedule, state.step)
        return float(np.sum(jax.device_get(nats_BC), dtype=np.float64)) / batch.targets_BT.size

    def _resumed(self, kept: Snapshot, state: TrainState) -> tuple[TrainState, Progress]:
        """Log where the run goes on. The last driver may have been killed before it logged the last round."""
        this, step = self._this, self._fleet.step
        state = with_weights(this.ready.program, state, kept.weights, step)
        place = kept.train_time_s, kept.tokens_seen, kept.cursor
        this.log.emit(runlog.Resume(kept.run_id, step, state_hash(state), *place))
        this.clock.resume_at(kept.train_time_s)
        if all(kept.last not in run.of(runlog.Round) for run in load(this.ready.config.out).runs):
            this.log.emit(kept.last)
        return state, Progress(step, kept.tokens_seen, kept.cursor)

    def _recruit(self, wanted: int) -> None:
        """Wait until so many islands are ready, and log who joined; be content with a quorum after `meet_s`."""
        watch, quorum = Stopwatch(), self._settings.quorum
        while len(ready := self._engine.islands()) < wanted and watch.seconds < self._meet_s:
            self._fleet.poll(self._engine, _POLL_S)
            self._stopping.check()
        for name in sorted({*ready} - self._joined):
            self._this.log.emit(runlog.Island(name, self._fleet.version))
        self._joined.update(ready)
        if len(ready) < quorum:
            why = "".join(f"; {one.island}: {one.why}" for one in self._fleet.late if isinstance(one, Lost))
            got = f"{len(ready)} islands were ready within {self._meet_s:g} s, need {quorum}{why}"
            raise SpeedrunError(f"{got}; see to their machines, or raise --meet-within, then --resume")

    def make(self, state: TrainState, at: Progress) -> tuple[TrainState, Progress, None]:
        """Play rounds until one counts, and take its weights."""
        this, fleet = self._this, self._fleet
        for _ in range(_MOST_FAILED):
            self._stopping.check()
            this.phases.enter("step")  # its deadline counts from here
            self._recruit(self._settings.quorum)
            played = fleet.advance(self._engine)
            for one in played.lost:
                this.log.emit(runlog.Island(one.island, played.round.version, one.why))
            tokens_seen = self._keep(played, at.tokens_seen)
            if played.used:
                state = with_weights(this.ready.program, state, fleet.weights, fleet.step)
                return state, Progress(fleet.step, tokens_seen, fleet.leases.stream.cursor), None
        got = f"{_MOST_FAILED} rounds in a row had fewer than {self._settings.quorum} answers"
        raise SpeedrunError(f"{got}; the log says why; raise --deadline in a new run")

    def _keep(self, played: Played, seen: int) -> int:
        """Write the snapshot, then the log: the other way round, a restarted driver would log a round twice.

        Return the tokens seen, which were `seen` before the round.
        """
        this, fleet, used = self._this, self._fleet, played.used
        tokens_seen = seen + sum(one.num_tokens for one in used)
        this.ranges = fleet.leases.stream.ranges
        faults.point("round")
        if used:
            leases = fleet.leases
            where = fleet.version, leases.stream.cursor, leases.num_granted, leases.returned
            held = tokens_seen, this.clock.seconds, played.round, fleet.weights, fleet.velocity
            snapshot.save(Snapshot(this.ready.config, self._settings, this.run_id, *where, *held))
            faults.point("snapshot")
        this.log.emit(played.round, hold=bool(used))
        of_steps = zip(*(one.losses for one in used), strict=True)
        for step, losses in enumerate(of_steps, played.round.version * self._settings.every):
            size = len(used) * self._planned[step].num_tokens
            seen += size
            read = size, seen, fleet.leases.stream.cursor
            inputs, is_last = self._planned[step].inputs, step + 1 == fleet.step
            event = runlog.Step(step, this.clock.seconds, fmean(losses), *read, inputs=inputs)
            this.log.emit(event, hold=not is_last)
        return tokens_seen

    def drain(self) -> None:
        """Nothing is read between rounds."""
