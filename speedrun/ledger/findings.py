"""What an examination of a run asks for, and what it finds. Two processes share this file: ours and the record's."""

from pathlib import Path
from typing import Any

import msgspec


class Examination(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to look at."""

    config: dict[str, Any]  #: `prepare.RunConfig` of the run, with a new folder as `out`
    checkpoints: Path
    restarts: tuple[int, ...]  #: steps to go on from
    num_replayed: int  #: steps, from each of them
    findings: Path  #: where to write what was found


class Restart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run that went on from a checkpoint for a few steps."""

    step: int
    state_hash: str
    losses: tuple[float, ...]


class Findings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was seen of a run's final state and of its checkpoints."""

    final_hash: str
    val_loss: float  #: nats, by a scorer that shares no line with the record's
    masses: tuple[float, ...]  #: sum of all probabilities at some positions
    leak: float  #: the largest change of an output that stands before a changed token
    company: float  #: nats, the largest change of a sequence's loss if other sequences stand beside it
    restarts: tuple[Restart, ...]
