"""The files of a record, as types.

    about.json  batch.json  source.txt  reproduction.json  runs/<run>/metrics.jsonl  README.md  plots/

Authors write `about.json`. `batch.json` declares a batch before its first run, `source.txt` is the source closure, and
`metrics.jsonl` the log of a run (`base.runlog`). README and plots are made from these, and never read. Losses are nats
per token. A key that is not declared here is an error.
"""

import hashlib

import msgspec

from speedrun.base.limits import Natural

ABOUT, BATCH, SOURCE, LOG = "about.json", "batch.json", "source.txt", "metrics.jsonl"


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class: unknown keys are errors."""


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
    """A test of the batch after a number of runs."""

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
    seeds: tuple[Natural, ...]  #: in the order of the runs
    seeds_chosen: bool  #: by a person; else they follow from source and config
    looks: tuple[Look, ...]  #: in order; the last is after all seeds
    expected_loss: float | None  #: mean from which the number of runs was computed
    created_utc: str


class About(Strict, frozen=True, tag_field="schema", tag="speedrun.about/1"):
    """`about.json`: the authors' description of a record."""

    title: str = "untitled"
    authors: tuple[str, ...] = ()
    parent_record: str | None = None
    changes: tuple[str, ...] = ()  #: from the parent; one sentence each


def encode(file: msgspec.Struct) -> bytes:
    """Return the canonical bytes of a file: JSON, indented for people and `diff`."""
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"


def sha256(raw: bytes) -> str:
    """Return the digest in hex digits."""
    return hashlib.sha256(raw).hexdigest()


def config_sha256(config: dict) -> str:
    """Return the digest of the JSON of a resolved config, with sorted keys."""
    return sha256(msgspec.json.encode(config, order="sorted"))
