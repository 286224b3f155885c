"""A run in progress: what it was asked to do, what it is made of, where it stands, and what it has found out."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from speedrun.data import stream
from speedrun.ground import processes
from speedrun.ground.clock import Clock, Phases
from speedrun.ground.runlog import RunLog
from speedrun.ground.signals import Later
from speedrun.ledger import runfile
from speedrun.science.step import StepMetrics, TrainState
from speedrun.training.checkpoint import Checkpoints
from speedrun.training.prepare import Ready


@dataclass
class Tally:
    """What accumulates during a run and ends up in `run_end` and `run.json`."""

    lost_s: float = 0.0
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
    throttled_s: float | None = None
    cold_wall_s: float = 0.0  #: 0 until the last validation is done
    val_sha256: str = ""
    ranges: tuple[stream.Span, ...] = ()
    read: runfile.DataRead | None = None  #: with the digests of the shards, which take seconds


class Place(NamedTuple):
    """Where a run stands."""

    step: int  #: the next one
    cursor: stream.Cursor  #: of its first token


class Pending(NamedTuple):
    """A step that was handed to the devices, and of which nothing was fetched yet."""

    step: int
    metrics: StepMetrics
    cursor: stream.Cursor  #: of the token after its batch


@dataclass
class Trainer:
    """One run, handed to whatever has a part in it."""

    run_id: str
    created_utc: str
    ready: Ready
    log: RunLog
    checkpoints: Checkpoints | None
    clock: Clock = field(default_factory=Clock)
    phases: Phases = field(default_factory=Phases)
    tally: Tally = field(default_factory=Tally)
    stopping: Later = field(default_factory=processes.stopping)
    place: Place = field(default_factory=lambda: Place(0, stream.START))
    state: TrainState = None  # pyright: ignore[reportAssignmentType] - there from the first line of the loop on
    pending: Pending | None = None

    def sync(self) -> None:
        """All devices are done, and all hosts know."""
        jax.device_get(jax.block_until_ready(self.state).step)
        processes.barrier()
