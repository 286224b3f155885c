"""One attempt at a run, by one process: what it was given, and what is known for the end of its log."""

from dataclasses import dataclass, field
from typing import NamedTuple

from speedrun.base import mesh as meshes
from speedrun.base import messages, runlog
from speedrun.base.clock import Clock, Phases, cold_wall_s
from speedrun.data import stream
from speedrun.train.checkpoint import Checkpoints
from speedrun.train.preflight import Ready


class Progress(NamedTuple):
    """How far a run is."""

    step: int = 0  #: steps that are done
    tokens_seen: int = 0
    cursor: stream.Cursor = stream.START  #: of the next token


@dataclass
class Attempt:
    """A run may crash anywhere, so each number is set as soon as it is known."""

    run_id: str
    ready: Ready
    log: messages.Log
    kept: Checkpoints | None
    phases: Phases
    clock: Clock = field(default_factory=Clock)
    compile_s: float = 0.0
    warmup_s: float = 0.0
    lost_s: float = 0.0  #: of earlier processes, after the checkpoint
    first_batch_sha256: str = ""
    val_loss: float | None = None
    val_s: float = 0.0
    data_wait_s: float = 0.0
    cold_wall_s: float = 0.0  #: 0 until the last validation is done
    throttled_s: float | None = None
    final_hash: str = ""
    matmul_gflops: float = 0.0  #: measured after the run
    ranges: tuple[runlog.ShardRange, ...] = ()
    read: runlog.DataRead | None = None  #: with the digests of the shards, which take seconds

    def end(self, outcome: runlog.Outcome) -> runlog.RunEnd:
        """Return the last event of the log."""
        return runlog.RunEnd(
            status=outcome,
            val_loss=self.val_loss if outcome == "finished" else None,
            train_time_s=self.clock.seconds,
            cold_wall_s=self.cold_wall_s or cold_wall_s(),
            compile_s=self.compile_s,
            warmup_s=self.warmup_s,
            val_s=self.val_s,
            data_wait_s=self.data_wait_s,
            peak_bytes=meshes.peak_bytes(self.ready.program.mesh),
            final_hash=self.final_hash,
            data=self.read or self.ready.data_read(self.ranges),
            first_batch_sha256=self.first_batch_sha256,
            throttled_s=self.throttled_s,
            phases={**self.phases.seconds()},
            lost_s=self.lost_s,
            matmul_gflops=self.matmul_gflops,
        )
