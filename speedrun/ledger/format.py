"""The files of a record, as types.

    about.json  batch.json  source.txt  reproduction.json  runs/<run>/metrics.jsonl  README.md  plots/

`about.json` is what its authors say. `batch.json` is the declaration of a batch, written before its first run.
`source.txt` is the source closure, and `metrics.jsonl` the log of a run (`ground.runlog`). All else is a view: README
and plots are made from these, and never read. Losses are nats per token. A key that is not declared here is
an error.
"""

import hashlib
from datetime import datetime
from typing import TypeVar

import msgspec

ABOUT, BATCH, SOURCE, LOG = "about.json", "batch.json", "source.txt", "metrics.jsonl"
#: The end of float32: above every honest number of a record. Squares of it, and sums of those, are finite.
_LARGEST = 2.0**128


class FormatError(ValueError):
    """A file of a record that does not have the declared form."""


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: unknown keys are errors."""


class TrackRef(Strict, frozen=True):
    """The track of a record."""

    id: str
    sha256: str


class Recipe(Strict, frozen=True):
    """The recipe, as the command line names it."""

    name: str
    revision: int
    overrides: dict[str, str]


class Look(Strict, frozen=True):
    """A test of the batch after a number of runs, at a level."""

    num_runs: int
    alpha: float


class Declaration(Strict, frozen=True, tag_field="schema", tag="speedrun.batch/1"):
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


class About(Strict, frozen=True, tag_field="schema", tag="speedrun.about/1"):
    """`about.json`: what its authors say of a record."""

    title: str = "untitled"
    authors: tuple[str, ...] = ()
    parent_record: str | None = None
    changes: tuple[str, ...] = ()  #: from the parent; one sentence each


_File = TypeVar("_File", bound=Strict)


def decode(raw: bytes, kind: type[_File]) -> _File:
    """Decode an untrusted file of a record, in exactly the form that `encode` writes.

    Raises:
        FormatError: no JSON, a missing, unknown or repeated key, a wrong type, other spacing, a number out of range, or
            another schema; or a time without a time zone.
    """
    try:
        file = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(str(error)) from None
    if encode(file) != raw:
        raise FormatError("not in canonical form (a key twice, or other spacing)")
    check_range(file)
    check_moment(getattr(file, "created_utc", "2026-01-01T00:00:00Z"))  # not every file has one
    return file


def check_moment(utc: str) -> None:
    """Raise FormatError unless a text is a time stamp with a time zone."""
    try:
        zone = datetime.fromisoformat(utc).tzinfo
    except ValueError as error:
        raise FormatError(str(error)) from None
    if zone is None:
        raise FormatError(f"{utc!r} has no time zone")


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
                raise FormatError("a number is out of range; at most 2^128 is permitted")


def encode(file: msgspec.Struct) -> bytes:
    """Return the canonical bytes of a file, of a record or beside it: JSON, indented for people and `diff`."""
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"


def sha256(raw: bytes) -> str:
    """Return the SHA-256 digest as 64 hex digits."""
    return hashlib.sha256(raw).hexdigest()


def config_sha256(config: dict) -> str:
    """Return the digest of a resolved config: of its JSON with sorted keys. A config has no seed."""
    return sha256(msgspec.json.encode(config, order="sorted"))
