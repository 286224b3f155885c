"""A folder with a trained model: `model.safetensors`, `model.json` (`ModelFacts`), the tokenizer and a model card.

Parameters have the names of the model, and are stored as they were trained.
"""

from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from speedrun import recipes
from speedrun.base import mesh as meshes
from speedrun.base import track as tracks
from speedrun.base.atomic_files import make_record
from speedrun.base.console import clean
from speedrun.base.errors import DataError, UsageError, translate_read_errors
from speedrun.base.recipe_files import is_shipped
from speedrun.board.leaks import refuse_secrets
from speedrun.data import vocabulary
from speedrun.data.shards import data_folder, sha256
from speedrun.model.weights import DTYPES, WEIGHTS, Tensors, Trained, read_json, spec_of
from speedrun.record import layout
from speedrun.record import reader as records
from speedrun.record.logged_run import loss_of
from speedrun.record.summary import sources
from speedrun.science.params import Params, count
from speedrun.science.recipe import Recipe, describe, no_constants
from speedrun.train.program import Program

FACTS = "model.json"
#: Fields of a recipe that only training reads.
_TRAINING = ("summary", "parent", "optimizer", "loss", "carry", "eval_sequences")

_LOAD = """\
```sh
speedrun sample {name}{recipe}
speedrun eval {name}{recipe}
```

`model.safetensors` has the parameters by name. The `settings` in `model.json` name the functions of speedrun {version}
that compute with them.

"""


_CARD = """\
---
library_name: "{library}"
pipeline_tag: "text-generation"
tags: ["speedrun", "{recipe}"]
# license: choose the licence of these weights, and write it here
---

# {recipe} on {track}

A language model, trained by `speedrun`, a speedrun harness in JAX.

| | |
|---|---|
{rows}

## Load it

{load}
## Intended use and limits

This model was trained to reach a loss in little time. It continues text like its training data. It was not trained to
follow instructions or to be correct, safe or fair, and was not tested for any of these. It writes falsehoods, and may
repeat its training data. Do not use it where somebody relies on its output.
"""


class ModelFacts(layout.Strict, frozen=True, tag_field="schema", tag="speedrun.model/1"):
    """Contents of `model.json`."""

    recipe: str
    revision: int
    overrides: dict[str, str]  #: by dotted name
    settings: dict[str, Any]  #: those of the recipe that the forward pass depends on
    step: int
    track: str  #: name and version
    vocab_size: int  #: of the data; the model may have more ids
    document_token: int
    dtypes: dict[str, str]  #: of the parameters that are not float32
    num_params: int
    weights_sha256: str
    tokenizer: Literal["", "tokenizer.json", "r50k_base.tiktoken"]  #: file name; empty if there is none
    tokenizer_sha256: str
    version: str  #: of the harness


def named_arrays(trained: Trained) -> dict[str, np.ndarray]:
    """Return the parameters by name, in the dtype of training, on the host."""
    params = jax.jit(trained.program.layout.unpack)(trained.packed)
    # The library writes the memory of an array, whatever its strides.
    return {name: np.asarray(x, order="C") for name, x in meshes.fetch(params).items()}


def write(trained: Trained, out: Path) -> list[Path]:
    """Write the folder of a model; return its files.

    Raises:
        UsageError: if no run of ours trained the weights, or the folder is not empty.
        DataError: if the tokenizer's file is missing.
    """
    from safetensors.numpy import save

    raw, spoken = save(named_arrays(trained)), tokenizer_file(trained)
    program, data = trained.program, trained.track.data
    table, recipe = program.layout.table, program.recipe
    facts = ModelFacts(
        recipe=recipe.name,
        revision=recipe.revision,
        overrides=dict(recipe.overrides),
        settings=_settings(recipe),
        step=trained.step,
        track=trained.track.id,
        vocab_size=data.vocab_size,
        document_token=data.document_token,
        dtypes={name: spec.dtype for name, spec in table.items() if spec.dtype != "float32"},
        num_params=count(table),
        weights_sha256=layout.sha256(raw),
        tokenizer=next(iter(spoken), ""),  # pyright: ignore[reportArgumentType]
        tokenizer_sha256=next(map(layout.sha256, spoken.values()), ""),
        version=metadata.version("speedrun"),
    )
    own = "" if is_shipped(recipe.name) else f" --recipe path/to/{recipe.name}.py"
    about = card(trained, "speedrun", _LOAD.format(name=out.name, recipe=own, version=facts.version))
    files = {WEIGHTS: raw, FACTS: records.encode(facts), "README.md": about.encode(), **spoken}
    return save_folder(trained, out, files)


def card(trained: Trained, library: str, load: str) -> str:
    """Return a model card for the hub; `load` says how to load the model with `library`."""
    recipe, track = trained.program.recipe, trained.track
    facts = {
        "recipe": f"{recipe.name}, revision {recipe.revision}: {clean(recipe.summary)}",
        "changed settings": ", ".join(map("=".join, recipe.overrides.items())) or "none",
        "parameters": f"{count(trained.program.layout.table):,}",
        "track": f"{track.id}: {track.summary}",
        "steps": f"{trained.step:,} of {recipe.num_steps:,}",
        "context": f"{recipe.eval_seq_len:,} tokens",
        **_of_the_run(trained),
    }
    rows = "\n".join(f"| {name} | {value.replace('|', '/')} |" for name, value in facts.items())
    return _CARD.format(library=library, recipe=recipe.name, track=track.id, rows=rows, load=load)


def _of_the_run(trained: Trained) -> dict[str, str]:
    """Return rows about the run that trained the weights; none if its record is not here."""
    if trained.run is None or not (trained.run[0] / "runs").is_dir():
        return {}
    record = records.load(trained.run[0])
    run = next((run for run in record.runs if run.folder == trained.run[1]), None)
    if run is None:
        return {}
    val = next((val for val in run.vals if val.step == trained.step), None)
    loss = f"not measured after step {trained.step:,}"
    if val is not None:
        loss = (
            f"{loss_of(val):.4f} nats per token, on {val.tokens:,} tokens in sequences of "
            f"{trained.program.recipe.eval_seq_len:,}; not comparable across contexts or tokenizers"
        )
    return {
        "run": clean(run.folder),
        "date": run.begun.date().isoformat(),
        "hardware": clean("{} x {}".format(*run.hardware)),
        "started from": clean(", ".join(sources(record.runs))) or "random weights",
        "validation loss": loss,
    }


def save_folder(trained: Trained, out: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Make a folder of files; return them.

    Raises:
        UsageError: if no run of ours trained the weights, the folder is not empty, or a text has a secret.
    """
    if not trained.is_ours:
        raise UsageError(f"{trained}: need weights that a run of speedrun trained; name one")
    texts = {name: raw for name, raw in files.items() if name.endswith((".json", ".md"))}
    refuse_secrets(texts, "remove it from the record's title or the settings")
    return make_record(out, files)


def tokenizer_file(trained: Trained) -> dict[str, bytes]:
    """Return the tokenizer's file by name; nothing if ids have no text, or if GPT-2's file is missing.

    Raises:
        DataError: if another tokenizer's file is missing.
    """
    path = trained.words.path
    if path is None or (path.name == vocabulary.RANKS and not path.exists()):
        return {}
    with translate_read_errors(path, "need the tokenizer; name its folder with --data"):
        return {path.name: path.read_bytes()}


def read(folder: Path) -> ModelFacts:
    """Read `model.json`, and verify its digests; raise DataError if a file is missing or damaged."""
    facts = read_json(folder / FACTS, ModelFacts)
    digests = {WEIGHTS: facts.weights_sha256, facts.tokenizer: facts.tokenizer_sha256}
    digests.pop("", None)
    for name, want in digests.items():
        with translate_read_errors(folder / name, "copy the whole folder again"):
            got = sha256(folder / name)
        if got != want:
            raise DataError(f"{folder / name}: sha256 is {got}; {FACTS} says {want}; copy the folder again")
    return facts


def load(folder: Path, *, data: Path | None, recipe: str | None) -> Trained:
    """Load the model of a folder; see `weight_sources.load`."""
    facts = read(folder)
    track = tracks.load(facts.track.partition("@")[0])
    want = track.data.vocab_size, track.data.document_token
    if (got := (facts.vocab_size, facts.document_token)) != want:
        raise UsageError(f"{folder}: vocabulary, document token {got}; {track.id} has {want}; export again")
    chosen = recipes.load(recipe or facts.recipe).override(facts.overrides)
    then, now = facts.settings | {"revision": facts.revision}, _settings(chosen)
    if differing := [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]:
        raise UsageError(
            f"{folder} was trained with other settings than {chosen.name} has now: {', '.join(differing)}; install "
            f"speedrun {facts.version} as it was then, or name the model's own recipe with --recipe"
        )
    meshes.prepare("any")
    known = () if chosen.constants is no_constants else vocabulary.load(track, folder)
    program = Program(chosen, meshes.make_mesh(1), vocabulary=known)
    shards, packed = data_folder(track, data), placed(program, arrays(folder, program))
    origin = {"weights": folder.resolve().name, "sha256": facts.weights_sha256}
    own = folder if facts.tokenizer else None
    return Trained(program, track, shards, facts.step, packed, origin=origin, tokenizer=own)


def arrays(folder: Path, program: Program) -> Iterable[tuple[str, np.ndarray]]:
    """Yield the parameters of a program by name; raise DataError unless the folder has exactly these."""
    wanted = {name: (spec_of(DTYPES[spec.dtype], spec.shape),) for name, spec in program.layout.table.items()}
    return Tensors(folder).read(wanted)


def placed(program: Program, arrays: Iterable[tuple[str, np.ndarray]]) -> Params:
    """Pack parameters, and place them on the mesh of a program."""
    shardings = program.shardings(program.specs).params
    return jax.jit(program.layout.pack, out_shardings=shardings)(dict(arrays))


def _settings(recipe: Recipe) -> dict[str, Any]:
    return {name: value for name, value in describe(recipe).items() if name not in _TRAINING}
