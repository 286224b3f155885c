"""Finds the weights that a command names: of a run, in an exported folder, or of a GPT-2 in a folder or on the hub."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import msgspec

from speedrun.base import processes
from speedrun.base import track as tracks
from speedrun.base.atomic_files import PARTIAL, give_name
from speedrun.base.errors import UsageError
from speedrun.data import hub, stream
from speedrun.model import exported, transformers_gpt2, weights
from speedrun.model.weights import WEIGHTS, Trained
from speedrun.record import layout
from speedrun.science.params import Params
from speedrun.science.step import TrainState
from speedrun.train import checkpoint
from speedrun.train.preflight import prepare
from speedrun.train.program import Program
from speedrun.train.run_config import RunConfig, folder_of

#: OpenAI's models by name. A folder of that name comes first.
ON_THE_HUB = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}


def load(
    source: Path,
    *,
    data: Path | None = None,
    recipe: str | None = None,
    step: int | None = None,
    dtype: str | None = None,
) -> Trained:
    """Load weights.

    Args:
        source: record, folder of checkpoints, exported folder, folder of a GPT-2 of transformers, or a name in
            `ON_THE_HUB`.
        data: folder of shards. Default: that of the run or the track.
        recipe: name or path of the recipe, if it is not in the package.
        step: checkpoint of a run. Default: the newest.
        dtype: of the computation. Default: that of the recipe.

    Raises:
        UsageError: if there are no such weights, or an argument does not fit them.
        CheckpointError: if a checkpoint is damaged.
        DataError: if weights are missing, damaged or not finite.
    """
    folder, origin = _found(source)
    is_export, is_gpt2 = (folder / exported.FACTS).exists(), (folder / transformers_gpt2.CONFIG).exists()
    if step is not None and (is_export or is_gpt2):
        raise UsageError(f"--step has no effect: {source} has the weights of one step; leave it out")
    if is_export:
        trained = exported.load(folder, data=data, recipe=recipe)
    elif is_gpt2:
        if recipe is not None:
            raise UsageError(f"--recipe has no effect: {source} is a GPT-2; leave it out")
        trained = transformers_gpt2.load(folder, data=data, origin=origin)
    else:
        trained = weights.load(folder, data=data, recipe=recipe, step=step)
    if dtype is None:
        return trained
    changed = trained.program.recipe.override({"compute_dtype": dtype})
    return replace(trained, program=replace(trained.program, recipe=changed))


def packed_for(program: Program, source: Path) -> tuple[Params, Mapping[str, str]]:
    """Return the weights of an exported folder or a GPT-2, packed for a program, and their origin.

    Another recipe may have trained them, if its parameters have the same names, shapes and dtypes.

    Raises:
        UsageError: if there is no such folder.
        DataError: if weights are missing, damaged, not finite, or not exactly those of the program.
    """
    folder, origin = _found(source)
    if (folder / exported.FACTS).exists():
        facts = exported.read(folder)
        packed = exported.placed(program, exported.arrays(folder, program))
        return packed, {"weights": folder.resolve().name, "sha256": facts.weights_sha256}
    if (folder / transformers_gpt2.CONFIG).exists():
        return exported.placed(program, transformers_gpt2.arrays(folder, program)), origin
    raise UsageError(
        f"{source} is no folder of weights; need one with {exported.FACTS} or {transformers_gpt2.CONFIG}; "
        "type: speedrun export RUN --to safetensors"
    )


def _found(source: Path) -> tuple[Path, Mapping[str, str]]:
    """Return the folder of a source, downloaded if necessary, and the origin of its weights."""
    if source.is_file():
        raise UsageError(f"{source} is a file; name the folder that holds it")
    if source.exists() or folder_of(source).exists():
        return source, {"weights": source.resolve().name}
    if (repo := ON_THE_HUB.get(str(source))) is None:
        found = f"{source}: no such folder"
        raise UsageError(f"{found}; name a run, a folder of weights, or one of {', '.join(ON_THE_HUB)}")
    try:
        folder = hub.model_folder(repo, (transformers_gpt2.CONFIG, WEIGHTS))
    except hub.HubError as error:
        raise UsageError(
            f"{repo}: {error}; download its {transformers_gpt2.CONFIG} and {WEIGHTS} elsewhere, and name their folder"
        ) from None
    return folder, {"weights": repo, "revision": folder.name}


# --- `run --init-from`


def start_from(config: RunConfig, source: Path) -> RunConfig:
    """Write given weights as a checkpoint of step 0; return the settings of a run that resumes from it.

    The log of the resumption names the weights and their digest. Resumed runs are never ranked.

    Raises:
        UsageError: if the track is ranked, the run has several processes, or its folder of checkpoints exists.
        DataError: if the weights are missing, damaged, not finite, or not those of the recipe.
    """
    track = tracks.load(config.track)
    if track.rules.ranked:
        found = f"--init-from on {track.id}, which is ranked"
        raise UsageError(f"{found}; need random weights there; choose --track webmini")
    if (count := processes.count()) > 1:
        raise UsageError(f"--init-from in {count} processes; need one; start only one")
    folder = folder_of(config.out)
    if folder.exists():
        raise UsageError(f"{folder} exists already; need a new folder; remove it or pass another --out")
    ready = prepare(config)
    every = config.checkpoint_every or ready.recipe.num_steps
    ready = replace(ready, config=msgspec.structs.replace(config, checkpoint_every=every))
    program = ready.program
    packed, origin = packed_for(program, source)
    fresh = program.init(jax.random.key(config.seed))

    def begin(packed: Params) -> TrainState:
        return fresh._replace(params=packed, opt_state=program.step.transform.init(packed))

    state = jax.jit(begin, out_shardings=program.shardings(program.specs))(packed)
    facts = checkpoint.CheckpointFacts(
        step=0,
        run_id=" ".join(origin.values()),
        config_sha256=layout.config_sha256(ready.described),
        cursor=stream.START,
        tokens_seen=0,
        train_time_s=0.0,
        arrays=checkpoint.described(state),
    )
    # A folder without step 0 would resume from random weights.
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    with checkpoint.opened(partial, ready.resumable, keep=config.keep_checkpoints) as checkpoints:
        checkpoints.save(state, facts)
    give_name(partial, folder)
    return msgspec.structs.replace(ready.config, resume=True)
