"""Checks a run before its record is created."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import msgspec

from speedrun import recipes
from speedrun.base import mesh as meshes
from speedrun.base import processes, provenance, runlog
from speedrun.base import track as tracks
from speedrun.base.atomic_files import is_occupied
from speedrun.base.errors import UsageError
from speedrun.base.sourcefile import recipe_folders
from speedrun.data import shards, stream, vocabulary
from speedrun.record import layout
from speedrun.science.params import SHARDS
from speedrun.science.recipe import Recipe, describe, no_constants
from speedrun.train import memory, recipe_checks
from speedrun.train.program import Program
from speedrun.train.run_config import Resumable, RunConfig, source_roots


@dataclass(frozen=True)
class Ready:
    """Everything that a run needs, checked."""

    config: RunConfig
    track: tracks.Track
    recipe: Recipe
    program: Program
    shards: shards.TrackShards
    folder: Path
    source: str
    num_shards: int  #: that it reads, from the first on

    def data_read(self, ranges: Iterable[runlog.ShardRange]) -> runlog.DataRead:
        """Return the data read so far with the digest of each shard, empty if the shard was deleted."""

        def digest(path: Path) -> str:
            try:
                return shards.sha256(path)
            except OSError:
                return ""

        val, num_scored = self.shards.val[0], self.track.data.val_tokens
        scored = runlog.ShardRange(val.path.name, digest(val.path), val.num_tokens, 0, num_scored)
        train = (msgspec.structs.replace(r, sha256=digest(self.folder / r.name)) for r in ranges)
        return runlog.DataRead(tuple(train), scored, self.val_sha256)

    def stream(
        self, cursor: stream.Cursor, *, process: int = 0, num_processes: int = 1
    ) -> stream.TokenStream:
        """Return the training tokens from a position on."""
        share = {"process": process, "num_processes": num_processes}
        opens = self.track.data.document_token
        return stream.TokenStream(self.shards.train, cursor, **share, document_token=opens)

    @cached_property
    def val_sha256(self) -> str:
        """Return the digest of the scored ids."""
        return layout.sha256(self.shards.val[0].read(0, self.track.data.val_tokens + 1).tobytes())

    @property
    def source_sha256(self) -> str:
        """Return the digest of the source closure."""
        return layout.sha256(self.source.encode())

    @property
    def described(self) -> dict[str, Any]:
        """Return the resolved recipe and its split over devices, as JSON."""
        names = ("num_devices", "replicas", "microbatches", "attention", "remat")
        return {"recipe": describe(self.recipe), **{name: getattr(self.program, name) for name in names}}

    @property
    def facts(self) -> dict[str, str]:
        """Return what must be equal in all processes. Shards are compared by name, size and manifest."""
        names = [(shard.path.name, shard.num_tokens) for shard in self.shards.train]
        data = msgspec.json.encode([names, shards.read_manifest(self.folder)])
        shared = msgspec.structs.replace(self.config, out=Path(), data=None, seed=0)
        options = msgspec.to_builtins(shared, enc_hook=str)
        constants = b"".join(x.tobytes() for x in self.program.step.plan.constants.values())
        return {
            "seed": str(self.config.seed),
            "constants": f"of sha256 {layout.sha256(constants)[:12]}",
            "the output folder": str(self.config.out),
            "settings": f"of sha256 {layout.config_sha256({**self.described, **options})[:12]}",
            "source": f"of sha256 {self.source_sha256[:12]}",
            "packages": str(provenance.software()),
            "environment": str(provenance.environment() | {"CUDA_VISIBLE_DEVICES": "its own"}),
            "training shards": f"whose names, sizes and manifest have sha256 {layout.sha256(data)[:12]}",
            "validation tokens": f"of sha256 {self.val_sha256[:12]}",
        }

    @property
    def resumable(self) -> bytes:
        """Return `Resumable` as JSON. A resumed run keeps its number of replicas."""
        config = msgspec.structs.replace(self.config, replicas=self.program.replicas)
        split = {name: value for name, value in self.described.items() if name != "recipe"}
        return msgspec.json.encode(Resumable(config, split, tuple(map(str, recipe_folders()))), enc_hook=str)


def prepare(config: RunConfig, roots: Sequence[str] = ()) -> Ready:
    """Check everything about a run that can be checked before its folder is made. Its source has `roots`, too."""
    if not 0 <= config.seed < 2**31:
        raise UsageError(f"got seed {config.seed}; need 0 to {2**31 - 1}")
    track = tracks.load(config.track)
    before = provenance.environment()
    recipe = recipes.load(config.recipe or track.recipe).override(config.overrides)
    if changed := {name for name, _ in before.items() ^ provenance.environment().items()}:
        got = f"recipe {recipe.name} sets {', '.join(sorted(changed))}"
        raise UsageError(f"{got}; set it where you start the run")
    _check_out(config)
    meshes.prepare(track.rules.platform)
    _check_platform(track, config)
    num_devices = config.num_devices or track.rules.num_devices or len(jax.devices())
    mesh = meshes.make_mesh(num_devices, config.replicas or processes.num_nodes())
    folder = shards.data_folder(track, config.data)
    known = () if recipe.constants is no_constants else vocabulary.load(track, folder)
    _check_ids(recipe, track)
    microbatches = config.microbatches or max(SHARDS, num_devices)
    program = recipe_checks.checked(Program(recipe, mesh, microbatches, config.attention, known))
    recipe_checks.check_fixed(recipe, program.step.plan.rows, track)
    program = memory.fitted_here(program)
    found = shards.open_track(folder, track.data)
    shapes = [shape for shape in shapes_of(recipe) for _ in range(max(1, config.meshes))]
    num_shards = stream.require_steps(found.train, shapes, track.data.document_token)
    for num_tokens in filter(None, (track.data.val_tokens, track.data.held_tokens)):
        stream.validation_batches(found.val[0], num_tokens, recipe.eval_sequences, recipe.eval_seq_len)
    source = provenance.closure([*source_roots(recipe.name), *roots], [tracks.files()[track.name]])
    _check_source(config, source)
    return Ready(config, track, recipe, program, found, folder, source, num_shards)


def shapes_of(recipe: Recipe) -> list[stream.Shape]:
    """Return the shape of the batch of each step."""
    stages = [stage for stage in recipe.stages for _ in range(stage.num_steps)]
    return [stream.Shape(one.num_sequences, one.seq_len, one.document_tokens) for one in stages]


def _check_source(config: RunConfig, source: str) -> None:
    """Check that the source of a batch or a resumed run has not changed."""
    exists, path = config.batch_sha256 or config.resume, config.out / "source.txt"
    if exists and path.exists() and path.read_bytes() != source.encode():
        hint = f"restore it ('diff' with {path} shows the changes), or start again in another folder"
        raise UsageError(f"the source changed since {config.out} was created; {hint}")


def _check_out(config: RunConfig) -> None:
    """Check that the output folder is new or empty, or that of the declared batch."""
    try:
        taken = is_occupied(config.out)
        declared = layout.sha256((config.out / layout.BATCH).read_bytes()) if config.batch_sha256 else ""
    except OSError as error:
        raise UsageError(f"{config.out}: {error.strerror}; choose an --out you may read and write") from None
    if declared != config.batch_sha256:
        found = f"{config.out / layout.BATCH} is not the declared one"
        raise UsageError(f"{found}; restore it, or declare a new batch")
    if taken and not (config.batch_sha256 or config.resume):
        found = f"{config.out} exists already"
        raise UsageError(f"{found}; need a new folder, or an empty one; remove it or pass another --out")


def _check_platform(track: tracks.Track, config: RunConfig) -> None:
    """Check what the track is for, and the platform: without a usable GPU, JAX silently falls back to the CPU."""
    if (track.meshes is None) == (config.meshes > 0):
        need = "one mesh" if track.meshes is None else "several meshes that train together"
        raise UsageError(f"{track.id} is for {need}; choose another track, or the command that trains so")
    found, needed = jax.default_backend(), track.rules.platform
    if needed not in ("any", found):
        hint = "scripts/install.sh adds JAX for CUDA where there is a driver; or choose another track"
        raise UsageError(f"JAX found a {found}, {track.id} needs a {needed}; {hint}")


def _check_ids(recipe: Recipe, track: tracks.Track) -> None:
    """Check that the recipe has the track's vocabulary, and its document token if it reads documents."""
    known, needed = recipe.config.vocab_size, track.data.vocab_size
    if known < needed:
        raise UsageError(f"recipe {recipe.name} knows {known} ids, {track.id} has {needed}; choose another")
    needed = track.data.document_token
    if (opens := getattr(recipe.config, "document_token", needed)) != needed:
        found = f"recipe {recipe.name} takes id {opens} for the start of a document; {track.id} has {needed}"
        hint = f"--set config.document_token={needed}, --set size=smoke or choose another"
        raise UsageError(f"{found}; {hint}")
