"""A run whose steps are made by islands. The driver holds the weights, scores them, and writes log and snapshots."""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from msgspec.structs import replace

from speedrun.base import faults, runlog
from speedrun.base.clock import Stopwatch
from speedrun.base.errors import SpeedrunError
from speedrun.data.stream import START
from speedrun.islands import snapshot
from speedrun.islands.fleet import Fleet, Played
from speedrun.islands.island import config_sha256, weights_of, with_weights
from speedrun.islands.leases import Leases
from speedrun.islands.rounds import Engine, Lost
from speedrun.islands.snapshot import Snapshot
from speedrun.record import layout
from speedrun.record.reader import load
from speedrun.train.checkpoint import state_hash
from speedrun.train.loop import Training
from speedrun.train.request import RunConfig

_POLL_S = 0.2
_MOST_FAILED = 10  #: rounds in a row that do not count


@dataclass
class Driver(Training):
    """A run of a fleet."""

    settings: runlog.Islands = field(kw_only=True)
    engine_of: Callable[[RunConfig], Engine] = field(kw_only=True)  #: islands that train as the request says
    meet_s: float = field(kw_only=True)  #: time for them to start

    def set_up(self) -> None:
        """Start the islands; compile and warm up meanwhile; make the fleet, or restore it; wait for the islands."""
        ready = self.ready
        self.engine, self.joined = self.engine_of(ready.config), set[str]()
        self.engine.islands()
        super().set_up()
        given = self.settings, config_sha256(ready), [one.batch for one in self.executables.planned]
        if not ready.config.resume:
            self.fleet = Fleet(*given, Leases(ready.stream(START)), weights_of(self.state))
        else:
            kept = snapshot.load(ready.config.out)
            leases = Leases(ready.stream(kept.cursor), kept.num_granted, kept.returned)
            self.fleet = Fleet(*given, leases, kept.weights, kept.velocity, kept.version)
            self._resume(kept)
        self.log.emit(self.settings)
        first = ready.stream(START).batch(*self.fleet.shapes[0])
        self.first_batch_sha256 = layout.sha256(first.tokens_BT.astype("<u2").tobytes())
        self.phases.enter("start")
        self._recruit(self.settings.islands)

    def _resume(self, kept: Snapshot) -> None:
        """Log where the run goes on. The last driver may have been killed before it logged the last round."""
        self._adopt()
        place = kept.train_time_s, kept.tokens_seen, kept.cursor
        self.log.emit(runlog.Resume(kept.run_id, self.fleet.step, state_hash(self.state), *place))
        self.place = replace(self.place, train_time_s=kept.train_time_s, tokens_seen=kept.tokens_seen)
        if all(kept.last not in run.of(runlog.Round) for run in load(self.ready.config.out).runs):
            self.log.emit(kept.last)

    def _recruit(self, wanted: int) -> None:
        """Wait until so many islands are ready, and log who joined; be content with a quorum after `meet_s`."""
        watch, quorum = Stopwatch(), self.settings.quorum
        while len(ready := self.engine.islands()) < wanted and watch.seconds < self.meet_s:
            self.fleet.poll(self.engine, _POLL_S)
            self.stopping.check()
        for name in sorted({*ready} - self.joined):
            self.log.emit(runlog.Island(name, self.fleet.version))
        self.joined.update(ready)
        if len(ready) < quorum:
            why = "".join(f"; {one.island}: {one.why}" for one in self.fleet.late if isinstance(one, Lost))
            got = f"{len(ready)} islands were ready within {self.meet_s:g} s, need {quorum}{why}"
            raise SpeedrunError(f"{got}; see to their machines, or raise --meet-within, then --resume")

    def train(self) -> None:
        """Play all rounds, with the validations before them."""
        failed = 0
        while not self.fleet.is_done:
            self.stopping.check()
            if not failed and self.ready.track.validates_at(self.fleet.step):
                self._adopt()
                self._validate_in_pause(self.fleet.step)
            self.phases.enter("step")  # its deadline counts from here
            self._recruit(self.settings.quorum)
            played = self.fleet.advance(self.engine)
            for one in played.lost:
                self.log.emit(runlog.Island(one.island, played.round.version, one.why))
            self._keep(played)
            failed = 0 if played.used else failed + 1
            if failed == _MOST_FAILED:
                got = f"{failed} rounds in a row had fewer than {self.settings.quorum} answers"
                raise SpeedrunError(f"{got}; the log says why; raise --deadline in a new run")
        self._adopt()

    def _keep(self, played: Played) -> None:
        """Write the snapshot, then the log: the other way round, a restarted driver would log a round twice."""
        fleet, used, seen = self.fleet, played.used, self.place.tokens_seen
        tokens_seen = seen + sum(one.num_tokens for one in used)
        self.place = replace(self.place, tokens_seen=tokens_seen)
        self.ranges = fleet.leases.stream.ranges
        faults.point("round")
        if used:
            leases = fleet.leases
            where = fleet.version, leases.stream.cursor, leases.num_granted, leases.returned
            held = tokens_seen, self.clock.seconds, played.round, fleet.weights, fleet.velocity
            snapshot.save(Snapshot(self.ready.config, self.settings, self.run_id, *where, *held))
            faults.point("snapshot")
        self.log.emit(played.round, hold=bool(used))
        of_steps = zip(*(one.losses for one in used), strict=True)
        for step, losses in enumerate(of_steps, played.round.version * self.settings.every):
            size = len(used) * fleet.shapes[step].num_sequences * fleet.shapes[step].seq_len
            seen += size
            read = size, seen, fleet.leases.stream.cursor
            inputs, is_last = self.executables.planned[step].inputs, step + 1 == fleet.step
            event = runlog.Step(step, self.clock.seconds, fmean(losses), *read, inputs=inputs)
            self.log.emit(event, hold=not is_last)

    def _adopt(self) -> None:
        """Take the fleet's weights, to score them."""
        self.state = with_weights(self.ready.program, self.state, self.fleet.weights, self.fleet.step)
