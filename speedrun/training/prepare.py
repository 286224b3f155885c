"""Before a record is begun: what a run was asked to do, and whether it can be done."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import msgspec
import numpy as np

from speedrun.data import inventory, stream
from speedrun.ground import mesh as meshes
from speedrun.ground import processes, provenance
from speedrun.ground import track as tracks
from speedrun.ground.errors import UsageError
from speedrun.ledger import runfile
from speedrun.science import recipes
from speedrun.science.params import SHARDS
from speedrun.science.recipe import Recipe, describe
from speedrun.training import footprint
from speedrun.training.program import Program


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run was asked to do. With `source.txt` and the data it is all that a replay needs."""

    track: str
    out: Path  #: the record folder; must not exist, unless a batch was declared in it
    recipe: str | None = None  #: None: the track's own
    seed: int = 0
    overrides: dict[str, str] = {}  #: settings of the recipe, by dotted name
    data: Path | None = None  #: folder of shards; None: the track's own
    num_devices: int | None = None  #: None: what the track asks for, or all there are
    replicas: int | None = None  #: of the state, each divided over as many devices; None: one for each node
    microbatches: int | None = None  #: None: one for each device, at least as many as a full node has
    attention: str = "auto"  #: its form, as `kernels.choose` names it
    batch_sha256: str = ""  #: of the `batch.json` in `out` that declares this run; empty for a run by itself
    checkpoint_every: int = 0  #: steps; 0: no checkpoints
    keep_checkpoints: int = 2  #: the newest ones; 0: all
    resume: bool = False  #: go on from the newest checkpoint of the run in `out`
    deadlines_s: dict[str, float] = {}  #: of phases, where other than `watchdog.DEADLINES_S`


_T = TypeVar("_T")


def decoded(raw: bytes | msgspec.Raw, kind: type[_T]) -> _T:
    """What another process of ours asks for, from JSON: `RunConfig` and what holds one. Paths come as text.

    Raises:
        msgspec.DecodeError: if it is something else.
    """
    return msgspec.json.decode(raw, type=kind, dec_hook=lambda kind, value: kind(value))


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run with checkpoints, for whoever goes on with it."""

    config: RunConfig
    recipe: runfile.Recipe
    num_devices: int


@dataclass(frozen=True)
class Ready:
    """Everything a run needs, checked; nothing written yet."""

    config: RunConfig
    track: tracks.Track
    recipe: Recipe
    program: Program
    shards: inventory.TrackShards
    folder: Path
    source: str

    @property
    def source_sha256(self) -> str:
        """Digest of the source closure."""
        return runfile.sha256(self.source.encode())

    @property
    def described(self) -> dict[str, Any]:
        """The resolved recipe and how it was split over devices, as JSON."""
        return {
            "recipe": describe(self.recipe),
            "num_devices": self.program.num_devices,
            "replicas": self.program.replicas,
            "microbatches": self.program.microbatches,
            "attention": self.program.attention,
        }

    @property
    def facts(self) -> dict[str, str]:
        """What must be the same in all processes of a run, by name; what shards hold is believed of a manifest."""
        shards = [(shard.path.name, shard.num_tokens) for shard in self.shards.train]
        data = msgspec.json.encode([shards, inventory.read_manifest(self.folder)])
        val_sha256 = stream.validation_sha256(self.shards.val[0], self.track.data.val_tokens)
        options = msgspec.to_builtins(self.config, enc_hook=str)
        del options["out"], options["data"], options["seed"]
        of_node = "CUDA_VISIBLE_DEVICES"
        return {
            "seed": str(self.config.seed),
            "the output folder": str(self.config.out),
            "settings": f"of sha256 {runfile.config_sha256({**self.described, **options})[:12]}",
            "source": f"of sha256 {self.source_sha256[:12]}",
            "packages": str(provenance.software()),
            "environment": str({k: v for k, v in provenance.environment().items() if k != of_node}),
            "training shards": f"whose names, sizes and manifest have sha256 {runfile.sha256(data)[:12]}",
            "validation tokens": f"of sha256 {val_sha256[:12]}",
        }

    @property
    def begun(self) -> bytes:
        """As JSON: what was begun. Whoever goes on does so with as many replicas, on whatever nodes."""
        recipe = runfile.Recipe(self.recipe.name, self.recipe.revision, self.config.overrides)
        config = msgspec.structs.replace(self.config, replicas=self.program.replicas)
        return msgspec.json.encode(Begun(config, recipe, self.program.num_devices), enc_hook=str)


def prepare(config: RunConfig) -> Ready:
    """Checks everything that can be wrong with a run before its folder is made.

    Raises:
        UsageError: unknown track, recipe or setting; device count; too little memory; output folder.
        DataError: shards missing, damaged, foreign or too short.
    """
    track = tracks.load(config.track)
    recipe = recipes.load(config.recipe or track.recipe).override(config.overrides)
    _check_out(config)
    meshes.prepare(track.rules.platform)
    _check_platform(track)
    num_devices = config.num_devices or track.rules.num_devices or len(jax.devices())
    mesh = meshes.make_mesh(num_devices, config.replicas or processes.num_nodes())
    program = Program(recipe, mesh, config.microbatches or max(SHARDS, num_devices), config.attention)
    footprint.require(program, footprint.most_bytes(program))
    folder = inventory.data_folder(track, config.data)
    opened = inventory.open_track(folder, track.data)
    _check_ids(recipe, track)
    stream.require_steps(opened.train, [s.batch_tokens for s in recipe.stages for _ in range(s.num_steps)])
    stream.validation_batches(
        opened.val[0], track.data.val_tokens, recipe.eval_sequences, recipe.eval_seq_len
    )
    source = provenance.closure(
        [f"speedrun.science.recipes.{recipe.name}", "speedrun.training.train"],
        [tracks.TRACKS_DIR / f"{track.name}.toml"],
    )
    _check_source(config, source)
    _check_traces(program)
    return Ready(config, track, recipe, program, opened, folder, source)


def _check_source(config: RunConfig, source: str) -> None:
    """All runs of a batch run one source text, and so does a run that goes on."""
    begun, path = config.batch_sha256 or config.resume, config.out / "source.txt"
    if begun and path.exists() and path.read_bytes() != source.encode():
        raise UsageError(
            f"the source changed since {config.out} was begun; restore it ('diff' with {config.out}/source.txt "
            "shows where), or start a new run in another folder"
        )


def _check_out(config: RunConfig) -> None:
    """A new folder; or the one of a batch, as it was declared."""
    try:
        taken = config.out.exists()
        declared = runfile.sha256((config.out / runfile.BATCH).read_bytes()) if config.batch_sha256 else ""
    except OSError as error:
        raise UsageError(
            f"{config.out}: {error.strerror}; choose an --out that can be read and written"
        ) from None
    if declared != config.batch_sha256:
        raise UsageError(
            f"{config.out / runfile.BATCH} is not the declared one; restore it, or declare a new batch"
        )
    if config.resume:
        return
    if taken and not config.batch_sha256:
        raise UsageError(f"{config.out} exists already; need a new folder; remove it or pass another --out")


def _check_platform(track: tracks.Track) -> None:
    """JAX falls back to the CPU without a word where it finds no GPU that it can use."""
    found, asked = jax.default_backend(), track.rules.platform
    if asked not in ("any", found):
        raise UsageError(
            f"JAX found a {found}, {track.id} needs a {asked}; scripts/install.sh adds JAX for CUDA where there "
            "is a driver; or choose another track"
        )


def _check_traces(program: Program) -> None:
    """Traces all that will be compiled: errors of a recipe, and what a form of attention refuses, are told now."""
    recipe, window = program.recipe, program.fixed_window_at(0)
    state = jax.eval_shape(program.init, jax.random.key(0))

    def ids(num_sequences: int, seq_len: int) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((num_sequences, seq_len), np.int32)] * 2

    for stage in recipe.stages:
        batch = ids(stage.num_sequences, stage.seq_len)
        jax.eval_shape(program.train_step_for(window), state, *batch, program.schedule)
    batch = ids(recipe.eval_sequences, recipe.eval_seq_len)
    jax.eval_shape(program.eval_step_for(window), state.params, *batch, program.schedule, state.step)


def _check_ids(recipe: Recipe, track: tracks.Track) -> None:
    """The recipe must know the track's ids, and the one that opens a document: its mask depends on it."""
    known, needed = recipe.config.vocab_size, track.data.vocab_size
    if known < needed:
        raise UsageError(f"recipe {recipe.name} knows {known} ids, {track.id} has {needed}; choose another")
    opens, needed = recipe.config.document_token, track.data.document_token
    if opens != needed:
        raise UsageError(
            f"recipe {recipe.name} takes id {opens} for the start of a document, {track.id} needs {needed}; "
            f"--set config.document_token={needed}, or choose another recipe"
        )
