"""What few runs log: a budget; of islands their settings, who joins and leaves, and rounds."""

import msgspec

from speedrun.base.field_types import Count, Momentum, Natural, Positive, Seconds, Sha256, Size, StateHash


class _Event(msgspec.Struct, frozen=True, tag_field="ev", forbid_unknown_fields=True, omit_defaults=True):
    """As `runlog.Event`, whose module imports this one."""


class Budget(_Event, tag="budget", frozen=True):
    """What this run and those before it may take; the keeper ends what exceeds it."""

    limit: str  #: as `base.budget` reads it
    start_s: Seconds  #: of this process, before the first line


class Islands(_Event, tag="islands", frozen=True):
    """The settings of a fleet of islands. The steps of a round are logged when it ends."""

    islands: Count
    every: Count  #: steps of a round
    quorum: Count  #: islands whose answers make a round count
    deadline_s: Seconds  #: of a round
    outer_lr: Positive = 1.0
    outer_momentum: Momentum = 0.0
    max_rise: Positive = 0.15  #: nats by which weights may score worse than those sent, and the median


class Island(_Event, tag="island", frozen=True):
    """An island joined with zero moments and the present weights, or left."""

    island: str
    version: Natural  #: rounds that counted before
    why: str = ""  #: it left, or did not answer; empty if it joined


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An island's part of a round."""

    island: str
    version: Natural  #: of the weights that it was sent
    lease: Natural  #: number of its tokens
    start: tuple[Size, Size]  #: cursor before them
    stop: tuple[Size, Size]
    num_tokens: Count
    losses: tuple[float, ...]  #: of each step, before its update; none if refused as not finite
    digest: Sha256  #: of its weights
    state_hash: StateHash
    refused: str = ""  #: why its weights were not used; empty if they were


class Round(_Event, tag="round", frozen=True):
    """Islands answered; if enough did, an outer step followed."""

    version: Natural  #: rounds that counted before
    works: tuple[Work, ...]  #: as they arrived
    num_bytes: Size  #: sent and received
    digest: Sha256 = ""  #: of the weights after the outer step; empty without one
