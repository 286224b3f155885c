"""`run.json`, which a run writes itself. `format` has the other files of a record, and reads them all.

Losses are nats per token. A key that is not declared here is an error.
"""

import hashlib
from typing import Literal

import msgspec

RUN_SCHEMA = "speedrun.run/1"
BATCH = "batch.json"

Outcome = Literal["finished", "non-finite", "aborted"]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: unknown keys are errors."""


class ShardRange(Strict, frozen=True, omit_defaults=True):
    """One contiguous range of positions read as inputs; the target after the last is not counted."""

    name: str
    sha256: str  #: of the whole file
    tokens: int  #: in the whole file
    start: int  #: inclusive
    stop: int  #: exclusive
    skipped: int = 0  #: of these, not input: cut off from documents


class DataRead(Strict, frozen=True):
    """The data that a run read."""

    shards: tuple[ShardRange, ...]  #: in reading order
    val_shard: ShardRange
    val_sha256: str  #: of the scored ids
    num_epochs: int = 1  #: each training position is read at most this often


class RunFile(Strict, frozen=True, tag_field="schema", tag=RUN_SCHEMA):
    """`run.json`: the facts of one run."""

    run_id: str  #: also the name of its folder
    seed: int
    track: str  #: name and version, as `smoke-cpu@1`
    track_sha256: str
    recipe: str
    recipe_revision: int
    overrides: dict[str, str]  #: settings of `--set`
    config_sha256: str
    source_sha256: str  #: of `source.txt`
    created_utc: str
    outcome: Outcome
    init_hash: str  #: of the state before the first step
    final_hash: str
    first_batch_sha256: str | None  #: None if the run ended before its first step
    first_loss: str | None  #: float as C hex; seeds that share it are one seed
    platform: str
    device_kind: str
    num_devices: int
    software: dict[str, str]
    environment: dict[str, str]
    data: DataRead
    peak_bytes: int
    resumed_from: str | None = None


class Recipe(Strict, frozen=True):
    """The recipe, as the command line names it."""

    name: str
    revision: int
    overrides: dict[str, str]


def encode(file: Strict) -> bytes:
    """Return the canonical bytes of a file of a record: JSON, indented for people and `diff`."""
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"


def sha256(raw: bytes) -> str:
    """Return the SHA-256 digest as 64 hex digits."""
    return hashlib.sha256(raw).hexdigest()


def config_sha256(config: dict) -> str:
    """Return the digest of a resolved config: of its JSON with sorted keys. A config has no seed."""
    return sha256(msgspec.json.encode(config, order="sorted"))
