"""Before anything is written: what a run was asked to do, and whether it can be done."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec

from speedrun import mesh as meshes
from speedrun import provenance, recipes
from speedrun import track as tracks
from speedrun.data import shards, stream
from speedrun.errors import UsageError
from speedrun.ledger import format
from speedrun.recipe import Recipe, describe
from speedrun.step import Program


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run was asked to do. With `source.txt` and the data it is all that a replay needs."""

    track: str
    out: Path  #: the record folder; must not exist
    recipe: str | None = None  #: None: the track's own
    seed: int = 0
    overrides: dict[str, str] = {}  #: settings of the recipe, by dotted name
    data: Path | None = None  #: folder of shards; None: the track's own
    num_devices: int | None = None  #: None: what the track asks for, or all there are
    microbatches: int | None = None  #: None: one for each device of a full node


@dataclass(frozen=True)
class Ready:
    """Everything a run needs, checked; nothing written yet."""

    config: RunConfig
    track: tracks.Track
    recipe: Recipe
    program: Program
    shards: shards.TrackShards
    folder: Path
    source: str

    @property
    def source_sha256(self) -> str:
        """Digest of the source closure."""
        return format.sha256(self.source.encode())

    @property
    def described(self) -> dict[str, Any]:
        """The resolved recipe and how it was split over devices, as JSON."""
        return {
            "recipe": describe(self.recipe),
            "num_devices": self.program.num_devices,
            "microbatches": self.program.microbatches,
        }


def prepare(config: RunConfig) -> Ready:
    """Checks everything that can be wrong with a run before anything is written or compiled.

    Raises:
        UsageError: unknown track, recipe or setting; device count; output folder.
        DataError: shards missing, damaged, foreign or too short.
    """
    track = tracks.load(config.track)
    recipe = recipes.load(config.recipe or track.recipe).override(config.overrides)
    if config.out.exists():
        raise UsageError(f"{config.out} exists already; need a new folder; remove it or pass another --out")
    meshes.prepare(track.rules.platform)
    num_devices = config.num_devices or track.rules.num_devices or len(jax.devices())
    mesh = meshes.make_mesh(num_devices)
    program = Program(recipe, mesh, *([config.microbatches] if config.microbatches else []))
    folder = shards.data_folder(track, config.data)
    opened = shards.open_track(folder, track.data)
    needed = recipe.config.vocab_size
    if needed < track.data.vocab_size:
        raise UsageError(
            f"recipe {recipe.name} knows {needed} ids, {track.id} has {track.data.vocab_size}; choose another"
        )
    stream.require_steps(opened.train, [s.batch_tokens for s in recipe.stages for _ in range(s.num_steps)])
    stream.validation_batches(
        opened.val[0], track.data.val_tokens, recipe.eval_sequences, recipe.eval_seq_len
    )
    source = provenance.closure(
        [f"speedrun.recipes.{config.recipe or track.recipe}", "speedrun.train"],
        [tracks.TRACKS_DIR / f"{track.name}.toml"],
    )
    return Ready(config, track, recipe, program, opened, folder, source)
