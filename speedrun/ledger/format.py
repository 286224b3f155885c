"""The files of a record, as types.

    README.md  manifest.json  summary.json  batch.json  source.txt  runs/<run>/{run.json,metrics.jsonl,log.txt}  plots/

`batch.json` is what was promised before the first run, where several were. `run.json` holds the facts of one run
(`runfile`), written when it ends. `manifest.json` holds the facts of all runs together, `summary.json` the numbers
derived from them; both follow from the runs and can be made again.
Losses are nats per token. A key that is not declared here is an error.
"""

from typing import Literal, TypeVar

import msgspec

from speedrun.ledger import runfile
from speedrun.ledger.runfile import (
    BATCH_SCHEMA,
    MANIFEST_SCHEMA,
    SUMMARY_SCHEMA,
    DataRead,
    FormatError,
    Outcome,
    Recipe,
    Strict,
    encode,
    sha256,
)


class TrackRef(Strict, frozen=True):
    """The rules a record was made under."""

    id: str
    sha256: str


class SourceFile(Strict, frozen=True):
    """One file inside `source.txt`."""

    path: str
    sha256: str
    lines: int


class Source(Strict, frozen=True):
    """The source closure."""

    sha256: str
    lines: int
    files: tuple[SourceFile, ...]


class Hardware(Strict, frozen=True):
    """What it ran on."""

    platform: str
    device_kind: str
    num_devices: int
    matmul_gflops: float  #: of the bench before the first run


class RunOutcome(Strict, frozen=True):
    """One run of the batch and how it ended; no run may vanish."""

    run_id: str
    seed: int
    outcome: Outcome


class Batch(Strict, frozen=True):
    """The declared runs and the ones that are there."""

    declared_runs: int
    runs: tuple[RunOutcome, ...]


class Look(Strict, frozen=True):
    """A moment at which the test may be made: after so many runs in all, at this level."""

    num_runs: int
    alpha: float


class Declaration(Strict, frozen=True, tag_field="schema", tag=BATCH_SCHEMA):
    """`batch.json`: what is promised before the first run. Its digest stands in the log of each."""

    track: TrackRef
    recipe: Recipe
    config_sha256: str
    source_sha256: str
    num_devices: int
    microbatches: int
    attention: str
    num_steps: int
    seeds: tuple[int, ...]  #: in the order of the runs
    seeds_chosen: bool  #: by people; else they follow from the digests of source and config
    looks: tuple[Look, ...]  #: in order; the last one takes all seeds
    expected_loss: float | None  #: the mean that the number of runs was computed for
    created_utc: str


class FileRef(Strict, frozen=True):
    """One file of the record."""

    bytes: int
    sha256: str


class About(Strict, frozen=True):
    """The part of a manifest that people write."""

    title: str = "untitled"
    authors: tuple[str, ...] = ()
    parent_record: str | None = None
    changes: tuple[str, ...] = ()  #: against the parent; one sentence each


class Manifest(Strict, frozen=True, tag_field="schema", tag=MANIFEST_SCHEMA):
    """`manifest.json`: the facts of all runs."""

    record_id: str  #: content hash of everything below
    about: About
    created_utc: str  #: of the first run
    track: TrackRef
    recipe: Recipe
    source: Source
    config: dict
    config_sha256: str
    data: DataRead
    hardware: Hardware
    software: dict[str, str]
    environment: dict[str, str]
    batch: Batch
    files: dict[str, FileRef]  #: all but README.md, manifest.json, summary.json and plots


class TestResult(Strict, frozen=True):
    """The test of a declared batch at its last look: see `ledger.statistics`."""

    rule: Literal["t", "z"]
    num_runs: int
    p: float
    alpha: float
    passed: bool


class Summary(Strict, frozen=True, omit_defaults=True, tag_field="schema", tag=SUMMARY_SCHEMA):
    """`summary.json`: derived numbers. Means are over finished runs; an sd needs two of them."""

    num_runs: int
    num_finished: int
    broke_off: tuple[str, ...]  #: where and why, for each run that did not finish
    target_loss: float
    target_reached: bool
    val_loss_mean: float | None
    val_loss_sd: float | None
    train_time_s_mean: float | None
    train_time_s_sd: float | None
    cold_wall_s_mean: float | None
    compile_s_mean: float | None
    num_steps: int
    num_tokens: int
    step_p50_ms: float
    step_p95_ms: float
    step_max_ms: float
    data_wait_share: float | None  #: of the train time
    test: TestResult | None = (
        None  #: of the mean loss; None without a declared batch, or before its first look
    )


_File = TypeVar("_File", bound=Strict)


def decode(raw: bytes, kind: type[_File]) -> _File:
    """Reads a file of somebody's record: what `encode` wrote, and nothing else, with numbers that a run can have.

    Raises:
        FormatError: not JSON, a missing, unknown or repeated key, a wrong type, other spacing, a newer schema, a
            number out of range.
    """
    file = runfile.decode(raw, kind)
    check_range(file)
    return file


#: Above every honest number of a record, settings of a run that blew up included: float32 ends there. Squares of it,
#: and their sums, are finite.
_LARGEST = 2.0**128


def check_range(holder: object) -> None:
    """Checks every number in a file or event, however deep, so that whoever computes with them need not.

    Raises:
        FormatError: if one is not finite, or its magnitude is above 2^128.
    """
    left = [msgspec.to_builtins(holder)]
    while left:
        match left.pop():
            case dict() as table:
                left += table.values()
            case list() | tuple() as row:
                left += row
            case int() | float() as number if not -_LARGEST <= number <= _LARGEST:
                shown = (
                    f"{number:g}"
                    if isinstance(number, float)
                    else f"an integer of {number.bit_length():,} bits"
                )
                raise FormatError(f"{shown}: a number is out of range; at most 2^128 is one of a run")


def record_id(manifest: Manifest) -> str:
    """Content hash of a manifest without its own id."""
    return sha256(encode(msgspec.structs.replace(manifest, record_id="")))
