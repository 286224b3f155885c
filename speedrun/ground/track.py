"""A track: which tokens are trained on and scored, the loss to reach, the hardware, the clock's rules.

Each track is one frozen file, `tracks/<name>.toml`. Its sha256 goes into every record; a new rule is a
new version. Recipes may not change anything that stands here.
"""

import hashlib
import tomllib
from pathlib import Path

import msgspec

from speedrun.ground.errors import UsageError, unknown

TRACKS_DIR = Path(__file__).parent.parent / "tracks"


class Hub(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the shards can be had ready-made: a dataset repository of the Hugging Face hub."""

    repo: str  #: owner/name
    revision: str  #: a commit pins the data; of a branch, the first download records the commit it found
    train_shards: int  #: so many are fetched where no other number is asked for


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which shards, and what their tokens mean."""

    folder: str  #: where `speedrun run` looks when no --data is given, relative to the data root
    train: str  #: glob of training shards; sorted by name
    val: str  #: glob of validation shards; the first one by name is scored
    val_tokens: int  #: exactly this many targets are scored, from the start of the shard
    vocab_size: int  #: every id is below it
    document_token: int  #: opens each document
    get: str  #: the command that makes or fetches the shards
    sha256: dict[str, str] = {}  #: shard name -> digest; empty where the user brings any shards
    hub: Hub | None = None  #: None: nobody keeps them

    @property
    def is_ours_to_get(self) -> bool:
        """Whether `get` is a command of ours; else it says what the user has to bring."""
        return self.get.startswith("speedrun ")


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run has to reach, in nats per token."""

    loss: float
    entropy_rate: float = 0.0  #: no honest model gets below it; 0 where the rate is not known
    sigma: float | None = None  #: sd of final losses over seeds, from earlier runs; None if unknown


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hardware and clock."""

    platform: str  #: "cpu", "gpu" or "any"
    num_devices: int  #: 0: any
    min_runs: int  #: a record that is to be ranked needs so many finished ones
    val_every: int  #: steps between declared validations; one more after the last step
    untimed_cap_s: float  #: compile and warm-up may take this long before the clock
    ranked: bool  #: by train time; else results are shown, not ranked
    #: Of the whole state, all devices together: a float32 parameter, two moments and one copy make 16.
    state_bytes_per_param: float = 16.0


class PythonDocs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Data made of the documentation that this Python brings along."""

    vocab_size: int  #: of the BPE that is trained on it
    shard_tokens: int


class Track(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One frozen, versioned set of rules."""

    name: str
    version: int
    summary: str
    recipe: str  #: the recipe that runs when none is named
    data: Data
    target: Target
    rules: Rules
    synthetic: dict[str, int] | None = None  #: the generator's settings, where the data is made
    python_docs: PythonDocs | None = None  #: where the data is made of what is installed

    @property
    def id(self) -> str:
        """Name and version, as records and boards print it: `smoke-cpu@1`."""
        return f"{self.name}@{self.version}"

    def validates_at(self, step: int) -> bool:
        """Whether a validation stands before step number `step` (the one at the end is not counted here)."""
        return step % self.rules.val_every == 0


def names() -> list[str]:
    """All tracks that ship with this version."""
    return sorted(path.stem for path in TRACKS_DIR.glob("*.toml"))


def load(name: str) -> Track:
    """Reads a track by name.

    Raises:
        UsageError: if there is no such track (names the nearest one) or its file is malformed.
    """
    path = TRACKS_DIR / f"{name}.toml"
    if name not in names():
        raise unknown("track", name, names())
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Track)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UsageError(
            f"{path}: {error}; a track file must hold exactly the fields of speedrun/ground/track.py"
        ) from None


def sha256(name: str) -> str:
    """Digest of the track's file; records carry it."""
    return hashlib.sha256((TRACKS_DIR / f"{name}.toml").read_bytes()).hexdigest()
