"""Tracks: data, target loss, hardware and rules of the clock.

Each track is one frozen file, `tracks/<name>.toml`. A record has its sha256, and a changed rule is a new version.
"""

import hashlib
import math
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from speedrun.base.errors import UsageError, translate_read_errors, unknown

ALIGNED = 128  #: Held-out text starts at a multiple, as lines of synthetic text fill the blocks of attention.
TRACKS_DIR = Path(__file__).parent.parent / "tracks"


class Hub(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dataset repository of the Hugging Face hub with the shards."""

    repo: str  #: owner/name
    revision: str  #: a commit, or a branch whose commit the first download records
    train_shards: int  #: number to download by default


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shards and their vocabulary."""

    folder: str  #: default of --data, relative to the data root
    train: str  #: glob of training shards; sorted by name
    val: str  #: glob of validation shards; the first one by name is scored
    val_tokens: int  #: number of scored targets, from the start of the shard
    vocab_size: int  #: every id is smaller
    document_token: int  #: first token of each document
    get: str  #: the command that makes or downloads the shards
    held_tokens: int = 0  #: number of later targets that are scored after the result, at a drawn place
    sha256: dict[str, str] = {}  #: shard name -> digest; empty if any shards may be used
    hub: Hub | None = None  #: None: not on the hub

    def held_start(self, nonce: str, shard_tokens: int) -> int:
        """Return the first input of the held-out text in a validation shard of this size, drawn by a nonce."""
        draw, spare = hashlib.sha256(nonce.encode()), shard_tokens - self.val_tokens - self.held_tokens - 1
        return self.val_tokens + ALIGNED * (int(draw.hexdigest(), 16) % (spare // ALIGNED + 1))


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The target loss, in nats per token."""

    loss: float
    entropy_rate: float = 0.0  #: lower bound of the loss; 0 if unknown
    sigma: float | None = None  #: sd of final losses over seeds, from earlier runs; None if unknown


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hardware and clock."""

    platform: str  #: "cpu", "gpu" or "any"
    num_devices: int  #: 0: any
    min_runs: int  #: number of finished runs that a ranked record needs
    val_every: int  #: steps between declared validations; one more follows the last step
    untimed_cap_s: float  #: limit for everything before the clock
    ranked: bool  #: else results are shown, not ranked
    rank_by: Literal["train time", "steps"] = "train time"  #: fewer is better
    device_kind: str = ""  #: as its driver names it; empty: any
    most_params: int | None = None  #: None: models may have any size
    state_bytes_per_param: float = 16.0  #: at most; a float32 parameter, two moments and one copy make 16


class Fixed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a track fixes: all of its recipe except optimizer, schedule and numbers of steps."""

    recipe: dict[str, Any]  #: the rest of the recipe, as the config of a run describes it
    inputs: dict[str, float]  #: of the model: this times the progress, rounded up, at least 1

    def inputs_at(self, step: int, num_steps: int) -> dict[str, int]:
        """Return the fixed inputs; those of step `num_steps` are for the last validation."""
        return {name: max(1, math.ceil(most * (step / num_steps))) for name, most in self.inputs.items()}


class Track(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One frozen, versioned set of rules."""

    name: str
    version: int
    summary: str
    recipe: str  #: the default
    data: Data
    target: Target
    rules: Rules
    synthetic: dict[str, int] | None = None  #: settings of the generator, if the data is synthetic
    python_docs: dict[str, int] | None = None  #: its BPE and shards, if the data is Python's documentation
    meshes: dict[str, int] | None = msgspec.field(default=None, name="islands")  #: None: one mesh
    fixed: Fixed | None = None  #: None: recipes are free

    @property
    def id(self) -> str:
        """Return name and version: `smoke-cpu@2`."""
        return f"{self.name}@{self.version}"

    def validates_at(self, step: int) -> bool:
        """Return whether a validation precedes `step`. Another one follows the last step."""
        return step % self.rules.val_every == 0


def files() -> dict[str, Path]:
    """Return the files of all tracks, by name in their order."""
    found = (*TRACKS_DIR.parent.glob("*/tracks/*.toml"), *TRACKS_DIR.glob("*.toml"))
    return dict(sorted((path.stem, path) for path in found))


def _file(track: str) -> Path | None:
    """Return the file of a track by its name, or of the version with this id."""
    past = {path.stem: path for path in TRACKS_DIR.glob("past/*.toml")}
    return past.get(track) or files().get(track.partition("@")[0])


def load(name: str) -> Track:
    """Load a track by name, or raise UsageError."""
    if (path := files().get(name)) is None:
        raise unknown("track", name, files())
    return _read(path)


def version(track_id: str) -> Track:
    """Load the version of a track that a record names; raise UsageError if it is not here."""
    if (path := _file(track_id)) is None or (found := _read(path)).id != track_id:
        raise UsageError(f"this version has no track {track_id!a}; use that which made the record")
    return found


def _read(path: Path) -> Track:
    advice = "a track file must hold exactly the fields of speedrun/base/track.py"
    with translate_read_errors(path, advice, kind=UsageError):
        return msgspec.convert(tomllib.loads(path.read_text()), Track)


def sha256(track: str) -> str:
    """Return the digest of the file of a track, by its name or id; there must be one."""
    path = _file(track)
    assert path is not None
    return hashlib.sha256(path.read_bytes()).hexdigest()
