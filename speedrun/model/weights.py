"""The weights of a run, from its newest checkpoint, and tensors of other folders. Both are only read.

A record has no weights: they are in RECORD.checkpoints, next to it, if the run kept some.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from speedrun import recipes
from speedrun.base import mesh as meshes
from speedrun.base import track as tracks
from speedrun.base.atomic_files import read_regular
from speedrun.base.errors import DataError, UsageError, translate_read_errors
from speedrun.base.track import Track
from speedrun.data import tokenizer, vocabulary
from speedrun.data.shards import data_folder
from speedrun.record import layout
from speedrun.science.inputs import Inputs
from speedrun.science.params import SHARDS, Params
from speedrun.science.recipe import describe, no_constants
from speedrun.train import checkpoint
from speedrun.train.program import Program
from speedrun.train.resume_settings import find_recipe, read_settings
from speedrun.train.run_config import folder_of, steps_in

WEIGHTS = "model.safetensors"
#: Dtypes of trained parameters, with their names in a header.
DTYPES = {"float32": "F32", "bfloat16": "BF16"}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Words:
    """The tokenizer of a track, loaded on first use. Ids of synthetic data stand for no text."""

    track: Track
    folder: Path  #: of the track's data

    @property
    def path(self) -> Path | None:
        """The file of the tokenizer, which may be missing; None if ids stand for no text."""
        if self.track.synthetic is not None:
            return None
        is_own = self.track.python_docs is not None
        return self.folder / (vocabulary.TOKENIZER if is_own else vocabulary.RANKS)

    @cached_property
    def tokens(self) -> dict[int, bytes]:
        """The bytes of each id without special ones; empty if ids stand for no text."""
        return (self.encoder and self.encoder.tokens) or {}

    @cached_property
    def encoder(self) -> tokenizer.Tokenizer | None:
        """The tokenizer; None if ids stand for no text.

        Raises:
            DataError: if its file is missing and cannot be downloaded.
        """
        if self.path is None:
            return None
        is_there = self.path.exists() or self.path.name == vocabulary.TOKENIZER
        return tokenizer.load(str(self.path) if is_there else "gpt2")

    def needed(self) -> tokenizer.Tokenizer:
        """Return the tokenizer; raise UsageError if ids stand for no text."""
        if self.encoder is None:
            found = f"ids of {self.track.id} stand for no text"
            raise UsageError(f"{found}; choose a run on text, or give `speedrun sample` --ids 1,2,3")
        return self.encoder

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, after the token that opens a document: i32 [N]."""
        ids = self.needed().encode([text])[0] if text else []
        return np.array([self.track.data.document_token, *ids], np.int32)

    def checked(self, ids: list[int]) -> np.ndarray:
        """Return a prompt of ids, i32 [N]; raise UsageError if it is empty or has an unknown id."""
        most = self.track.data.vocab_size
        if wrong := [index for index in ids if not 0 <= index < most]:
            raise UsageError(f"id {wrong[0]:,} is not in {self.track.id}, which has 0 to {most - 1:,}")
        if not ids:
            raise UsageError("got no ids; need one or more: --ids 1,2,3")
        return np.array(ids, np.int32)


@dataclass(frozen=True)
class Trained:
    """A recipe with the weights that it trained."""

    program: Program
    track: Track
    folder: Path  #: of the track's data
    step: int  #: number of training steps
    packed: Params  #: as `Layout` packs them, in the dtype of training
    run: tuple[Path, str] | None = None  #: the record and run that trained them, if on this machine
    origin: Mapping[str, str] = field(default_factory=dict)  #: of weights from a folder or the hub
    is_ours: bool = True  #: whether a run trained them on the track
    tokenizer: Path | None = None  #: folder of the tokenizer, if not that of the data

    def __str__(self) -> str:
        devices, recipe = self.program.mesh.devices, self.program.recipe
        trained = f" after {self.step:,} steps, trained on {self.track.id}" if self.is_ours else ""
        from_ = "".join(f" | {name} {value[:40]}" for name, value in self.origin.items())
        where = f"{recipe.compute_dtype} on {devices.size} x {devices.flat[0].device_kind}"
        return f"model {recipe.name}{trained}{from_} | {where}"

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for `--json`."""
        step = self.step if self.is_ours else None
        recipe = self.program.recipe
        facts = {"recipe": recipe.name, "step": step, "track": self.track.id, "dtype": recipe.compute_dtype}
        return facts | dict(self.origin)

    @cached_property
    def words(self) -> Words:
        """The tokenizer."""
        return Words(self.track, self.tokenizer or self.folder)

    @property
    def inputs(self) -> Inputs:
        """Scheduled inputs of a validation after `step`."""
        plan = self.program.step.plan
        return plan.at(self.step, plan.schedule, self.program.static_at(self.step))

    @property
    def params(self) -> Params:
        """Parameters by name, as the forward pass gets them: in the compute dtype, vectors in float32."""
        layout, dtype = self.program.layout, self.program.recipe.compute_dtype
        cast = {name: x if name in layout.vectors else x.astype(dtype) for name, x in self.packed.items()}
        return layout.unpack(cast)


def load(
    run: Path, *, data: Path | None = None, recipe: str | None = None, step: int | None = None
) -> Trained:
    """Load the weights of a run onto one device, as `weight_sources.load`; `run` is its record or its checkpoints."""
    folder = run.resolve() if run.name.endswith(".checkpoints") else folder_of(run)
    steps = steps_in(folder)
    if not steps:
        if not folder.exists() and not (run / "runs").is_dir():
            raise UsageError(f"{run} is no run, and no folder of weights; name one, as in runs/first")
        raise UsageError(f"{run} has no weights; run again with --checkpoint-every N, which keeps them")
    kept = read_settings(folder)
    if recipe is None:
        find_recipe(kept, folder.with_name(folder.name.removesuffix(".checkpoints")))
    track = tracks.load(kept.config.track)
    chosen = recipes.load(recipe or kept.config.recipe or track.recipe).override(kept.config.overrides)
    meshes.prepare(track.rules.platform)
    shards = data_folder(track, data or kept.config.data)
    known = () if chosen.constants is no_constants else vocabulary.load(track, shards)
    program = Program(chosen, meshes.make_mesh(1), kept.config.microbatches or SHARDS, vocabulary=known)
    if step is not None and step not in steps:
        raise UsageError(f"{folder} has checkpoints of steps {', '.join(map(str, steps))}; got --step {step}")
    config_sha256 = layout.config_sha256({"recipe": describe(chosen), **kept.split})
    wanted = checkpoint.named({"params": program.state.params})

    def read(at: int) -> tuple[checkpoint.CheckpointFacts, dict[str, jax.Array]]:
        facts = checkpoint.read_facts(folder, at)
        if facts.config_sha256 != config_sha256:
            got = f"{run} was trained with other settings than {chosen.name} has now"
            raise UsageError(f"{got}; check out the commit of the run, or name its own recipe with --recipe")
        return facts, checkpoint.read_arrays(folder, facts, wanted)

    (facts, arrays), damaged = checkpoint.newest_whole(folder, steps if step is None else [step], read)
    for at, damage in damaged.items():
        sys.stderr.write(f"warning: checkpoint {at} is damaged ({damage}); {facts.step} is used\n")
    for name, x in arrays.items():
        if not bool(jnp.all(jnp.isfinite(x.astype(jnp.float32)))):
            found = f"{folder / str(facts.step)}: {name} holds NaN or infinity"
            raise DataError(f"{found}; choose another --step")
    packed = {name.removeprefix("params."): x for name, x in arrays.items()}
    record = folder.with_name(folder.name.removesuffix(".checkpoints")), facts.run_id
    return Trained(program, track, shards, facts.step, packed, record)


# --- files of safetensors


def spec_of(dtype: str, shape: Iterable[int]) -> str:
    """Return dtype and shape of a tensor in the notation of a header."""
    return f"{dtype}{[*shape]}"


class Tensors:
    """The tensors of `model.safetensors` in a folder.

    The file is untrusted. The library checks that tensors cover it without gaps or overlaps, so no shape claims more
    memory than the file has.
    """

    def __init__(self, folder: Path) -> None:
        """Read the header; raise DataError if the file is missing or damaged."""
        from safetensors import SafetensorError, safe_open

        self.folder, path = folder, folder / WEIGHTS
        if not path.is_file():
            raise DataError(f"{path}: no such file; need the weights; copy the folder again")
        with translate_read_errors(path, "need a whole file of safetensors; copy it again", SafetensorError):
            self._file = file = safe_open(path, framework="np")
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
            self.forms = {name: spec_of(x.get_dtype(), x.get_shape()) for name, x in slices.items()}

    def read(self, wanted: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield tensors by name; raise DataError unless they have exactly these names and forms, and are finite.

        All forms are compared before any tensor is read.
        """
        folder = self.folder
        for name in sorted({*wanted} | {*self.forms}):
            got, need = self.forms.get(name), wanted.get(name)
            if got is None or need is None or got not in need:
                what = "is missing" if got is None else f"is {got}"
                needs = f"need {' or '.join(need)}" if need else "the model has no such parameter"
                raise DataError(f"{folder}: parameter {name} {what}; {needs}; name the model's own recipe")
        for name in wanted:
            x = self._file.get_tensor(name)
            if not np.isfinite(x.astype(np.float32, copy=False)).all():
                raise DataError(f"{folder}: {name} holds NaN or infinity; need finite weights; copy it again")
            yield name, x


def read_json(path: Path, kind: type[_T]) -> _T:
    """Read a JSON file; raise DataError if it is missing or malformed."""
    with translate_read_errors(path, "copy or export the folder again"):
        return msgspec.json.decode(read_regular(path), type=kind)
