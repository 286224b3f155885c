"""The files of a record, as types.

    README.md  manifest.json  summary.json  batch.json  source.txt  runs/<run>/{run.json,metrics.jsonl,log.txt}  plots/

`batch.json` is what was promised before the first run, where several were. `run.json` holds the facts of one run,
written when it ends. `manifest.json` holds the facts of all runs together, `summary.json` the numbers derived from
them; both follow from the runs and can be made again.
Losses are nats per token. A key that is not declared here is an error.
"""

import hashlib
from typing import Literal, TypeVar

import msgspec

RUN_SCHEMA = "speedrun.run/1"
MANIFEST_SCHEMA = "speedrun.manifest/1"
SUMMARY_SCHEMA = "speedrun.summary/1"
BATCH_SCHEMA = "speedrun.batch/1"
REPRODUCTION_SCHEMA = "speedrun.reproduction/1"
BATCH = "batch.json"

Outcome = Literal["finished", "non-finite", "aborted"]


class FormatError(ValueError):
    """A file of a record that is not what this module declares."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: every key is known."""


class ShardRange(_Strict, frozen=True):
    """One contiguous range of positions read as inputs; the target one further is not counted."""

    name: str
    sha256: str  #: of the whole file
    tokens: int  #: in the whole file
    start: int  #: inclusive
    stop: int  #: exclusive


class DataRead(_Strict, frozen=True):
    """What a run read."""

    shards: tuple[ShardRange, ...]  #: in reading order
    val_shard: ShardRange
    val_sha256: str  #: of the scored ids
    num_epochs: int = 1  #: each training position is read at most so often


class RunFile(_Strict, frozen=True, tag_field="schema", tag=RUN_SCHEMA):
    """`run.json`: the facts of one run."""

    run_id: str  #: also the name of its folder
    seed: int
    track: str  #: name and version, as `smoke-cpu@1`
    track_sha256: str
    recipe: str
    recipe_revision: int
    overrides: dict[str, str]  #: what `--set` changed
    config_sha256: str
    source_sha256: str  #: of `source.txt`
    created_utc: str
    outcome: Outcome
    init_hash: str  #: of the state before the first step
    final_hash: str
    first_batch_sha256: str | None  #: None if the run ended before its first step
    first_loss: str | None  #: float as C hex; two seeds that share it are one seed
    platform: str
    device_kind: str
    num_devices: int
    software: dict[str, str]
    environment: dict[str, str]
    data: DataRead
    peak_bytes: int
    resumed_from: str | None = None


class TrackRef(_Strict, frozen=True):
    """The rules a record was made under."""

    id: str
    sha256: str


class SourceFile(_Strict, frozen=True):
    """One file inside `source.txt`."""

    path: str
    sha256: str
    lines: int


class Source(_Strict, frozen=True):
    """The source closure."""

    sha256: str
    lines: int
    files: tuple[SourceFile, ...]


class Recipe(_Strict, frozen=True):
    """What ran, and how to say so on a command line."""

    name: str
    revision: int
    overrides: dict[str, str]


class Hardware(_Strict, frozen=True):
    """What it ran on."""

    platform: str
    device_kind: str
    num_devices: int
    matmul_gflops: float  #: of the bench before the first run


class RunOutcome(_Strict, frozen=True):
    """One run of the batch and how it ended; no run may vanish."""

    run_id: str
    seed: int
    outcome: Outcome


class Batch(_Strict, frozen=True):
    """The declared runs and the ones that are there."""

    declared_runs: int
    runs: tuple[RunOutcome, ...]


class Look(_Strict, frozen=True):
    """A moment at which the test may be made: after so many runs in all, at this level."""

    num_runs: int
    alpha: float


class Declaration(_Strict, frozen=True, tag_field="schema", tag=BATCH_SCHEMA):
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


class FileRef(_Strict, frozen=True):
    """One file of the record."""

    bytes: int
    sha256: str


class About(_Strict, frozen=True):
    """The part of a manifest that people write."""

    title: str = "untitled"
    authors: tuple[str, ...] = ()
    parent_record: str | None = None
    changes: tuple[str, ...] = ()  #: against the parent; one sentence each


class Manifest(_Strict, frozen=True, tag_field="schema", tag=MANIFEST_SCHEMA):
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


class TestResult(_Strict, frozen=True):
    """The test of a declared batch at its last look: see `ledger.statistics`."""

    rule: Literal["t", "z"]
    num_runs: int
    p: float
    alpha: float
    passed: bool


class Summary(_Strict, frozen=True, omit_defaults=True, tag_field="schema", tag=SUMMARY_SCHEMA):
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


_File = TypeVar("_File", RunFile, Manifest, Summary, Declaration)


def encode(file: RunFile | Manifest | Summary | Declaration) -> bytes:
    """The one way to write a file of a record: indented, so that people and `diff` can read it."""
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"


def decode(raw: bytes, kind: type[_File]) -> _File:
    """Reads what `encode` wrote, and nothing else.

    Raises:
        FormatError: not JSON, a missing, unknown or repeated key, a wrong type, other spacing, a newer schema.
    """
    try:
        file = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(newer(raw) or str(error)) from None
    if encode(file) != raw:
        raise FormatError("not in canonical form (a key twice, or other spacing)")
    check_range(file)
    return file


#: Above every honest number of a record, and small enough that sums of squares stay finite.
_LARGEST = 2.0**63


def check_range(holder: object) -> None:
    """Checks every number in a file or event, however deep, so that whoever computes with them need not.

    Raises:
        FormatError: if one is not finite, or its magnitude is above 2^63.
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
                raise FormatError(f"{shown}: a number is out of range; at most 2^63 is one of a run")


_LONGEST_SCHEMA = 40  #: characters; what is longer is none


class _Head(msgspec.Struct):
    schema: str = ""


def newer(raw: bytes) -> str:
    """What to say of a file whose schema is a later version of one of ours; else nothing."""
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


def sha256(raw: bytes) -> str:
    """Full digest, 64 hex digits."""
    return hashlib.sha256(raw).hexdigest()


def config_sha256(config: dict) -> str:
    """Digest of a resolved config: of its JSON with sorted keys. The seed is not part of a config."""
    return sha256(msgspec.json.encode(config, order="sorted"))


def record_id(manifest: Manifest) -> str:
    """Content hash of a manifest without its own id."""
    return sha256(encode(msgspec.structs.replace(manifest, record_id="")))
