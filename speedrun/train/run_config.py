"""The request for a run, and files that contain their digest. Imports no JAX."""

import hashlib
from pathlib import Path
from typing import TypeVar

import msgspec

from speedrun.base.atomic_files import read_regular
from speedrun.base.runlog import Purpose

RUN = "run.json"  #: in the folder of a run's checkpoints

_T = TypeVar("_T")


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to run. JSON leaves out defaults, so that older sources, which have fewer settings, can read it."""

    track: str
    out: Path  #: the record folder; must not exist, unless a batch was declared in it
    recipe: str | None = None  #: None: the track's own
    seed: int = 0
    overrides: dict[str, str] = {}  #: settings of the recipe, by dotted name
    data: Path | None = None  #: folder of shards; None: the track's own
    num_devices: int | None = None  #: None: what the track asks for, or all there are
    replicas: int | None = None  #: of the state, each divided over as many devices; None: one for each node
    microbatches: int | None = None  #: None: one for each device, at least as many as a full node has
    attention: str = "auto"  #: its implementation, as `kernels.dispatch` names it
    batch_sha256: str = ""  #: of the `batch.json` in `out` that declares this run; empty for a run by itself
    checkpoint_every: int = 0  #: steps; 0: no checkpoints
    keep_checkpoints: int = 2  #: the newest ones; 0: all
    resume: bool = False  #: from the newest checkpoint of the run in `out`
    meshes: int = 0  #: that train together, each as this says; 0: one by itself
    purpose: Purpose = ""
    deadlines_s: dict[str, float] = {}  #: of phases, where other than `keeper.DEADLINES_S`


class Resumable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that a resumed run keeps."""

    config: RunConfig
    split: dict[str, int | str]  #: `preflight.Ready.described` without the recipe
    recipe_folders: tuple[str, ...] = ()  #: of recipes outside the package


def folder_of(record: Path) -> Path:
    """Return the folder of a record's checkpoints."""
    return Path(f"{record.resolve()}.checkpoints")


def steps_in(folder: Path) -> list[int]:
    """Return the steps with a checkpoint, the newest first."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def source_roots(recipe: str) -> list[str]:
    """Return the modules whose closure is the source of a run, in their order, on which its digest depends."""
    return [f"speedrun.recipes.{recipe}", "speedrun.train.recorded"]


def decoded(raw: bytes | msgspec.Raw, kind: type[_T]) -> _T:
    """Decode JSON with paths as strings; raise msgspec.DecodeError for another form."""
    return msgspec.json.decode(raw, type=kind, dec_hook=lambda kind, value: kind(value))


def seal(raw: bytes) -> dict[str, str]:
    """Pack a text with its digest."""
    return {"sha256": hashlib.sha256(raw).hexdigest(), "text": raw.decode()}


def read_sealed(path: Path, kind: type[_T]) -> _T:
    """Read a JSON file that `seal` packed; raise OSError or ValueError if it cannot be read or was changed."""
    found = decoded(read_regular(path), dict[str, str])
    if found != seal(found.get("text", "").encode()):
        raise ValueError("its digest does not fit")
    return decoded(found["text"].encode(), kind)
