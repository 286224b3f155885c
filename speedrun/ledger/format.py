"""The files of a record, as types.

    README.md  manifest.json  summary.json  batch.json  source.txt  runs/<run>/{run.json,metrics.jsonl,log.txt}  plots/

`batch.json` is the declaration of a batch, written before its first run. `run.json` (`runfile`) holds the facts of one
run, written when it ends. `manifest.json` holds the facts of all runs, `summary.json` the numbers derived from them;
both can be derived from the runs again. Losses are nats per token. A key that is not declared here is an error.
"""

from typing import Literal, TypeVar

import msgspec

from speedrun.ledger.runfile import RUN_SCHEMA, DataRead, Outcome, Recipe, Strict, encode, sha256

MANIFEST_SCHEMA = "speedrun.manifest/1"
SUMMARY_SCHEMA = "speedrun.summary/1"
BATCH_SCHEMA = "speedrun.batch/1"
REPRODUCTION_SCHEMA = "speedrun.reproduction/2"


class FormatError(ValueError):
    """A file of a record that does not have the declared form."""


class TrackRef(Strict, frozen=True):
    """The track of a record."""

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
    """The hardware of a record."""

    platform: str
    device_kind: str
    num_devices: int
    matmul_gflops: float  #: measured before the first run


class RunOutcome(Strict, frozen=True):
    """One run of the batch and how it ended; no run may be left out."""

    run_id: str
    seed: int
    outcome: Outcome


class Batch(Strict, frozen=True):
    """The number of declared runs, and the runs that exist."""

    declared_runs: int
    runs: tuple[RunOutcome, ...]


class Look(Strict, frozen=True):
    """A test of the batch after a number of runs, at a level."""

    num_runs: int
    alpha: float


class Declaration(Strict, frozen=True, tag_field="schema", tag=BATCH_SCHEMA):
    """`batch.json`: written before the first run. Every run logs its digest."""

    track: TrackRef
    recipe: Recipe
    config_sha256: str
    source_sha256: str
    num_devices: int
    microbatches: int
    attention: str
    num_steps: int
    seeds: tuple[int, ...]  #: in the order of the runs
    seeds_chosen: bool  #: whether a person chose them; else they follow from source and config
    looks: tuple[Look, ...]  #: in order; the last one is after all seeds
    expected_loss: float | None  #: the mean for which the number of runs was computed
    created_utc: str


class FileRef(Strict, frozen=True):
    """One file of the record."""

    bytes: int
    sha256: str


class About(Strict, frozen=True):
    """The part of a manifest that its authors write."""

    title: str = "untitled"
    authors: tuple[str, ...] = ()
    parent_record: str | None = None
    changes: tuple[str, ...] = ()  #: from the parent; one sentence each


class Manifest(Strict, frozen=True, tag_field="schema", tag=MANIFEST_SCHEMA):
    """`manifest.json`: the facts of all runs."""

    record_id: str  #: digest of everything below
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
    files: dict[str, FileRef]  #: source.txt, batch.json and the files of the runs


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
    broke_off: tuple[str, ...]  #: where and why each unfinished run broke off
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
    test: TestResult | None = None  #: None without a declared batch, or before its first look


_File = TypeVar("_File", bound=Strict)


def decode(raw: bytes, kind: type[_File]) -> _File:
    """Decode an untrusted file of a record, in exactly the form that `encode` writes.

    Raises:
        FormatError: no JSON, a missing, unknown or repeated key, a wrong type, other spacing, a number out of range, or
            a newer schema.
    """
    try:
        file = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(newer(raw) or str(error)) from None
    if encode(file) != raw:
        raise FormatError("not in canonical form (a key twice, or other spacing)")
    check_range(file)
    return file


_LONGEST_SCHEMA = 40  #: characters


class _Head(msgspec.Struct):
    schema: str = ""


def newer(raw: bytes) -> str:
    """Return the problem of a file whose schema is a later version of one of ours; else an empty text."""
    try:
        got = msgspec.json.decode(raw, type=_Head).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    name, _, version = got[:_LONGEST_SCHEMA].partition("/")
    for own in (RUN_SCHEMA, BATCH_SCHEMA, MANIFEST_SCHEMA, SUMMARY_SCHEMA, REPRODUCTION_SCHEMA):
        own_name, _, own_version = own.partition("/")
        if name == own_name and version.isdecimal() and int(version) > int(own_version):
            return f"{name}/{version}, and this speedrun reads {own}: a newer one wrote it; update, and try again"
    return ""


#: The end of float32: above every honest number of a record. Squares of it, and sums of those, are finite.
_LARGEST = 2.0**128


def check_range(holder: object) -> None:
    """Check every number in a file or event, at any depth.

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
                raise FormatError(f"{shown}: a number is out of range; at most 2^128 is permitted")


def record_id(manifest: Manifest) -> str:
    """Return the digest of a manifest without its id."""
    return sha256(encode(msgspec.structs.replace(manifest, record_id="")))
