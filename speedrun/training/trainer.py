"""The state of a run in progress."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from speedrun.data import stream
from speedrun.ground import processes, runlog
from speedrun.ground.clock import Clock, Phases
from speedrun.ground.runlog import RunLog
from speedrun.ground.signals import Deferred
from speedrun.science.step import StepMetrics, TrainState
from speedrun.training.checkpoint import Checkpoints
from speedrun.training.prepare import Ready


@dataclass
class Tally:
    """What a run collects for the end of its log."""

    lost_s: float = 0.0
    compile_s: float = 0.0
    warmup_s: float = 0.0
    val_s: float = 0.0
    data_wait_s: float = 0.0
    final_hash: str = ""
    val_loss: float | None = None
    first_batch_sha256: str = ""
    tokens_seen: int = 0
    peak_bytes: int = 0
    throttled_s: float | None = None
    matmul_gflops: float = 0.0  #: measured after the run
    cold_wall_s: float = 0.0  #: 0 until the last validation is done
    val_sha256: str = ""
    ranges: tuple[stream.Span, ...] = ()
    read: runlog.DataRead | None = None  #: with the digests of the shards, which take seconds


class Place(NamedTuple):
    """The position of a run."""

    step: int  #: the next one
    cursor: stream.Cursor  #: of its first token


class Pending(NamedTuple):
    """A dispatched step whose metrics are not fetched yet."""

    step: int
    metrics: StepMetrics
    cursor: stream.Cursor  #: of the token after its batch


@dataclass
class Trainer:
    """One run: its settings, log, clock, state and results so far."""

    run_id: str
    ready: Ready
    log: RunLog
    checkpoints: Checkpoints | None
    clock: Clock = field(default_factory=Clock)
    phases: Phases = field(default_factory=Phases)
    tally: Tally = field(default_factory=Tally)
    stopping: Deferred = field(default_factory=processes.deferred_stop)
    place: Place = field(default_factory=lambda: Place(0, stream.START))
    state: TrainState = None  # pyright: ignore[reportAssignmentType] - set when the loop starts
    pending: Pending | None = None

    def sync(self) -> None:
        """Wait until all devices are done, in all processes."""
        jax.device_get(jax.block_until_ready(self.state).step)
        processes.barrier()
