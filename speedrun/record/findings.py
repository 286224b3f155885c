"""The files that pass between two processes: the referee and its examiner."""

from pathlib import Path

from speedrun.base.runlog import ShardRange
from speedrun.record.layout import Strict


class Stretch(Strict, frozen=True):
    """Steps to train again."""

    start: int
    stop: int
    from_checkpoint: bool


class Examination(Strict, frozen=True):
    """Request to the examiner."""

    programs: Path  #: the archive that the record carries
    track: str
    data: Path  #: folder of shards
    run_seed: int
    platform: str  #: by the log, as JAX names it
    num_steps: int  #: by the log
    num_devices: int
    replicas: int
    checkpoints: Path | None  #: of the run
    stretches: tuple[Stretch, ...]
    draws: int  #: seed of everything random
    findings: Path  #: file to write


class Replayed(Stretch, frozen=True):
    """A stretch that was trained again."""

    state_hash: str  #: at its start
    stop_hash: str  #: of the state after its last step
    losses: tuple[float, ...]
    vals: tuple[tuple[int, float], ...]  #: step and loss of each validation, by the examiner's scorer
    #: Shard and offset of the next token, at its start and its end.
    cursors: tuple[tuple[int, int], tuple[int, int]]
    first_batch_sha256: str  #: of its ids, as in `runlog.RunEnd`
    ranges: tuple[ShardRange, ...]  #: read, without digests


class Findings(Strict, frozen=True):
    """What the examiner found."""

    val_sha256: str  #: of the scored ids
    final_hash: str  #: of the state that was scored: the run's own, or the end of the replay
    val_loss: float  #: of that state in nats, by the examiner's scorer; on another platform, of `sample`
    own: bool  #: whether that state is the run's own, from its checkpoint
    dtype: str  #: "bfloat16" if its training programs hold numbers of 16 bits or fewer, else "float32"
    num_params: tuple[int, int]  #: the state holds at least and at most: some may be padding
    state_bytes_per_device: int
    batch_tokens: tuple[int, ...]  #: of each step
    columns: int  #: of the logits
    num_ids: int  #: of the track
    rows: float  #: nats; largest change of a log-probability when rows of the head are permuted
    leak: float  #: nats; largest change of a log-probability before a changed token
    leak_at: int  #: position of that output
    changes: int  #: number of texts that were changed
    company: float  #: nats; largest change of a log-probability when sequences get other neighbours
    constant_bytes: int  #: of all constants in its programs, compressed together
    shuffled_loss: float  #: of the same state, with the targets of each sequence shuffled
    other_loss: float | None  #: of the same state on other text of the same kind; None: there is none
    other_error: float  #: standard error of the difference between this and `val_loss`, over sequences
    stretches: tuple[Replayed, ...]  #: none on another platform than the run's
    foreign: bool  #: whether the run was on another platform
    sample: tuple[tuple[int, float], ...]  #: nats per token of scored sequences; of some on another platform
