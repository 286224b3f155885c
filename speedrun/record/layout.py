"""The files of a record, and their digests.

    about.json  batch.json  source.txt  reproduction.json  runs/<run>/metrics.jsonl  unlogged-<n>.txt  README.md  plots/

Authors write `about.json` (`record.reader`). `batch.json` declares a batch before its first run (`record.batch`),
`source.txt` is the source closure, and `metrics.jsonl` the log of a run (`base.runlog`). README and plots are made from
these, and never read. Losses are nats per token.
"""

import hashlib

import msgspec

ABOUT, BATCH, SOURCE, LOG = "about.json", "batch.json", "source.txt", "metrics.jsonl"
RUNNING = ".runs"  #: in the name of the lock of whoever runs what was declared


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class: unknown keys are errors."""


class Recipe(Strict, frozen=True):
    """The recipe, as the command line names it."""

    name: str
    revision: int
    overrides: dict[str, str]


def sha256(raw: bytes) -> str:
    """Return the digest in hex digits."""
    return hashlib.sha256(raw).hexdigest()


def config_sha256(config: dict) -> str:
    """Return the digest of the JSON of a resolved config, with sorted keys."""
    return sha256(msgspec.json.encode(config, order="sorted"))
