"""What passes between the referee, a record's source and the examiner: three processes, and files of these types."""

from pathlib import Path
from typing import Any

import msgspec


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: every key is known."""


class Wanted(_Strict, frozen=True):
    """What a record's source is asked for: its programs."""

    config: dict[str, Any]  #: `prepare.RunConfig` of the run, with a new folder as `out`
    folder: Path  #: where to put them


class Array(_Strict, frozen=True):
    """One argument or result of a program."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[tuple[str, ...], ...] = ()  #: of the mesh, by dimension, over which it is divided


class Lowered(_Strict, frozen=True):
    """A program: StableHLO in NAME.mlir, and what it takes and gives."""

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    num_devices: int
    kept: tuple[int, ...]  #: inputs that it uses
    convention: int  #: version of JAX's calling convention


class HandedOver(_Strict, frozen=True):
    """All that a record's source does for its examination: `programs.json`.

    init    u32[2], the data of a key -> the leaves of the state
    train   leaves, tokens_BT, targets_BT -> leaves, loss; several, one for each shape
    hidden  parameters, tokens_BT -> what the head is given [B, T, D]; several, one for each window of a validation
    logits  parameters, x_ND -> [N, V]
    """

    leaves: tuple[str, ...]  #: names of the state's, as a checkpoint has them
    num_params: int  #: so many `params.*` among them, in the order in which `hidden` and `logits` take them
    programs: dict[str, Lowered]
    steps: tuple[str, ...]  #: name of the program of each step
    hidden: dict[int, str]  #: that of each step which is validated, the end included


class Stretch(_Strict, frozen=True):
    """Steps to make again."""

    start: int
    stop: int
    from_checkpoint: bool


class Examination(_Strict, frozen=True):
    """What to look at."""

    programs: Path  #: the folder that a record's source filled
    track: str
    data: Path  #: folder of shards
    run_seed: int
    num_devices: int
    replicas: int
    checkpoints: Path | None  #: of the run
    stretches: tuple[Stretch, ...]
    draws: int  #: the seed of all that is drawn
    findings: Path  #: where to write what was found


class Replayed(_Strict, frozen=True):
    """A stretch that was made again."""

    start: int
    stop: int
    from_checkpoint: bool
    state_hash: str  #: where it began
    losses: tuple[float, ...]
    vals: tuple[tuple[int, float], ...]  #: validations in it: step and loss, by the examiner's own scorer


class Findings(_Strict, frozen=True):
    """What was seen of a run."""

    final_hash: str  #: of the state that was scored last: its own, or where a whole replay ended
    val_loss: float  #: of that state; nats, by a scorer that shares no line with the record's
    own: bool  #: whether that state is the run's, from its checkpoint
    columns: int  #: of the logits
    num_ids: int  #: of the track
    rows: float  #: nats, the largest change of a token's loss if other rows stand beside it in the head
    leak: float  #: nats, the largest change of a log-probability before a changed token
    leak_at: int  #: where the output stands that changed most
    changes: int  #: suffixes that were changed
    company: float  #: nats, the largest change of a token's loss if other sequences stand beside it
    stretches: tuple[Replayed, ...]
