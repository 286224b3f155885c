"""The files that the referee and its examiner exchange."""

from pathlib import Path

from speedrun.base import runlog
from speedrun.base.runlog import ShardRange
from speedrun.record.layout import Strict


class Stretch(Strict, frozen=True):
    """Steps to repeat."""

    start: int
    stop: int
    from_checkpoint: bool


class Examination(Strict, frozen=True):
    """Request to the examiner."""

    programs: Path  #: the archive that the record carries
    track: str
    data: Path  #: folder of shards
    run_seed: int
    platform: str  #: from the log, as JAX names it
    num_steps: int  #: from the log
    held_nonce: str  #: of the held-out text; empty if the track has none
    num_devices: int
    replicas: int
    checkpoints: Path | None  #: of the run
    stretches: tuple[Stretch, ...]
    draws: int  #: seed of everything random
    findings: Path  #: file to write
    islands: runlog.Islands | None  #: if they trained; then `rounds` take the place of `stretches`
    rounds: tuple[tuple[str, runlog.Round], ...]  #: as from `rounds_of`


class Replayed(Stretch, frozen=True):
    """A repeated stretch."""

    state_hash: str  #: before its first step
    stop_hash: str  #: after its last step
    losses: tuple[float, ...]
    vals: tuple[tuple[int, float], ...]  #: step and loss of each validation
    cursors: tuple[tuple[int, int], tuple[int, int]]  #: shard and offset of the next token, at start and end
    first_batch_sha256: str  #: as in `runlog.RunEnd`
    ranges: tuple[ShardRange, ...]  #: without digests


class Findings(Strict, frozen=True):
    """Results of the examiner."""

    val_sha256: str  #: of the scored ids
    final_hash: str  #: of the scored state: from the run's checkpoint, or the end of the replay
    val_loss: float  #: of that state; on another platform, of `sample`
    own: bool  #: whether that state is from the run's checkpoint
    dtype: str  #: "bfloat16" if its training programs hold numbers of 16 bits or fewer, else "float32"
    num_params: tuple[int, int]  #: least and most; some may be padding
    state_bytes_per_device: int
    batch_tokens: tuple[int, ...]  #: of each step
    columns: int  #: of the logits
    num_ids: int  #: vocabulary of the track
    rows: float  #: nats; largest change of a log-probability when rows of the head are permuted
    leak: float  #: nats; largest change of a log-probability before a changed token
    leak_at: int  #: its position
    changes: int  #: number of changed texts
    neighbours: float  #: nats; largest change of a log-probability when sequences get other neighbours
    constant_bytes: int  #: of all constants in the programs, as `constants.held` codes them
    num_literals: int  #: distinct numbers that stand alone in the programs
    shuffled_loss: float  #: with the targets of each sequence shuffled
    other_loss: float | None  #: on other text of the same kind; None: there is none
    other_error: float  #: standard error of the difference between this and `val_loss`, over sequences
    low_gap: float  #: likewise the difference, of losses cut at the lower quartile of the other text's
    low_error: float  #: its standard error, by the other text alone
    stretches: tuple[Replayed, ...]  #: none on another platform
    foreign: bool  #: whether the run was on another platform
    num_sequences: tuple[int, int]  #: of the scored and of the held-out text
    #: Index and loss of sequences, of the scored and then of the held-out text; of some on another platform.
    sample: tuple[tuple[int, float], ...]
